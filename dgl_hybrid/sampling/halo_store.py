# SPDX-License-Identifier: Apache-2.0
"""What one process holds of other machines' parts of one graph, and how it decides what that is.

A loader says what an epoch will read (`loaders`, `expected_reads`); measured costs and the budget choose the in-edge
lists and rows that save the most (`choose`). Lists are fetched at once, since the decision needs them; the rows of a
field when it is first read. Scripts whose loaders say nothing are learnt from (`observed`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from dgl.distributed import role
from torch import Tensor

from dgl_hybrid.exchange.segments import difference, find_sorted, gather_segments
from dgl_hybrid.sampling.choose import HoldChoice, RemoteCosts, choose_held
from dgl_hybrid.sampling.config import HaloConfig
from dgl_hybrid.sampling.counts import COUNTS
from dgl_hybrid.sampling.expected_reads import ExpectedReads, LoaderAccess, add_reads, expect_reads
from dgl_hybrid.sampling.free_memory import free_memory_bytes, free_shared_memory_bytes
from dgl_hybrid.sampling.halo_graph import HaloGraph, HaloTensors, pack_lists
from dgl_hybrid.sampling.held_rows import HeldFields, HeldRows, Pull
from dgl_hybrid.sampling.id_index import worthwhile_table_bytes
from dgl_hybrid.sampling.in_edge_lists import InEdgeLists
from dgl_hybrid.sampling.list_sizes import fitting, list_sizes
from dgl_hybrid.sampling.observed import ObservedReads, most_counted
from dgl_hybrid.sampling.remote_costs import measure_remote_costs
from dgl_hybrid.sampling.written import WrittenFields

_logger = logging.getLogger(__name__)

_EXPLORE_BYTES = 256 * 2**20
"""Lists that may be held for a moment, beyond the budget, to decide by."""
_FETCHED_OF_HELD = 1.5
"""What lists take as they are fetched, of what they take at most where they are held: short ones of small graphs."""
_FREE_PLANS = 8
"""So many loaders are planned for, however long it takes: training, validation and test of a script or two."""
_PLANNING_SHARE = 0.1
"""Of the time since the first plan, that further ones may have taken."""
_NARROW_BYTES = 16
"""Rows up to this size (labels, masks) are read for the seeds; a little of the budget is kept for them."""
_NARROW_SHARE = 0.05
_AUTO_SHARE = 0.25
_SHARED_MEMORY_SHARE = 0.25
"""Of what is free there: batches on their way from sampler processes need room, too."""


@dataclass(frozen=True, kw_only=True)
class SharedHalo:
    """What a trainer's sampler processes get of its store: tensors in shared memory."""

    lists: HaloTensors | None
    rows: dict[str, tuple[Tensor, Tensor]]
    num_silences: int
    """As `WrittenFields.num_silences` was when the rows were read."""


