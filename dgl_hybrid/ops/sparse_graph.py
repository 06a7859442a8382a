# SPDX-License-Identifier: Apache-2.0
"""The structure the ops run on: compressed rows by destination, and on demand by source."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import scipy.sparse
import torch
from torch import Tensor

from dgl_hybrid.ops.devices import device_of

_INT32_LIMIT = 2**31

_MOST_SORTED = 2**31 - 1
"""Elements that PyTorch sorts on a GPU."""


@dataclass(frozen=True, slots=True, eq=False)
class Adjacency:
    """Rows with their entries. All tensors have one integer dtype and one device, and are contiguous."""

    indptr: Tensor
    """(num_rows + 1,) int32 or int64: row r holds the entries indptr[r] to indptr[r + 1]."""
    indices: Tensor
    """(E,), same dtype: the neighbour of each entry."""
    edge_ids: Tensor | None
    """(E,), same dtype: row of the edge tensors for each entry; None: entry k is edge k."""

    @property
    def num_rows(self) -> int:
        return int(self.indptr.shape[0]) - 1

    @property
    def num_edges(self) -> int:
        return int(self.indices.shape[0])

    def tensors(self) -> list[Tensor]:
        """What the registered ops take: `[indptr, indices]` or `[indptr, indices, edge_ids]`."""
        if self.edge_ids is None:
            return [self.indptr, self.indices]
        return [self.indptr, self.indices, self.edge_ids]

    @classmethod
    def from_tensors(cls, tensors: list[Tensor]) -> Adjacency:
        """The inverse of `tensors`."""
        return cls(tensors[0], tensors[1], tensors[2] if len(tensors) == 3 else None)


class SparseGraph:
    """A bipartite graph of `num_src` sources and `num_dst` destinations with its edges by destination.

    Edge tensors given to an op have one row per edge; `edge_ids` of an adjacency says which row belongs to an entry.
    The ops keep the order of entries within a row: sums are taken in a fixed order, and of equal largest (smallest)
    values the first entry wins. The rows by source are built when a gradient first needs them, and kept.

    Not modified by any op; safe to share between threads once `out_edges` (or `out_neighbours`) is built.
    """

    def __init__(self, in_edges: Adjacency, *, num_src: int, out_edges: Adjacency | None = None) -> None:
        self.in_edges = in_edges
        self.num_src = num_src
        self._out_edges = out_edges
        self._out_neighbours: Adjacency | None = None

    @classmethod
    def from_csc(
        cls,
        indptr: Tensor,
        indices: Tensor,
        edge_ids: Tensor | None = None,
        *,
        num_src: int,
        out_edges: tuple[Tensor, Tensor, Tensor | None] | None = None,
        copy: bool = False,
    ) -> SparseGraph:
        """Takes compressed rows by destination; ids become int32 where that suffices.

        Args:
            indptr: (N + 1,) int32 or int64: the in-edges of destination v are the entries indptr[v] to indptr[v + 1].
            indices: (E,), integer: source of each entry.
            edge_ids: (E,), integer: row of the edge tensors for each entry, a permutation; None: entry k is edge k.
            num_src: S, the number of source rows.
            out_edges: `(indptr (S + 1,), indices (E,), edge_ids (E,) | None)` by source, if at hand; built otherwise.
            copy: Whether somebody may write to the tensors later; by default those that fit are kept as they are.
        Raises:
            ValueError: Shapes or devices that do not fit together. The values are not read: see `validate`.
            TypeError: Tensors that are not int32 or int64.
        """
        num_dst, num_edges = len(indptr) - 1, len(indices)
        dtype = torch.int32 if max(num_src, num_dst, num_edges) < _INT32_LIMIT else torch.int64
        in_adjacency = _adjacency(indptr, indices, edge_ids, dtype, "in-edges", copy=copy)
        out_adjacency = None
        if out_edges is not None:
            out_adjacency = _adjacency(*out_edges, dtype, "out-edges", copy=copy)
            if out_adjacency.num_rows != num_src or out_adjacency.num_edges != num_edges:
                raise ValueError(
                    f"out-edges must have {num_src} rows and {num_edges} entries as the in-edges say "
                    f"(got {out_adjacency.num_rows} and {out_adjacency.num_edges})"
                )
            if out_adjacency.indptr.device != in_adjacency.indptr.device:
                raise ValueError(
                    f"out-edges must lie on the device of the in-edges, {in_adjacency.indptr.device} "
                    f"(got {out_adjacency.indptr.device})"
                )
        return cls(in_adjacency, num_src=num_src, out_edges=out_adjacency)

    @classmethod
    def from_coo(cls, src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> SparseGraph:
        """Takes edges as pairs; edge k is row k of the edge tensors and in-edges keep that order.

        Args:
            src: (E,) int32 or int64 in [0, S).
            dst: (E,), same dtype and device, in [0, N).
            num_src: S, the number of source rows.
            num_dst: N, the number of destination rows.
        Raises:
            ValueError: Not one destination per source, or an id out of range.
            TypeError: Tensors that are not int32 or int64.
        """
        if src.dim() != 1 or src.shape != dst.shape:
            raise ValueError(f"edges need one source and one destination each: {tuple(src.shape)}, {tuple(dst.shape)}")
        for ids, count, role in ((src, num_src, "source"), (dst, num_dst, "destination")):
            if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= count):
                raise ValueError(f"{role} ids must be in [0, {count}) (got {int(ids.min())} to {int(ids.max())})")
        indptr = _row_starts(dst, num_dst)
        if bool((dst[1:] >= dst[:-1]).all()):
            return cls.from_csc(indptr, src, num_src=num_src)
        edge_ids = torch.argsort(dst, stable=True)
        return cls.from_csc(indptr, src[edge_ids], edge_ids, num_src=num_src)

    @property
    def num_dst(self) -> int:
        return self.in_edges.num_rows

    @property
    def num_edges(self) -> int:
        return self.in_edges.num_edges

    @property
    def device(self) -> torch.device:
        return self.in_edges.indptr.device

    @property
    def index_dtype(self) -> torch.dtype:
        return self.in_edges.indptr.dtype

    @property
    def out_edges(self) -> Adjacency:
        """The edges by source, entries in the order of the in-edges; built at the first access."""
        if self._out_edges is None:
            self._out_edges = Adjacency(*self._build("out_edges"))
            self._out_neighbours = None
        return self._out_edges

    @property
    def out_neighbours(self) -> Adjacency:
        """`out_edges` for sums that read nothing of edges: those if they are built, else rows without `edge_ids`.

        A third of the memory less. Entry k is not edge k here, whatever `edge_ids` being None says elsewhere.
        """
        if self._out_edges is not None:
            return self._out_edges
        found = self._out_neighbours  # once: another thread may have just built the others, which let go of these
        if found is None:
            indptr, indices = self._build("out_neighbours")
            found = self._out_neighbours = Adjacency(indptr, indices, None)
        return found

    def _build(self, op: str) -> tuple[Tensor, ...]:
        build = getattr(torch.ops.dgl_hybrid, op)
        is_inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
        with torch.inference_mode(False) if is_inference else contextlib.nullcontext():  # kept for trained steps, too
            built: tuple[Tensor, ...] = build(self.in_edges.tensors(), self.num_src)
        if self.device.type == "cuda" and not torch.compiler.is_compiling():
            # Others may find them next on another stream, which nobody outside can make wait.
            torch.cuda.current_stream(self.device).synchronize()
        return built

    @property
    def has_out_edges(self) -> bool:
        """Tells whether the rows by source are there already, with or without the edge of each entry."""
        return self._out_edges is not None or self._out_neighbours is not None

    def reverse(self) -> SparseGraph:
        """The graph with every edge turned round: sources are destinations; edge tensors keep their rows."""
        return SparseGraph(self.out_edges, num_src=self.num_dst, out_edges=self.in_edges)

    def to(self, device: torch.device | str) -> SparseGraph:
        """A copy on `device`, with the rows by source if they are built; itself if it lies there already."""
        if device_of(device) == self.device:
            return self
        out_edges = None if self._out_edges is None else _moved(self._out_edges, device)
        return SparseGraph(_moved(self.in_edges, device), num_src=self.num_src, out_edges=out_edges)

    def validate(self) -> None:
        """Reads every id once and checks that the structure is one graph; syncs the host.

        Raises:
            ValueError: Row starts that do not cover the entries in order, ids out of range, `edge_ids` that are not a
                permutation, or out-edges that are other edges than the in-edges.
        """
        sources = _validated_ends(self.in_edges, self.num_src, "in-edges", "source")
        if self._out_edges is None:
            return
        if self._out_edges.num_rows != self.num_src or self._out_edges.num_edges != self.num_edges:
            raise ValueError(
                f"out-edges must have {self.num_src} rows and {self.num_edges} entries as the in-edges say "
                f"(got {self._out_edges.num_rows} and {self._out_edges.num_edges})"
            )
        destinations = _validated_ends(self._out_edges, self.num_dst, "out-edges", "destination")
        same = torch.eq(edge_rows(self.in_edges), destinations) & torch.eq(sources, edge_rows(self._out_edges))
        if not bool(same.all()):
            edge = int(same.int().argmin())
            raise ValueError(
                f"out-edges must be the in-edges by source: edge {edge} is ({int(sources[edge])}, "
                f"{int(edge_rows(self.in_edges)[edge])}) in the in-edges (got "
                f"({int(edge_rows(self._out_edges)[edge])}, {int(destinations[edge])}) in the out-edges)"
            )

    def __repr__(self) -> str:
        return (
            f"SparseGraph(num_src={self.num_src}, num_dst={self.num_dst}, num_edges={self.num_edges}, "
            f"index_dtype={self.index_dtype}, device='{self.device}')"
        )


def entry_rows(adjacency: Adjacency) -> Tensor:
    """(E,) int64: the row of each entry, in the order of the entries."""
    counts = adjacency.indptr.diff()
    rows = torch.arange(adjacency.num_rows, device=counts.device)
    return torch.repeat_interleave(rows, counts, output_size=adjacency.num_edges)


def edge_rows(adjacency: Adjacency) -> Tensor:
    """(E,) int64: the row (destination of in-edges, source of out-edges) of each edge, in the order of edge tensors."""
    return _by_edge(adjacency, entry_rows(adjacency))


def edge_neighbours(adjacency: Adjacency) -> Tensor:
    """(E,) int64: the neighbour (source of in-edges, destination of out-edges) of each edge, as edge tensors go."""
    return _by_edge(adjacency, adjacency.indices.long())


def build_out_edges(in_edges: Adjacency, num_src: int) -> Adjacency:
    """The entries by source; entries of one source stay in the order of the in-edges."""
    edge_ids = in_edges.edge_ids
    if edge_ids is None:
        edge_ids = torch.arange(in_edges.num_edges, device=in_edges.indptr.device, dtype=in_edges.indptr.dtype)
    return Adjacency(*_by_source(in_edges, edge_ids, num_src))


def build_out_neighbours(in_edges: Adjacency, num_src: int) -> tuple[Tensor, Tensor]:
    """`indptr` and `indices` of what `build_out_edges` returns, made without its third tensor."""
    carried = torch.empty(in_edges.num_edges, device=in_edges.indptr.device, dtype=torch.int8)
    indptr, indices, _ = _by_source(in_edges, carried, num_src)
    return indptr, indices


def _by_source(in_edges: Adjacency, carried: Tensor, num_src: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row starts, neighbours, and what each entry carries, by source."""
    order = _by_counting if carried.device.type == "cpu" else _by_sorting
    return order(in_edges, carried, num_src)


