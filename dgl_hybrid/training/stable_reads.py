# SPDX-License-Identifier: Apache-2.0
"""Reads of a `DistGraph` with a loader's id tensors: the same rows tensor every time, until somebody writes.

A static first layer and `EdgeWeightNorm` recognise their inputs by identity, and no row is read from another machine
twice. A write of this process drops what it concerns at once; a write of another is known from the next barrier of the
KVStore or the next epoch on, where all ranks agree what was written.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from dgl.distributed import rpc
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from dgl_hybrid.errors import HybridError
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.ids import Ownership
from dgl_hybrid.graph.tensor_versions import sample_of, version_of
from dgl_hybrid.ops.cpu.resting_rows import own_rows
from dgl_hybrid.sampling.hooks import until_disabled
from dgl_hybrid.training import session
from dgl_hybrid.training.client_hooks import ClientHooks
from dgl_hybrid.training.embeddings import stand_aside, stand_by_embeddings
from dgl_hybrid.training.fields import RowSets, was_changed
from dgl_hybrid.training.learned_rows import settle_gradient
from dgl_hybrid.training.step import Step

_NODE_PREFIX = "node~"


@dataclass(frozen=True, eq=False)
class _Stamp:
    """A tensor and its state, which holds as long as nobody wrote and it is the same tensor.

    Of a tensor that was made in inference mode nobody knows whether it was written to: its stamp never holds.
    """

    tensor: weakref.ref[Tensor] | None
    version: int
    sample: Tensor | None = None

    @staticmethod
    def of(tensor: Tensor | None, *, sampled: bool = False) -> _Stamp:
        if tensor is None:
            return _Stamp(None, 0)
        return _Stamp(weakref.ref(tensor), version_of(tensor), sample_of(tensor) if sampled else None)

    def holds(self, tensor: Tensor | None) -> bool:
        if self.tensor is None or tensor is None:
            return self.tensor is None and tensor is None
        is_counted_same = self.tensor() is tensor and not tensor.is_inference() and self.version == tensor._version
        return is_counted_same and (self.sample is None or torch.equal(sample_of(tensor), self.sample))


@dataclass(frozen=True)
class _Read:
    rows: Tensor
    rows_version: int
    local: _Stamp
    """Of this machine's part of the field."""
    ids_global: Tensor
    """On the CPU; the memory of the tensor that was yielded, but not that object, whose end is waited for."""
    is_dropped: bool = False
    """Whether the field was written to since, as far as this rank knows, or the rows are not asked for again."""

    def without_rows(self) -> _Read:
        return replace(self, rows=torch.empty(0), is_dropped=True)


