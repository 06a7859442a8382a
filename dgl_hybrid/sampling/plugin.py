# SPDX-License-Identifier: Apache-2.0
"""What the hooks do while the plugin is on."""

from __future__ import annotations

import copyreg
import os
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from dgl.distributed import DistGraph, graph_services, role
from torch import Tensor

from dgl_hybrid.compat.hook_set import Hook, HookSet
from dgl_hybrid.sampling.config import HaloConfig
from dgl_hybrid.sampling.counts import COUNTS
from dgl_hybrid.sampling.halo_graph import HaloGraph
from dgl_hybrid.sampling.halo_store import HaloStore, SharedHalo
from dgl_hybrid.sampling.hooks import answer_pulls, unhooked_pull, withdraw
from dgl_hybrid.sampling.loaders import graph_of_loader, read_loader
from dgl_hybrid.sampling.written import WrittenFields, answer_deletion, publish_table

_PARTITION_PARAMETERS = (
    "g graph_name num_parts out_path num_hops part_method balance_ntypes balance_edges return_mapping "
    "num_trainers_per_machine objtype graph_formats use_graphbolt kwargs"
)
_SERVER_PARAMETERS = (
    "self server_id ip_config num_servers num_clients part_config disable_shared_mem graph_format use_graphbolt"
)
_LOADER_PARAMETERS = "self dataset batch_size shuffle collate_fn drop_last queue_size"