def _by_counting(in_edges: Adjacency, carried: Tensor, num_src: int) -> tuple[Tensor, Tensor, Tensor]:
    """A tenth of the time of a stable sort for a mini-batch of 100,000 edges."""
    if num_src == 0 or in_edges.num_rows == 0:  # no shape of a matrix for SciPy
        return _by_sorting(in_edges, carried, num_src)
    compressed = (carried.numpy(), in_edges.indices.numpy(), in_edges.indptr.numpy())
    by_source = scipy.sparse.csr_array(compressed, shape=(in_edges.num_rows, num_src)).tocsc()
    starts, rows, carried = map(torch.from_numpy, (by_source.indptr, by_source.indices, by_source.data))
    return starts.to(in_edges.indptr.dtype), rows.to(in_edges.indptr.dtype), carried


def _by_sorting(in_edges: Adjacency, carried: Tensor, num_src: int) -> tuple[Tensor, Tensor, Tensor]:
    device = carried.device
    if device.type != "cpu" and len(carried) > _MOST_SORTED:
        on_host = Adjacency(in_edges.indptr.cpu(), in_edges.indices.cpu(), None)
        starts, rows, carried = _by_counting(on_host, carried.cpu(), num_src)
        return starts.to(device), rows.to(device), carried.to(device)
    order = torch.argsort(in_edges.indices, stable=True)
    starts, rows = _row_starts(in_edges.indices, num_src), entry_rows(in_edges)[order]
    return starts.to(in_edges.indptr.dtype), rows.to(in_edges.indptr.dtype), carried[order]