class StableReads:
    """Answers a KVStore client's pulls, and watches its pushes and barriers, for as long as this object lives, but from
    `dgl_hybrid.disable()` on until a loader's next epoch (`find_writes`).

    Args:
        client: Of DGL's KVStore; its `push` and `barrier` are watched through attributes of this one object.
        communicator: Over the trainers.
        row_sets: The id tensors that loaders yielded.
        nodes, edges: Who owns them.
    """

    def __init__(
        self, client: Any, communicator: Communicator, row_sets: RowSets, nodes: Ownership, edges: Ownership
    ) -> None:
        self._client = client
        self._communicator = communicator
        self._row_sets = row_sets
        self._ownership = {"node": nodes, "edge": edges}
        self._reads: dict[tuple[str, int], _Read] = {}
        self._learned: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._handed_out: list[tuple[str, _Read]] | None = None
        """Answered reads with their fields, while a `DistEmbedding` hands out rows."""
        self._steps: list[weakref.ref[Step]] = []
        self._is_pulling = False
        self._pushed: set[str] = set()
        self._agreed: dict[str, _Stamp] = {}
        self._num_writes: Counter[str] = Counter()
        self._watch_mark: object | None = None
        """None while DGL's functions are its own; another one each time that they are hooked."""
        self._hooks = ClientHooks(client)
        # The client outlives this: its hooks do not hold it, and end with it.
        weakref.finalize(self, self._hooks.give_back).atexit = False
        self.num_pulls = 0
        """Reads that went to the KVStore."""
        self._watch()

    def _watch(self) -> None:
        this, mark = weakref.ref(self), object()  # under a function of somebody's ours stays, and does nothing then

        def watcher() -> StableReads | None:
            reads = this()
            return reads if reads is not None and reads._watch_mark is mark else None

        def push(original: Callable[..., Any], name: str, id_tensor: Tensor, data_tensor: Tensor) -> None:
            original(name=name, id_tensor=id_tensor, data_tensor=data_tensor)
            if (reads := watcher()) is not None:
                reads._pushed.add(name)
                reads._drop({name})

        def barrier(original: Callable[..., Any]) -> None:
            original()
            if (reads := watcher()) is not None:
                reads.agree()

        def answer(client: Any, name: str, id_tensor: Tensor) -> Tensor | None:
            reads = watcher()
            return None if reads is None else reads.answer(client, name, id_tensor)

        stand_by_embeddings(self)  # first: of all this it alone may fail, where others have wrapped the method
        self._watch_mark = mark
        until_disabled(self.let_go)
        self._hooks.put_over("push", push)
        self._hooks.put_over("barrier", barrier)
        self._agreed = self._stamps()
        self._hooks.answer_pulls(answer)

    def let_go(self) -> None:
        """Gives DGL's functions back, until the next `find_writes`."""
        self._watch_mark = None
        stand_aside(self)
        self._hooks.give_back()

    # ---------------------------------------------------------------- reads

    def answer(self, client: Any, name: str, id_tensor: Tensor) -> Tensor | None:
        """Returns the rows of an id tensor that a loader yielded; None for all others."""
        if self._is_pulling or client is not self._client:
            return None
        kind = _kind_of(name)
        ids_global = self._row_sets.find(kind, id_tensor)
        if ids_global is None:
            # Some of a loader's ids, say: DGL reads none that are on a GPU.
            return None if id_tensor.device.type == "cpu" else self._read(name, id_tensor.cpu()).to(id_tensor.device)
        key = (name, id(id_tensor))
        read = self._reads.get(key)
        if read is None or not self._is_current(name, read):
            if read is None:
                weakref.finalize(id_tensor, self._reads.pop, key, None)
            else:
                self._settle_if_learned(name, read.ids_global, read.rows)
                # Before others come, or there would be those of two reads.
                read = self._reads[key] = read.without_rows()
            rows = self._pull(name, ids_global, id_tensor.device)
            read = self._reads[key] = _Read(rows, rows._version, _Stamp.of(self._local(name)), ids_global.data)
        if self._handed_out is not None:
            self._handed_out.append((name, read))
        return read.rows

    def _pull(self, name: str, ids_global: Tensor, device: torch.device) -> Tensor:
        # Kept for later reads, so an ordinary tensor even if an evaluation in inference mode comes first.
        with torch.inference_mode(False):
            return own_rows(self._read(name, ids_global).to(device))

    def _read(self, name: str, ids: Tensor) -> Tensor:
        """Reads from the servers."""
        self.num_pulls += 1
        self._is_pulling = True
        try:
            rows: Tensor = self._client.pull(name=name, id_tensor=ids)
            return rows
        finally:
            self._is_pulling = False

    def _is_current(self, name: str, read: _Read) -> bool:
        is_as_read = not read.is_dropped and not was_changed(read.rows, read.rows_version)
        return is_as_read and read.local.holds(self._local(name))

    def forget(self, ids: Tensor) -> None:
        """Drops the rows of one id tensor; they are read again if asked for."""
        for key, read in list(self._reads.items()):
            if key[1] == id(ids):
                self._reads[key] = read.without_rows()

    def has_as_it_is(self, name: str, rows: Tensor) -> bool:
        """Whether `rows` is what a read of this field returned, and nobody has changed it since."""
        return any(
            field == name and read.rows is rows and not was_changed(rows, read.rows_version)
            for (field, _), read in self._reads.items()
        )

    def identify(self, name: str, rows: Tensor, *, is_current: bool = False) -> bool:
        """Whether `rows` is what a read of this field returned.

        Args:
            is_current: And nobody is known to have written since. A rank knows of its own pushes at once, of others'
                when all have agreed.
        """
        found = [read for (field, _), read in self._reads.items() if field == name and read.rows is rows]
        return any(not (read.is_dropped and is_current) for read in found)

    # ---------------------------------------------------------------- embeddings

    def stand_by(self, hand_out: Callable[[], Tensor], name: str, ids: Tensor) -> Tensor:
        """Lets a `DistEmbedding` hand out rows, on any device, and takes care of their gradient.

        Scripts may ask for some of a loader's ids, or for copies of them (`embedding(input_nodes[mask])`): within its
        epoch these are rows that ranks share, too.

        Raises:
            HybridError: In backward, on all ranks: any of them asked for a row twice in one call.
        """
        self._handed_out = []
        try:
            rows = hand_out()
            if rows.device.type == "cpu":
                # DGL's copy to the host does not wait where pulls answer on a GPU, which only ours do.
                for gpu in {read.rows.device for _, read in self._handed_out if read.rows.is_cuda}:
                    torch.cuda.current_stream(gpu).synchronize()
            known = [(field, read.ids_global) for field, read in self._handed_out]
        finally:
            self._handed_out = None
        for field, ids_global in known:
            self._settle_if_learned(field, ids_global, rows)
        if not known and rows.requires_grad and self._has_open_step and not session.is_paused():
            self._settle_if_learned(name, ids.detach().to("cpu", torch.int64), rows, may_repeat=True)
        return rows

    def follow(self, step: Step) -> None:
        """Takes note of an epoch that begins: until it is over, what is learned is of the whole graph."""
        self._steps = [ref for ref in self._steps if ref() is not None] + [weakref.ref(step)]

    @property
    def _has_open_step(self) -> bool:
        steps = [step for ref in self._steps if (step := ref()) is not None]
        # Of a batch that the script has taken out of its loop only what comes before the model has run; of one that it
        # evaluates, as `infer` does, nothing: what else is learned meanwhile is its own.
        return any(
            step.with_gradients and not (step.is_over or step.is_replaced or (step.is_left and step.was_trained))
            for step in steps
        )

    def note_forward(self) -> None:
        """Takes care of the gradients of all rows that the script has made leaves itself; before their backward.

        Raises:
            HybridError: In training, where rows may have been read that nobody has taken note of.
        """
        if self._watch_mark is None and torch.is_grad_enabled():
            raise HybridError(
                "dgl_hybrid.disable() was called since a FullGraphLoader on a DistGraph has yielded this batch: from "
                "then on gradients of rows that servers hand out could be those of one rank alone. Call it between "
                "epochs, on all ranks, and take the batch anew, or compute under torch.no_grad()."
            )
        for (name, _), read in list(self._reads.items()):
            self._settle_if_learned(name, read.ids_global, read.rows)

    def _settle_if_learned(self, name: str, ids_global: Tensor, rows: Tensor, *, may_repeat: bool = False) -> None:
        if not (rows.requires_grad and rows.is_leaf) or rows in self._learned or self._communicator.world_size == 1:
            return
        self._learned[rows] = None
        ownership, communicator = self._ownership[_kind_of(name)], self._communicator

        def settle(grad: Tensor) -> Tensor:
            if may_repeat:
                # Here, not where they were asked for: one rank may ask for rows that no loss is made of.
                with communicator.agreed():
                    _check_distinct(ids_global)
            return settle_gradient(grad, ids_global, ownership, communicator)

        rows.register_hook(settle)

    # ---------------------------------------------------------------- writes

    def num_writes(self, name: str) -> int:
        """Counts the agreements that found the field written: equal on all ranks."""
        return self._num_writes[name]

    def agree(self) -> None:
        """Makes writes of any rank known to all. Collective, except after the process group's end."""
        if self._communicator.world_size > 1 and self._communicator.backend != "kvstore" and not dist.is_initialized():
            return
        written = self.find_writes()
        if any(count for (count,) in self._communicator.gather_ints([len(written)])):
            self.spread_writes(written)

    def find_writes(self) -> set[str]:
        """Returns what this process wrote since it was last asked; all of it has arrived where it belongs.

        After `disable` nobody has seen that: everything, then, and from now on writes are seen again.
        """
        if self._watch_mark is None:
            self._watch()
            self._pushed = set(self._agreed)
        written = {name for name in self._agreed if not self._agreed[name].holds(self._local(name))} | self._pushed
        if self._pushed:
            self._fence()
        self._pushed = set()
        self._agreed = self._stamps()
        return written

    def spread_writes(self, written: set[str]) -> None:
        """Makes what `find_writes` returned on any rank be read again on all. Collective."""
        everywhere = {name for names in self._communicator.gather_json(sorted(written)) for name in names}
        # What others pushed may have come into a part of this machine after the samples were taken, and has by now.
        self._agreed |= {name: stamp for name, stamp in self._stamps().items() if name in everywhere}
        self._num_writes.update(everywhere)
        self._drop(everywhere)

    def _fence(self) -> None:
        """Waits until every server has done what this process pushed: an answer comes after all that was sent before.

        A barrier alone meets at one server, while pushes may still be under way to the others.
        """
        if self._communicator.world_size == 1:
            return
        num_servers = self._client.num_servers
        for server in range(num_servers):
            rpc.send_request(server, rpc.GetNumberClientsRequest(rpc.get_rank()))
        for _ in range(num_servers):
            rpc.recv_response()

    def _drop(self, names: set[str]) -> None:
        # Replaced, not removed: each key has a finalizer already.
        for key, read in list(self._reads.items()):
            if key[0] not in names:
                continue
            if read.rows.requires_grad:  # a step has pushed into what it learns: the rows and their gradient may go
                self._settle_if_learned(key[0], read.ids_global, read.rows)
                self._reads[key] = read.without_rows()
            else:
                self._reads[key] = replace(read, is_dropped=True)

    def _local(self, name: str) -> Tensor | None:
        rows: Tensor | None = self._client.data_store.get(name)
        return rows

    def _stamps(self) -> dict[str, _Stamp]:
        return {name: _Stamp.of(rows, sampled=True) for name, rows in self._client.data_store.items()}


def _check_distinct(ids_global: Tensor) -> None:
    if len(torch.unique(ids_global)) < len(ids_global):
        raise HybridError(
            f"a DistEmbedding was asked for {len(ids_global)} rows, some of them twice, within an epoch of a "
            f"FullGraphLoader: ranks share them, and their gradients are summed by row. Ask for each once, best by "
            f"the ids that the loader yields, and index what comes: embedding(input_nodes)[positions]."
        )


def _kind_of(name: str) -> str:
    return "node" if name.startswith(_NODE_PREFIX) else "edge"