_graphs: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""The `DistGraph`s that were made in this process with the plugin on, by name."""


class HaloPlugin:
    """The stores of this process, by graph, and what every hooked function of DGL does with them.

    Args:
        config: What is asked for.
        written: The table of writes of an earlier one.
    """

    def __init__(self, config: HaloConfig, written: WrittenFields | None = None) -> None:
        self.config = config
        self._stores: dict[str, HaloStore] = {}
        self.written = written
        self._hooks = HookSet(self._make_hooks())

    def install(self) -> None:
        """Puts everything in place, or raises CompatError and changes nothing."""
        self._hooks.install()
        try:
            answer_pulls(self._answer_pull, last=True)
        except BaseException:
            self._hooks.remove()
            raise
        ForkingPickler.register(DistGraph, self._reduce)

    def remove(self) -> None:
        """Gives DGL its functions back and forgets what is held."""
        if _reducers().get(DistGraph) == self._reduce:
            del _reducers()[DistGraph]
        withdraw(self._answer_pull)
        self._hooks.remove()
        self._stores.clear()

    def _make_hooks(self) -> tuple[Hook, ...]:
        def hook(module: str, name: str, parameters: str, action: Callable[..., Any]) -> Hook:
            return Hook(module=f"dgl.distributed{module}", name=name, parameters=parameters, action=action)

        return (
            hook(".partition", "partition_graph", _PARTITION_PARAMETERS, self._partition_graph),
            hook("", "partition_graph", _PARTITION_PARAMETERS, self._partition_graph),
            hook(
                ".graph_services", "_distributed_access", "g nodes issue_remote_req local_access", self._draw_neighbours
            ),
            hook(".kvstore", "KVClient.push", "self name id_tensor data_tensor", self._push),
            hook(".kvstore", "KVClient.delete_data", "self name", self._delete),
            hook(".kvstore", "KVClient.barrier", "self", self._barrier),
            hook(".kvstore", "DeleteDataRequest.process_request", "self server_state", answer_deletion),
            hook(".dist_graph", "DistGraph.__init__", "self graph_name gpb part_config", self._make_graph),
            hook(".dist_graph", "DistGraph.__setstate__", "self state", self._set_state),
            hook(".dist_graph", "DistGraphServer.__init__", _SERVER_PARAMETERS, self._start_server),
            hook(".dist_dataloader", "DistDataLoader.__init__", _LOADER_PARAMETERS, self._make_loader),
        )

    # ---------------------------------------------------------------- stores

    def written_fields(self, client: Any) -> WrittenFields:
        """Returns the one table of writes that this client looks at and writes to."""
        if self.written is None or not self.written.is_of(client):
            self.written = WrittenFields(client)
        return self.written

    def _store_of(self, g: Any, *, share: bool = False) -> HaloStore | None:
        """Returns this process's store of a graph; None where DistDGL itself reads nothing from elsewhere."""
        if os.environ.get("DGL_DIST_MODE", "standalone") == "standalone":
            return None
        if g.get_partition_book().num_partitions() == 1 or g.local_partition is None or g._use_graphbolt:
            return None
        store = self._stores.get(g.graph_name)
        if store is None or not store.is_of(g._client):
            store = HaloStore(g, self.config, self.written_fields(g._client), unhooked_pull, share=share)
            self._stores[g.graph_name] = store
        return store

    @property
    def num_bytes(self) -> int:
        """What all stores of this process hold."""
        return sum(store.num_bytes for store in self._stores.values())

    # ---------------------------------------------------------------- what hooked functions do

    @staticmethod
    def _partition_graph(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Not at the top: whoever imports that module first imports DGL by it, and that turns the plugin on meanwhile.
        from dgl_hybrid.partition import partition_graph

        return partition_graph(*args, **kwargs)

    def _make_loader(
        self,
        original: Callable[..., Any],
        loader: Any,
        dataset: Any,
        batch_size: int,
        shuffle: bool = False,
        collate_fn: Any = None,
        drop_last: bool = False,
        queue_size: int | None = None,
    ) -> None:
        g = graph_of_loader(collate_fn)
        store = None if g is None else self._store_of(g, share=_has_samplers())
        if store is not None and store.can_plan:  # ends of edges are asked of their owners
            with _on_cpu(), store.planning():  # ends of edges take longer than what is made of them
                access = read_loader(g, dataset, batch_size, drop_last, collate_fn, seen=store.edge_loaders)
                if access is not None:
                    store.plan_for(access)
        original(loader, dataset, batch_size, shuffle, collate_fn, drop_last, queue_size)

    def _draw_neighbours(
        self, original: Callable[..., Any], g: Any, nodes: Tensor, issue_remote_req: Any, local_access: Any
    ) -> Any:
        store = self._store_of(g, share=_has_samplers())
        ids = nodes.to(torch.int64)  # DGL takes smaller types, too, and gets what the script gave
        if store is None or not _are_vertices(ids, g):
            return original(g, nodes, issue_remote_req, local_access)
        asked: list[Tensor] = []
        answerable: list[Tensor] = []  # would be, if their lists were held

        def ask(node_ids: Tensor) -> Any:
            request = issue_remote_req(node_ids)
            asked.append(node_ids)
            if HaloGraph.can_answer(request):
                answerable.append(node_ids)
            return request

        request, is_held = self._held_request(store, g, ids, issue_remote_req)
        halo = store.halo_graph
        if request is None or halo is None:
            frontier = original(g, nodes, ask, local_access)
        else:

            def draw(local_graph: Any, book: Any, local_nodes: Tensor) -> Any:
                # Called while the requests to other machines are under way.
                drawn, answer = local_access(local_graph, book, local_nodes), halo.answer(request)
                return graph_services.LocalSampledGraph(
                    torch.cat([drawn.global_src, answer.global_src]),
                    torch.cat([drawn.global_dst, answer.global_dst]),
                    torch.cat([drawn.global_eids, answer.global_eids]),
                )

            COUNTS.held_seeds += int(is_held.sum())
            frontier = original(g, nodes[~is_held], ask, draw)
        if asked:
            COUNTS.remote_sampling_requests += len(asked)
            COUNTS.remote_seeds += sum(len(ids) for ids in asked)
        if answerable:
            store.note_remote_seeds(torch.cat(answerable).to(torch.int64))
        return frontier

    @staticmethod
    def _held_request(store: HaloStore, g: Any, nodes: Tensor, issue_remote_req: Any) -> tuple[Any, Tensor]:
        """The request for those of `nodes` whose lists are held, None if there are none, and which they are."""
        halo = store.halo_graph
        if halo is None:
            return None, nodes
        is_held = halo.holds(nodes)
        held = nodes[is_held]
        if len(held) == 0:
            return None, is_held
        # By owner: the order in which their answers would have come.
        request = issue_remote_req(held[torch.argsort(g.get_partition_book().nid2partid(held), stable=True)])
        return (request if halo.can_answer(request) else None), is_held

    def _answer_pull(self, client: Any, name: str, ids: Tensor) -> Tensor | None:
        if ids.dtype != torch.int64 or ids.dim() != 1 or ids.device.type != "cpu":
            return None  # whatever DGL makes of it
        for store in self._stores.values():
            if store.has_field(client, name):
                return _pull(store, name, ids)
        # Sampler processes may do all the sampling, by a function that does not say from what: learn from reads alone.
        for g in list(_graphs.values()):
            if g._client is client and g.graph_name not in self._stores:
                made = self._store_of(g, share=_has_samplers())
                if made is not None and made.has_field(client, name):
                    return _pull(made, name, ids)
        return None

    @staticmethod
    def _make_graph(original: Callable[..., Any], g: Any, *args: Any, **kwargs: Any) -> None:
        with torch.inference_mode(False):  # PyTorch would count no writes into its parts
            original(g, *args, **kwargs)
        _graphs[g.graph_name] = g

    def _push(
        self, original: Callable[..., Any], client: Any, name: str, id_tensor: Tensor, data_tensor: Tensor
    ) -> None:
        self.written_fields(client).announce(name)
        original(client, name, id_tensor, data_tensor)

    def _delete(self, original: Callable[..., Any], client: Any, name: str) -> None:
        self.written_fields(client).announce(name)  # what comes under this name later is another field
        original(client, name)

    def _barrier(self, original: Callable[..., Any], client: Any) -> None:
        written = self.written
        if written is None and any(
            g._client is client and g.get_partition_book().num_partitions() > 1 for g in list(_graphs.values())
        ):
            written = self.written_fields(client)  # this process may have read nothing, and yet have written
        if written is not None:
            written.announce_direct_writes()
        original(client)

    def _reduce(self, g: Any) -> tuple[Any, ...]:
        """What processes are given of a graph: only samplers take what is held. Copies and files are DGL's own."""
        state = g.__getstate__()
        store = self._stores.get(g.graph_name) if _has_samplers() else None
        return copyreg.__newobj__, (type(g),), state if store is None else (*state, store.shared())  # type: ignore[attr-defined]

    def _set_state(self, original: Callable[..., Any], g: Any, state: Any) -> None:
        shared = state[-1] if isinstance(state[-1], SharedHalo) else None
        with torch.inference_mode(False):
            original(g, state if shared is None else state[:-1])
        if shared is not None:
            store = self._store_of(g)
            if store is not None:
                store.adopt(shared)

    def _start_server(self, original: Callable[..., Any], server: Any, *args: Any, **kwargs: Any) -> None:
        original(server, *args, **kwargs)
        if not server.is_backup_server():
            publish_table(server)


def _pull(store: HaloStore, name: str, ids: Tensor) -> Tensor | None:
    with _on_cpu():
        return store.pull(name, ids)


def _are_vertices(ids: Tensor, g: Any) -> bool:
    """Whether all of these homogeneous ids are. If not, DGL says what comes of it: -1 is not the last vertex."""
    return len(ids) == 0 or (int(ids.min()) >= 0 and int(ids.max()) < int(g.get_partition_book()._num_nodes()))


def _on_cpu() -> AbstractContextManager[Any]:
    """Tensors of ours are made there, whatever device a script has made PyTorch's default."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def _reducers() -> dict[type, Any]:
    """What `ForkingPickler.register` adds to, and has no function to take from."""
    reducers: dict[type, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    return reducers


def _has_samplers() -> bool:
    """Whether there are sampler processes to share with; they themselves share with nobody."""
    return role.get_role() != "sampler" and int(os.environ.get("DGL_NUM_SAMPLER", "0")) > 0