def _by_edge(adjacency: Adjacency, by_entry: Tensor) -> Tensor:
    if adjacency.edge_ids is None:
        return by_entry
    return torch.empty_like(by_entry).scatter_(0, adjacency.edge_ids.long(), by_entry)


def _row_starts(rows: Tensor, num_rows: int) -> Tensor:
    starts = torch.zeros(num_rows + 1, dtype=torch.int64, device=rows.device)
    torch.cumsum(torch.bincount(rows, minlength=num_rows), 0, out=starts[1:])
    return starts


def _adjacency(
    indptr: Tensor, indices: Tensor, edge_ids: Tensor | None, dtype: torch.dtype, name: str, *, copy: bool
) -> Adjacency:
    given = {"indptr": indptr, "indices": indices} | ({} if edge_ids is None else {"edge_ids": edge_ids})
    for role, ids in given.items():
        if ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{role} of the {name} must be int32 or int64 (got {ids.dtype})")
        if ids.dim() != 1:
            raise ValueError(f"{role} of the {name} must have one dimension (got shape {tuple(ids.shape)})")
        if ids.device != indptr.device:
            raise ValueError(
                f"{role} of the {name} must lie on the device of indptr, {indptr.device} (got {ids.device})"
            )
    if len(indptr) == 0:
        raise ValueError(f"indptr of the {name} must have one element more than there are rows (got none)")
    if edge_ids is not None and len(edge_ids) != len(indices):
        raise ValueError(f"the {name} need one edge id per entry: {len(indices)} entries (got {len(edge_ids)} ids)")
    return Adjacency(
        to_keep(indptr, dtype=dtype, copy=copy),
        to_keep(indices, dtype=dtype, copy=copy),
        None if edge_ids is None else to_keep(edge_ids, dtype=dtype, copy=copy),
    )