class HaloStore:
    """The store of one graph in one process.

    Args:
        g: The `DistGraph`; not kept.
        config: Strategy and budget.
        written: Which fields nobody has written into.
        pull_unheld: Reads rows by client, field name and ids, past this store.
        share: There are sampler processes to share with.
    """

    def __init__(
        self,
        g: Any,
        config: HaloConfig,
        written: WrittenFields,
        pull_unheld: Callable[[Any, str, Tensor], Tensor],
        *,
        share: bool,
    ) -> None:
        self._written = written
        self._pull_unheld = pull_unheld
        self._client = g._client
        self._book = g.get_partition_book()
        self._share = share
        self._ntypes: list[str] = list(g.ntypes)
        self._etypes: list[tuple[str, str, str]] = list(g.canonical_etypes)
        self._is_holding = config.strategy != "depcomm"
        self._is_unlimited = config.parsed_budget().is_unlimited
        """All that is read is wanted, as far as there is room."""
        self._num_silences = written.num_silences
        self._budget_bytes = _find_budget(config, self._node_bytes(), self._client, share=share and self._is_holding)
        self._list_sizes = list_sizes(self._book, self._budget_bytes)
        # Without in-edges by vertex (a job may keep the graph as edge lists alone) nothing can be foreseen.
        has_lists = "csc" in g.local_partition.formats()["created"]
        self._lists = InEdgeLists(g) if self._is_holding and has_lists else None
        self._planned: set[tuple[object, ...]] = set()
        self.edge_loaders: set[tuple[object, ...]] = set()
        """That of `read_loader`."""
        self._first_plan_at = 0.0
        self._planning_s = 0.0
        self._expected = ExpectedReads.none()
        self._chosen = torch.empty(0, dtype=torch.int64)
        """Vertices whose rows were chosen to be held, ascending."""
        self._costs: RemoteCosts | None = None
        self._narrow_reserve = 0.0
        self.halo_graph: HaloGraph | None = None
        self._rows = HeldFields()
        self._held_sizes: dict[str, int] = {}
        self._observed_rows: dict[str, ObservedReads] = {}
        self._observed_seeds = ObservedReads(most_counted(self._budget_bytes))
        if self._is_holding and not self._written.is_guarded:
            _logger.warning(
                "the server of machine %s runs without dgl_hybrid, so nobody can be told of all writes: in-edge lists "
                "will be held, rows will not. Call dgl_hybrid.enable() before dgl.distributed.initialize(), on every "
                "machine.",
                ", ".join(self._written.unserved),
            )

    # ---------------------------------------------------------------- deciding

    @property
    def can_plan(self) -> bool:
        """Whether it is of use to know what a loader will read: anything may be held, and planning has not had its
        share of the time. (A script may make a loader over other seeds in each epoch; what such a loader reads is
        learnt as it runs, as what any loader does that nothing is known of.)
        """
        if self._lists is None:
            return False
        passed_s = time.perf_counter() - self._first_plan_at
        return len(self._planned) < _FREE_PLANS or self._planning_s <= _PLANNING_SHARE * passed_s

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """Counts what is done inside as planning."""
        start_s = time.perf_counter()
        self._first_plan_at = self._first_plan_at or start_s
        try:
            yield
        finally:
            self._planning_s += time.perf_counter() - start_s

    def plan_for(self, loader: LoaderAccess) -> None:
        """Adds a loader's reads to what is expected, and decides anew what is held."""
        if self._lists is None or loader.key in self._planned:
            return
        self._planned.add(loader.key)
        if loader.is_layer_wise and not self._is_unlimited:
            return  # what is read once is not worth room that the training loader could use
        start_s = time.perf_counter()
        edge_type_of = self._edge_type_of if len(self._etypes) > 1 else None
        new = expect_reads(loader, self._lists, make_known=self._explore, edge_type_of=edge_type_of)
        self._expected = add_reads(self._expected, new)
        foreign = self._book.nid2partid(self._expected.ids) != self._book.partid
        ids = self._expected.ids[foreign]
        if len(ids):
            self._costs = self._costs or self._measure(ids, loader)
            choice = self._choose(ids, foreign)
            self._chosen = ids[choice.rows]
            self._hold_lists(ids[choice.lists])
            if self._room_bytes() < 0:
                self._rows.clear()  # more lists than before: the rows are chosen and fetched anew
            for held in self._rows.by_name.values():
                held.is_complete = False
            _logger.info(
                "expects to read %d vertices of other machines; holds %d in-edge lists (%.1f MB), rows of about %d "
                "(decided in %.1f s)",
                len(ids),
                int(choice.lists.sum()),
                0.0 if self.halo_graph is None else self.halo_graph.num_bytes / 1e6,
                int(choice.rows.sum()),
                time.perf_counter() - start_s,
            )

    def _explore(self, ids: Tensor, reads: Tensor) -> None:
        """Fetches the lists of a frontier that are not known, those drawn from most often first, up to a limit."""
        assert self._lists is not None
        unknown = ~self._lists.is_known(ids)
        ids, reads = ids[unknown], reads[unknown]
        ids = ids[torch.argsort(reads, descending=True, stable=True)]
        num_left_out = len(ids) - self._lists.fetch(ids, room_bytes=self._explore_bytes())
        if num_left_out:
            _logger.info("decides without the in-edge lists of %d vertices: they would not fit", num_left_out)

    def _explore_bytes(self) -> float:
        assert self._lists is not None
        return max(self._budget_bytes, _EXPLORE_BYTES) - self._lists.fetched_bytes

    def _choose(self, ids: Tensor, foreign: Tensor) -> HoldChoice:
        assert self._lists is not None
        assert self._costs is not None
        known = self._lists.is_known(ids)
        degrees = torch.zeros(len(ids), dtype=torch.int64)
        degrees[known] = self._lists.degrees(ids[known])
        seed_reads = torch.where(known, self._expected.as_frontier[foreign], 0.0)
        is_seed = self._expected.as_seed[foreign] > 0
        narrow_bytes = sum(size for size in self._row_bytes().values() if size <= _NARROW_BYTES)
        self._narrow_reserve = min(
            float(narrow_bytes * int(is_seed.sum())), _NARROW_SHARE * min(self._budget_bytes, 2.0**62)
        )
        can_hold_rows = self._written.is_guarded
        budget_bytes = self._budget_bytes - self._narrow_reserve
        row_bytes = self._widest_row_bytes(ids)
        choices = [
            choose_held(
                seed_reads=seed_reads,
                row_reads=self._expected.as_input[foreign] * float(can_hold_rows),
                list_bytes=list_bytes,
                row_bytes=row_bytes,
                costs=self._costs,
                budget_bytes=budget_bytes - aside_bytes,
            )
            # All sources of lists are expected to be read.
            for list_bytes, aside_bytes in self._list_sizes.ways(degrees, len(self._expected.ids))
        ]
        return max(choices, key=lambda choice: choice.saving_s)

    def _measure(self, ids: Tensor, loader: LoaderAccess) -> RemoteCosts:
        if self._is_unlimited:
            return RemoteCosts(row_s=1.0, seed_s=1.0, latency_s=0.0)  # everything is held: nothing to weigh
        owner = self._book.nid2partid(ids)
        part = int(torch.mode(owner).values)
        ids = ids[owner == part]
        ntype, typed_ids = self._typed_nodes(ids)
        most = int(torch.mode(ntype).values)
        ids, row_ids = ids[ntype == most], typed_ids[ntype == most]
        fields = {
            name: size for name, size in self._row_bytes().items() if self._policy(name).type_name == self._ntypes[most]
        }
        name = max(fields, key=lambda known: fields[known], default=None)
        pull = None if name is None else self._pull_of(name)
        first = loader.fanouts[-1]
        fanout = first if isinstance(first, int) else max(first)
        return measure_remote_costs(pull, ids, part, fanout=fanout, row_ids=row_ids)

    def _hold_lists(self, ids: Tensor) -> None:
        assert self._lists is not None
        if len(ids) == 0:
            self.halo_graph = None
        elif self.halo_graph is None or not torch.equal(self.halo_graph.tensors.ids, ids):
            self.halo_graph = self._pack(ids)
        self._lists.keep_held(self.halo_graph)

    def _pack(self, ids: Tensor) -> HaloGraph:
        assert self._lists is not None
        tensors = pack_lists(ids, self._lists.lookup(ids), self._book)
        if self._share:
            tensors.share()
        room_bytes = self._budget_bytes - self._narrow_reserve - self._rows.num_bytes
        if tensors.num_bytes + worthwhile_table_bytes(len(ids), tensors.bound, room_bytes) > room_bytes:
            room_bytes = 0.0  # no table
        return HaloGraph(tensors, self._book.partid, room_bytes=room_bytes)

    # ---------------------------------------------------------------- reading

    def is_of(self, client: Any) -> bool:
        """Whether this store reads through that client of the KVStore."""
        return self._client is client

    def has_field(self, client: Any, name: str) -> bool:
        """Whether a read of that field is this store's to answer."""
        return self._client is client and name in client._part_policy

    def pull(self, name: str, ids: Tensor) -> Tensor:
        """Reads rows of a field: those held from here, the others as DistDGL does.

        Args:
            name: The KVStore's name of the field.
            ids: (n,) ids within the field's type.
        """
        original = self._pull_of(name)
        self._written.announce_direct_write(name)
        self._drop_what_may_be_old()
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self._policy(name).get_size()):
            return original(ids)  # DGL's error
        if not self._is_holding or not self._written.may_hold(name):
            self._rows.drop(name)
            self._count_remote(name, ids)
            return original(ids)
        held = self._rows.by_name.get(name)
        if held is None or not held.is_complete:
            held = self._hold_rows(name, ids)
        rows, not_held = held.read(ids, original)
        remote = self._count_remote(name, not_held)
        if len(remote):
            self._note_remote_rows(name, held, remote)
        return rows

    def _drop_what_may_be_old(self) -> None:
        """Gives up all rows if somebody could have written, since they were read, without telling."""
        if self._num_silences != self._written.num_silences:
            self._rows.clear()  # first: `shared` looks at both from another thread
            self._num_silences = self._written.num_silences

    def _hold_rows(self, name: str, ids: Tensor) -> HeldRows:
        """Fetches what is wanted of a field, once it is known whether it is read for the seeds or for all inputs."""
        held = self._rows.by_name.get(name)
        if held is None:
            held = self._make_rows(name)
            self._rows.put(name, held)
        wanted = self._wanted(name, held, ids)
        if wanted is not None:
            held.fetch(wanted[~held.holds(wanted)], self._pull_of(name), self._room_bytes(name))
            self._rows.put(name, held)
            held.is_complete = True
        return held

    def _wanted(self, name: str, held: HeldRows, ids: Tensor) -> Tensor | None:
        """The ids worth holding, the most read first; None while nothing is expected or none of `ids` is remote."""
        if len(self._expected.ids) == 0:
            return None
        policy = self._policy(name)
        remote = torch.unique(ids[policy.to_partid(ids) != self._book.partid])
        if len(remote) == 0:
            return None
        if not policy.is_node:
            return self._wanted_edges(policy)
        ntype, typed_ids = self._typed_nodes(self._expected.ids)
        of_type = ntype == self._ntypes.index(policy.type_name)
        of_type[of_type.clone()] = policy.to_partid(typed_ids[of_type]) != self._book.partid
        candidates, reads = typed_ids[of_type], self._expected.as_input[of_type]
        held.expected = torch.sort(candidates).values
        as_seed = self._expected.as_seed[of_type]
        seeds = torch.sort(candidates[as_seed > 0]).values
        if not held.is_read_for_inputs and bool(find_sorted(seeds, remote)[0].all()):
            held.read_for, reads = seeds, as_seed
        else:
            held.read_for, held.is_read_for_inputs = None, True
            reads = torch.where(find_sorted(self._chosen, self._expected.ids[of_type])[0], reads, 0.0)
        order = torch.argsort(reads, descending=True, stable=True)
        return candidates[order[reads[order] > 0]]

    def _wanted_edges(self, policy: Any) -> Tensor | None:
        """In-edges of the held lists: their data is read beside them."""
        if self.halo_graph is None:
            return None
        tensors = self.halo_graph.tensors
        found, position = find_sorted(self._expected.ids, tensors.ids)
        reads = torch.where(found, self._expected.as_frontier[position], 0.0)  # 0: learnt of while running
        vertices = torch.argsort(reads, descending=True, stable=True)
        _, positions = gather_segments(tensors.indptr.to(torch.int64), vertices)
        eids = tensors.eids_at(positions)
        if len(self._etypes) == 1:
            return eids
        etype, typed = (torch.as_tensor(part).to(torch.int64) for part in self._book.map_to_per_etype(eids))
        return typed[etype == self._etypes.index(policy.type_name)]

    def _note_remote_rows(self, name: str, held: HeldRows, remote: Tensor) -> None:
        """Learns from rows that had to be read: more is wanted of the field, or they may come back."""
        if held.read_for is not None and not bool(find_sorted(held.read_for, remote)[0].all()):
            # Read for inputs as well: fetched at the next read, of whatever that is.
            held.is_read_for_inputs, held.is_complete = True, False
            return
        if self._room_bytes(name) < held.row_bytes:
            return
        if name not in self._observed_rows:
            self._observed_rows[name] = ObservedReads(most_counted(self._room_bytes(name)))
        observed = self._observed_rows[name]
        # The others were decided about.
        if observed.add(difference(remote, held.expected)):
            often = observed.review(self._min_count)
            held.fetch(often[~held.holds(often)], self._pull_of(name), self._room_bytes(name))
            self._rows.put(name, held)
            observed.forget(often)

    @property
    def _min_count(self) -> int:
        """Reads that make an id worth holding: what is read once only costs as much to hold as to read."""
        return 1 if self._is_unlimited else 2

    def _pull_of(self, name: str) -> Pull:
        return lambda ids: self._pull_unheld(self._client, name, ids)

    def _count_remote(self, name: str, ids: Tensor) -> Tensor:
        if len(ids) == 0:
            return ids
        remote = ids[self._policy(name).to_partid(ids) != self._book.partid]
        COUNTS.remote_rows += len(remote)
        COUNTS.remote_bytes += len(remote) * self._row_bytes_of(name)
        return remote

    # ---------------------------------------------------------------- sampling

    def note_remote_seeds(self, ids: Tensor) -> None:
        """Counts vertices that other machines are asked to draw from; lists that come back often are held."""
        if self._lists is None or self._room_bytes() < self._list_sizes.list_bytes:
            return
        # The others were decided about.
        if self._observed_seeds.add(difference(ids, self._expected.ids)):
            held = torch.empty(0, dtype=torch.int64) if self.halo_graph is None else self.halo_graph.tensors.ids
            often = difference(self._observed_seeds.review(self._min_count), held)
            # Nothing is asked for that could not be held: reviews of many vertices come again and again.
            room_bytes = self._room_bytes() - self._list_sizes.end_bytes
            if not math.isinf(room_bytes):
                often = often[: max(0, int(room_bytes / self._list_sizes.list_bytes))]
            self._observed_seeds.forget(often)
            fetched_bytes = min(self._explore_bytes(), _FETCHED_OF_HELD * room_bytes)
            self._lists.fetch(often[~self._lists.is_known(often)], room_bytes=fetched_bytes)
            often = often[self._lists.is_known(often)]
            often = often[fitting(self._list_sizes.alone(self._lists.degrees(often)), room_bytes)]
            self._hold_lists(torch.sort(torch.cat([held, often])).values)

    # ---------------------------------------------------------------- sharing with sampler processes

    def shared(self) -> SharedHalo:
        """Returns what sampler processes of this trainer may use."""
        # A queue calls this in a thread of its own: what may be old is left out here, and dropped elsewhere, perhaps
        # meanwhile. Rows that came since count as of before, and are not taken by who has heard of the silence.
        num_silences = self._num_silences
        rows = {} if num_silences != self._written.num_silences else dict(self._rows.by_name)
        return SharedHalo(
            lists=None if self.halo_graph is None else self.halo_graph.tensors,
            rows={name: shared for name, held in rows.items() if (shared := held.shared()) is not None},
            num_silences=num_silences,
        )

    def adopt(self, shared: SharedHalo) -> None:
        """Uses what the trainer shared with this process: again for every loader, since each may add to it."""
        if shared.lists is not None and (
            self.halo_graph is None or not bool(self.halo_graph.holds(shared.lists.ids).all())
        ):
            room_bytes = self._budget_bytes - self._rows.num_bytes
            self.halo_graph = HaloGraph(shared.lists, self._book.partid, room_bytes=room_bytes)
            if self._lists is not None:
                self._lists.keep_held(self.halo_graph)
        self._drop_what_may_be_old()
        if shared.num_silences != self._num_silences:
            return
        for name, (ids, rows) in shared.rows.items():
            held = self._rows.by_name.get(name)
            if held is None or not bool(held.holds(ids).all()):
                self._rows.drop(name)
                held = self._make_rows(name)
                held.adopt(ids, rows, self._room_bytes(name))
                self._rows.put(name, held)

    # ---------------------------------------------------------------- sizes

    @property
    def num_bytes(self) -> int:
        """What is held: rows with their ids, in-edge lists, and the tables by which both are found."""
        lists = 0 if self.halo_graph is None else self.halo_graph.num_bytes
        return lists + self._rows.num_bytes

    def _make_rows(self, name: str) -> HeldRows:
        return HeldRows(self._client._data_store[name], self._policy(name).get_size(), share=self._share)

    def _policy(self, name: str) -> Any:
        return self._client._part_policy[name]

    def _row_bytes_of(self, name: str) -> int:
        part: Tensor = self._client._data_store[name]
        return part.element_size() * math.prod(part.shape[1:])

    def _row_bytes(self) -> dict[str, int]:
        """Of the node fields that may be held."""
        return self._row_bytes_among(self._written.static_names)

    def _row_bytes_among(self, names: Iterable[str]) -> dict[str, int]:
        return {
            name: self._row_bytes_of(name)
            for name in names
            if name in self._client._data_store and self._policy(name).is_node
        }

    def _held_row_bytes(self, name: str) -> int:
        if name not in self._held_sizes:
            self._held_sizes[name] = self._make_rows(name).row_bytes
        return self._held_sizes[name]

    def _node_bytes(self) -> int:
        """What budgets that are a share are a share of: also where only lists can be held."""
        names = self._written.static_names if self._written.is_guarded else self._client.gdata_name_list()
        return sum(size * self._policy(name).get_size() for name, size in self._row_bytes_among(names).items())

    def _widest_row_bytes(self, ids: Tensor) -> Tensor:
        widest = torch.zeros(len(self._ntypes), dtype=torch.int64)
        for name in self._row_bytes():
            ntype = self._ntypes.index(self._policy(name).type_name)
            widest[ntype] = max(int(widest[ntype]), self._held_row_bytes(name))
        return widest[self._typed_nodes(ids)[0]]

    def _room_bytes(self, name: str | None = None) -> float:
        """What is left of the budget; a narrow field may use what is kept for them."""
        if math.isinf(self._budget_bytes):
            return math.inf
        is_narrow = name is not None and self._row_bytes_of(name) <= _NARROW_BYTES
        return self._budget_bytes - self.num_bytes - (0.0 if is_narrow else self._narrow_reserve)

    def _typed_nodes(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Homogeneous ids -> (type index, id within the type)."""
        if len(self._ntypes) == 1:
            return torch.zeros_like(ids), ids
        ntype, typed_ids = self._book.map_to_per_ntype(ids)
        return torch.as_tensor(ntype).to(torch.int64), torch.as_tensor(typed_ids).to(torch.int64)

    def _edge_type_of(self, eids: Tensor) -> Tensor:
        return torch.as_tensor(self._book.map_to_per_etype(eids)[0]).to(torch.int64)


def _find_budget(config: HaloConfig, node_bytes: int, client: Any, *, share: bool) -> float:
    budget = config.parsed_budget()
    asked_bytes = math.inf if budget.num_bytes is None else float(budget.num_bytes)
    if budget.share is not None:
        asked_bytes = budget.share * node_bytes
    if not budget.is_auto and not share:
        return asked_bytes
    addresses = {server[0]: server[1] for server in client._server_namebook.values()}
    machines_here = sum(address == addresses[client.machine_id] for address in addresses.values())
    trainers_here = machines_here * max(1, role.get_num_trainers() // len(addresses))
    processes = trainers_here * (1 + int(os.environ.get("DGL_NUM_SAMPLER", "0")))
    shared_bytes = free_shared_memory_bytes() if share else math.inf
    if budget.is_auto:
        return float(_AUTO_SHARE * min(free_memory_bytes(), shared_bytes) / processes)
    room_bytes = float(_SHARED_MEMORY_SHARE * shared_bytes / trainers_here)
    if asked_bytes > room_bytes:
        _logger.log(
            logging.INFO if math.isinf(asked_bytes) else logging.WARNING,
            "budget %s asks for %.1f MB, but what sampler processes share lies in /dev/shm, of whose %.1f free MB this "
            "trainer may take %.1f: it holds no more. Give its container more of it (--shm-size), or take fewer "
            "sampler processes or none.",
            config.budget,
            asked_bytes / 1e6,
            shared_bytes / 1e6,
            room_bytes / 1e6,
        )
    return min(asked_bytes, room_bytes)
