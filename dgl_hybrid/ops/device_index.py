# SPDX-License-Identifier: Apache-2.0
"""Graphs whose features live on a device that the installed DGL cannot use.

PyPI's DGL is built without CUDA. Its graph indices stay in host memory then, and a `DeviceIndex` stands for one on the
device: it shares the structure, answers questions about it with tensors on the device, and keeps there what models ask
for in every forward (degrees, edges), so that a training step moves no structure. DGL's own kernels cannot run on such
a graph; `routing` gives its operations to our ops.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import dgl
import dgl.heterograph_index
import torch
from dgl.heterograph_index import HeteroGraphIndex
from torch import Tensor

from dgl_hybrid.ops.devices import device_of
from dgl_hybrid.ops.index_notes import kept_relation, notes_of
from dgl_hybrid.ops.sparse_graph import to_keep

_CPU_CONTEXT = (1, 0)  # device type and id, as DGL counts them
_GPU_TYPE = 2


class DeviceIndex(HeteroGraphIndex):
    """A graph index in host memory, answering with tensors on `device`.

    Attributes:
        on_cpu: DGL's own index of the same structure.
        device: Where features live.
    """

    on_cpu: Any
    device: torch.device

    @classmethod
    def of(cls, on_cpu: Any, device: torch.device) -> DeviceIndex:
        """Puts a stand-in on `device` before an index of the CPU."""
        index: DeviceIndex = cls.__new__(cls)
        # DGL copies nothing where the target is the place itself; the handle is of the same structure.
        index.__init_handle_by_constructor__(dgl.heterograph_index._CAPI_DGLHeteroCopyTo, on_cpu, *_CPU_CONTEXT)
        index.on_cpu, index.device = on_cpu, device
        return index

    def __reduce__(self) -> tuple[Any, ...]:
        return DeviceIndex.of, (self.on_cpu, self.device)

    @property
    def ctx(self) -> Any:
        return dgl.ndarray.DGLContext(_GPU_TYPE, self.device.index or 0)

    def copy_to(self, ctx: Any) -> Any:
        return self.on_cpu if ctx.device_type == _CPU_CONTEXT[0] else self._wrap(self.on_cpu)

    def record_stream(self, stream: Any) -> None:
        """Nothing to record: what lies on the device are PyTorch's tensors, which it keeps alive for their users."""

    # ------------------------------------------------------- questions that models ask often, answered on the device

    def edges(self, etype: int, order: str | None = None) -> tuple[Tensor, ...]:
        return self._kept(("edges", etype, order), lambda: self.on_cpu.edges(etype, order))

    def find_edges(self, etype: int, eid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        src, dst, _ = self.edges(etype, "eid")
        return src[eid.long()], dst[eid.long()], eid

    def in_degrees(self, etype: int, v: Tensor) -> Tensor:
        return self._degrees(etype, 1)[v.long()]

    def out_degrees(self, etype: int, v: Tensor) -> Tensor:
        return self.all_out_degrees(etype)[v.long()]

    def all_out_degrees(self, etype: int) -> Tensor:
        """(S,) in the graph's id type; the same tensor on every call."""
        return self._degrees(etype, 0)

    def adjacency_matrix_tensors(self, etype: int, transpose: bool, fmt: str) -> tuple[Any, ...]:
        def ask() -> tuple[Tensor, ...]:
            return tuple(self.on_cpu.adjacency_matrix_tensors(etype, transpose, fmt)[2:])

        ends = self.metagraph.find_edge(etype)
        num_rows, num_columns = (self.num_nodes(ends[side]) for side in ((1, 0) if transpose else (0, 1)))
        return num_rows, num_columns, *self._kept(("adjacency", etype, transpose, fmt), ask)

    def _degrees(self, etype: int, side: int) -> Tensor:
        """Degrees of all destinations (side 1) or sources (side 0) of an edge type."""

        def count() -> tuple[Tensor, ...]:
            ends = self.on_cpu.edges(etype)[side]
            num_nodes = self.num_nodes(self.metagraph.find_edge(etype)[side])
            return (torch.bincount(ends, minlength=num_nodes).to(ends.dtype),)

        return self._kept(("degrees", etype, side), count)[0]

    def _kept(self, key: tuple[Any, ...], ask: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        # Noted for the index of the CPU: a script that moves a graph in every epoch finds its tensors there already.
        kept = notes_of(self.on_cpu).answers
        if (self.device, key) not in kept:
            with torch.inference_mode(False):  # who trains later saves them
                kept[self.device, key] = tuple(to_keep(answer, device=self.device) for answer in ask())
        return kept[self.device, key]

    # ------------------------------------------------------- other questions, asked on the CPU

    def has_nodes(self, ntype: int, vids: Tensor) -> Tensor:
        return self._answer(self.on_cpu.has_nodes(ntype, vids.cpu()))

    def has_edges_between(self, etype: int, u: Tensor, v: Tensor) -> Tensor:
        return self._answer(self.on_cpu.has_edges_between(etype, u.cpu(), v.cpu()))

    def predecessors(self, etype: int, v: int) -> Tensor:
        return self._answer(self.on_cpu.predecessors(etype, v))

    def successors(self, etype: int, v: int) -> Tensor:
        return self._answer(self.on_cpu.successors(etype, v))

    def edge_ids_all(self, etype: int, u: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return self._answers(self.on_cpu.edge_ids_all(etype, u.cpu(), v.cpu()))

    def edge_ids_one(self, etype: int, u: Tensor, v: Tensor) -> Tensor:
        return self._answer(self.on_cpu.edge_ids_one(etype, u.cpu(), v.cpu()))

    def in_edges(self, etype: int, v: Tensor) -> tuple[Tensor, ...]:
        return self._answers(self.on_cpu.in_edges(etype, v.cpu()))

    def out_edges(self, etype: int, v: Tensor) -> tuple[Tensor, ...]:
        return self._answers(self.on_cpu.out_edges(etype, v.cpu()))

    def _answer(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def _answers(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(self._answer(tensor) for tensor in tensors)

    # ------------------------------------------------------- other graphs

    def get_relation_graph(self, etype: int) -> DeviceIndex:
        return self._wrap(kept_relation(self.on_cpu, etype, HeteroGraphIndex.get_relation_graph))

    def reverse(self) -> DeviceIndex:
        return self._wrap(self.on_cpu.reverse())

    def asbits(self, bits: int) -> DeviceIndex:
        return self._wrap(self.on_cpu.asbits(bits))

    def formats(self, formats: Any = None) -> Any:
        answer = self.on_cpu.formats(formats)
        return answer if formats is None else self._wrap(answer)

    def node_subgraph(self, induced_nodes: list[Tensor]) -> DeviceSubgraph:
        return self._subgraph(self.on_cpu.node_subgraph([nodes.cpu() for nodes in induced_nodes]))

    def edge_subgraph(self, induced_edges: list[Tensor], preserve_nodes: bool) -> DeviceSubgraph:
        return self._subgraph(self.on_cpu.edge_subgraph([edges.cpu() for edges in induced_edges], preserve_nodes))

    def _subgraph(self, found: Any) -> DeviceSubgraph:
        return DeviceSubgraph(
            graph=self._wrap(found.graph),
            induced_nodes=[self._answer(nodes) for nodes in found.induced_nodes],
            induced_edges=[self._answer(edges) for edges in found.induced_edges],
        )

    def _wrap(self, on_cpu: Any) -> DeviceIndex:
        return DeviceIndex.of(on_cpu, self.device)


@dataclass(frozen=True, slots=True)
class DeviceSubgraph:
    """What DGL's index of a subgraph tells: the structure, and by node and edge type the ids it was made of."""

    graph: DeviceIndex
    induced_nodes: list[Tensor]
    induced_edges: list[Tensor]


def dgl_can_use(device: torch.device) -> bool:
    """Tells whether the installed DGL can hold a graph on `device`."""
    return device.type == "cpu" or (device.type == "cuda" and bool(dgl.ndarray.gpu(device.index or 0).exist))


def move_graph(graph: Any, device: torch.device | str, **kwargs: Any) -> Any:
    """Does what `graph.to(device)` does, also where the installed DGL cannot use the device.

    Args:
        graph: A `DGLGraph` or DGL block on any device.
        device: For example "cuda".
        kwargs: For the copies of features, as `Tensor.to` takes them.
    Returns:
        The graph itself if it is on `device`; else a graph there, whose features are moved when they are first used.
    """
    target = device_of(device)
    if graph.device == target:
        return graph
    on_cpu = graph._graph.on_cpu if isinstance(graph._graph, DeviceIndex) else None
    if dgl_can_use(target) or (on_cpu is None and graph.device.type != "cpu"):
        return graph.to(target, **kwargs)
    moved = copy.copy(graph)
    moved._graph = DeviceIndex.of(graph._graph if on_cpu is None else on_cpu, target)
    moved._node_frames = [frame.to(target, **kwargs) for frame in graph._node_frames]
    moved._edge_frames = [frame.to(target, **kwargs) for frame in graph._edge_frames]
    for name in ("_batch_num_nodes", "_batch_num_edges"):
        sizes = getattr(graph, name)
        if sizes is not None:
            setattr(moved, name, {kind: size.to(target, **kwargs) for kind, size in sizes.items()})
    return moved