def to_keep(ids: Tensor, **target: Any) -> Tensor:
    """Ids that a backward may save, even if an evaluation in inference mode is the first to use the graph."""
    with torch.inference_mode(False):
        ids = ids.to(**target).contiguous()
        return ids.clone() if ids.is_inference() else ids


def _moved(adjacency: Adjacency, device: torch.device | str) -> Adjacency:
    return Adjacency.from_tensors([to_keep(ids, device=device) for ids in adjacency.tensors()])


def _validated_ends(adjacency: Adjacency, num_neighbours: int, name: str, role: str) -> Tensor:
    """Checks one direction and returns the neighbour of each edge, (E,) int64 by edge row."""
    indptr, indices, num_edges = adjacency.indptr, adjacency.indices, adjacency.num_edges
    if int(indptr[0]) != 0 or int(indptr[-1]) != num_edges:
        raise ValueError(
            f"indptr of the {name} must go from 0 to the number of entries, {num_edges} "
            f"(got {int(indptr[0])} to {int(indptr[-1])})"
        )
    falls = indptr.diff() < 0
    if bool(falls.any()):
        row = int(falls.int().argmax())
        raise ValueError(
            f"indptr of the {name} must never fall (got {int(indptr[row])} then {int(indptr[row + 1])} at row {row})"
        )
    if num_edges == 0:
        return indices.long()
    if int(indices.min()) < 0 or int(indices.max()) >= num_neighbours:
        raise ValueError(
            f"{role} ids of the {name} must be in [0, {num_neighbours}) "
            f"(got {int(indices.min())} to {int(indices.max())})"
        )
    if adjacency.edge_ids is not None:
        expected = torch.arange(num_edges, device=indices.device)
        if not torch.equal(adjacency.edge_ids.long().sort().values, expected):
            raise ValueError(
                f"edge ids of the {name} must be a permutation of 0 to {num_edges - 1}: one row of the edge tensors "
                f"per entry"
            )
    return edge_neighbours(adjacency)
