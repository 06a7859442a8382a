# SPDX-License-Identifier: Apache-2.0
"""The structure of the ops: built from pairs or compressed rows, by source on demand, checked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dgl_hybrid.ops import SparseGraph, edge_softmax, gat, sddmm, spmm
from dgl_hybrid.ops.backend import use_backend
from dgl_hybrid.ops.sparse_graph import Adjacency, _by_counting, _by_sorting, edge_neighbours, edge_rows, entry_rows

# Destinations 0 and 2 get edges from sources 1 and 3; destination 1 none; edge 0 is (3, 2), edge 3 repeats edge 1.
SRC, DST = torch.tensor([3, 1, 0, 1]), torch.tensor([2, 0, 2, 0])


def hand() -> SparseGraph:
    return SparseGraph.from_coo(SRC, DST, 4, 3)


def random_graph(num_src: int, num_dst: int, num_edges: int, seed: int = 0) -> tuple[SparseGraph, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(max(num_src, 1), (num_edges,), generator=generator)
    dst = torch.randint(max(num_dst, 1), (num_edges,), generator=generator)
    return SparseGraph.from_coo(src, dst, num_src, num_dst), src, dst


def test_a_hand_drawn_graph() -> None:
    graph = hand()
    assert (graph.num_src, graph.num_dst, graph.num_edges) == (4, 3, 4)
    assert graph.index_dtype == torch.int32
    assert graph.in_edges.indptr.tolist() == [0, 2, 2, 4]
    assert graph.in_edges.indices.tolist() == [1, 1, 3, 0]
    assert graph.in_edges.edge_ids is not None
    assert graph.in_edges.edge_ids.tolist() == [1, 3, 0, 2]
    assert graph.out_edges.indptr.tolist() == [0, 1, 3, 3, 4]
    assert graph.out_edges.indices.tolist() == [2, 0, 0, 2]
    assert graph.out_edges.edge_ids is not None
    assert graph.out_edges.edge_ids.tolist() == [2, 1, 3, 0]
    assert entry_rows(graph.in_edges).tolist() == [0, 0, 2, 2]
    assert edge_rows(graph.in_edges).tolist() == DST.tolist()
    assert edge_neighbours(graph.in_edges).tolist() == SRC.tolist()
    graph.validate()
    assert repr(graph) == "SparseGraph(num_src=4, num_dst=3, num_edges=4, index_dtype=torch.int32, device='cpu')"


def test_sorted_pairs_need_no_edge_ids() -> None:
    graph = SparseGraph.from_coo(torch.tensor([2, 0, 1]), torch.tensor([0, 0, 1]), 3, 2)
    assert graph.in_edges.edge_ids is None
    assert graph.in_edges.indices.tolist() == [2, 0, 1]
    assert graph.out_edges.edge_ids is not None
    assert graph.out_edges.edge_ids.tolist() == [1, 2, 0]


@pytest.mark.parametrize(
    ("num_src", "num_dst", "num_edges"), [(40, 30, 300), (5, 2000, 100), (3, 0, 0), (0, 0, 0), (0, 4, 0)]
)
def test_rows_by_source_are_the_same_edges(num_src: int, num_dst: int, num_edges: int) -> None:
    graph, src, dst = random_graph(num_src, num_dst, num_edges)
    assert not graph.has_out_edges
    order = torch.argsort(graph.in_edges.indices, stable=True)
    assert torch.equal(_ids(graph.out_edges), _ids(graph.in_edges)[order])  # entries keep the order of the in-edges
    assert torch.equal(edge_rows(graph.out_edges), src)
    assert torch.equal(edge_neighbours(graph.out_edges), dst)
    assert {ids.dtype for ids in graph.out_edges.tensors()} == {torch.int32}
    graph.validate()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_both_ways_to_order_by_source_agree(dtype: torch.dtype) -> None:
    """A counting sort on CPU, a stable sort elsewhere: sums over out-edges have one order everywhere."""
    graph, _, _ = random_graph(50, 40, 400)
    in_edges = Adjacency.from_tensors([ids.to(dtype) for ids in graph.in_edges.tensors()])
    assert in_edges.edge_ids is not None
    counted, compared = (build(in_edges, in_edges.edge_ids, 50) for build in (_by_counting, _by_sorting))
    for ours, other in zip(counted, compared, strict=True):
        assert ours.dtype == other.dtype == dtype
        assert torch.equal(ours, other)


def _ids(adjacency: Adjacency) -> Tensor:
    return torch.arange(adjacency.num_edges) if adjacency.edge_ids is None else adjacency.edge_ids.long()


def test_from_csc_converts_once_and_copies_nothing_that_fits() -> None:
    indptr, indices = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([1, 0, 1], dtype=torch.int32)
    graph = SparseGraph.from_csc(indptr, indices, num_src=2)
    assert graph.in_edges.indptr is indptr
    assert graph.in_edges.indices is indices
    wide = SparseGraph.from_csc(indptr.long(), indices.long(), torch.tensor([2, 1, 0]), num_src=2)
    assert wide.index_dtype == torch.int32
    assert {ids.dtype for ids in wide.in_edges.tensors()} == {torch.int32}
    copied = SparseGraph.from_csc(indptr, indices, num_src=2, copy=True)
    indices.fill_(9)
    assert copied.in_edges.indices.tolist() == [1, 0, 1]
    large = SparseGraph.from_csc(indptr, indices, num_src=2**31)
    assert large.index_dtype == torch.int64
    assert {ids.dtype for ids in large.in_edges.tensors()} == {torch.int64}


def test_out_edges_at_hand_are_not_built_again() -> None:
    graph = hand()
    out = graph.out_edges
    again = SparseGraph.from_csc(
        *graph.in_edges.tensors(), num_src=4, out_edges=(out.indptr, out.indices, out.edge_ids)
    )
    assert again.has_out_edges
    assert again.out_edges.indices is out.indices
    again.validate()


def test_reverse() -> None:
    graph = hand()
    back = graph.reverse()
    assert (back.num_src, back.num_dst) == (3, 4)
    assert torch.equal(edge_rows(back.in_edges), SRC)
    assert back.out_edges is graph.in_edges
    back.validate()


def test_to_the_same_device_is_itself() -> None:
    graph = hand()
    assert graph.to("cpu") is graph
    meta = graph.to("meta")
    assert meta.device.type == "meta"
    assert not meta.has_out_edges
    assert graph.out_edges.num_rows == 4
    assert graph.to("meta").out_edges.indptr.device.type == "meta"


def test_inference_never_builds_rows_by_source() -> None:
    graph = hand()
    x, w = torch.randn(4, 3), torch.randn(4, 1, requires_grad=True)
    with use_backend("naive"):
        spmm(graph, x).sum()
        with torch.no_grad():
            spmm(graph, x.requires_grad_())
            gat(graph, x.view(4, 1, 3), torch.zeros(4, 1), torch.zeros(3, 1))
        spmm(graph, x.detach(), w).sum().backward()
        edge_softmax(graph, w).sum().backward()
        sddmm(graph, "copy", torch.randn(3, 2, requires_grad=True), lhs_target="v").sum().backward()
        assert not graph.has_out_edges, "only gradients of sources need them"
        spmm(graph, x.detach().requires_grad_()).sum().backward()
    assert graph.has_out_edges


def test_sums_that_read_nothing_of_edges_keep_no_ids_of_them() -> None:
    graph, other = hand(), hand()
    x, w = torch.randn(4, 3), torch.randn(4, 1)
    with use_backend("cpu"):
        for step in (lambda: spmm(graph, x.requires_grad_()), lambda: spmm(graph, x.requires_grad_(), None, "mean")):
            step().sum().backward()
            assert graph.has_out_edges
            lean = graph.out_neighbours
            assert lean.edge_ids is None
        assert graph.to("meta").out_neighbours.edge_ids is None
        wanted, x.grad = x.grad, None
        for needs_ids in (
            lambda: spmm(graph, x, w),
            lambda: spmm(graph, x, None, "max"),
            lambda: gat(graph, x.view(4, 1, 3), torch.zeros(4, 1), torch.zeros(3, 1)),
        ):
            needs_ids().sum().backward()
            assert graph.out_neighbours is graph.out_edges, "once they are there they serve both"
        x.grad = None
        spmm(graph, x).sum().backward()
        spmm(graph, x, None, "mean").sum().backward()
    assert torch.equal(x.grad, wanted)
    full = other.out_edges
    assert [torch.equal(a, b) for a, b in zip(lean.tensors(), full.tensors(), strict=False)] == [True, True]
    assert [ids.dtype for ids in lean.tensors()] == [torch.int32] * 2


@pytest.mark.parametrize("num_src", [0, 3])
def test_lean_rows_by_source_of_graphs_without_edges(num_src: int) -> None:
    graph = SparseGraph.from_csc(torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), num_src=num_src)
    assert graph.out_neighbours.indptr.tolist() == [0] * (num_src + 1)
    assert graph.out_neighbours.num_edges == 0


def _broken(graph: SparseGraph, **changes: Tensor) -> SparseGraph:
    return SparseGraph(replace(graph.in_edges, **changes), num_src=graph.num_src)


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"indptr": ids(1, 2, 2, 4)},
            r"indptr of the in-edges must go from 0 to the number of entries, 4 \(got 1 to 4\)",
        ),
        ({"indptr": ids(0, 2, 2, 3)}, r"must go from 0 to the number of entries, 4 \(got 0 to 3\)"),
        ({"indptr": ids(0, 3, 2, 4)}, r"must never fall \(got 3 then 2 at row 1\)"),
        ({"indices": ids(1, 1, 4, 0)}, r"source ids of the in-edges must be in \[0, 4\) \(got 0 to 4\)"),
        ({"indices": ids(1, -1, 3, 0)}, r"source ids of the in-edges must be in \[0, 4\) \(got -1 to 3\)"),
        ({"edge_ids": ids(1, 3, 0, 1)}, r"edge ids of the in-edges must be a permutation of 0 to 3"),
    ],
)
def test_validate_refuses_a_broken_structure(changes: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _broken(hand(), **changes).validate()


def test_validate_refuses_out_edges_of_another_graph() -> None:
    graph = hand()
    out = graph.out_edges
    wrong = SparseGraph(graph.in_edges, num_src=4, out_edges=replace(out, indices=ids(2, 0, 0, 1)))
    with pytest.raises(ValueError, match=r"edge 0 is \(3, 2\) in the in-edges \(got \(3, 1\) in the out-edges\)"):
        wrong.validate()
    short = SparseGraph(graph.in_edges, num_src=5, out_edges=out)
    with pytest.raises(ValueError, match=r"out-edges must have 5 rows and 4 entries .* \(got 4 and 4\)"):
        short.validate()
    far = SparseGraph(graph.in_edges, num_src=4, out_edges=replace(out, indices=ids(2, 0, 0, 3)))
    with pytest.raises(ValueError, match=r"destination ids of the out-edges must be in \[0, 3\) \(got 0 to 3\)"):
        far.validate()


def test_constructors_refuse_what_does_not_fit() -> None:
    two, three = torch.tensor([0, 1]), torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match=r"one source and one destination each: \(3,\), \(2,\)"):
        SparseGraph.from_coo(three, two, 3, 3)
    with pytest.raises(ValueError, match=r"source ids must be in \[0, 2\) \(got 0 to 2\)"):
        SparseGraph.from_coo(three, three, 2, 3)
    with pytest.raises(ValueError, match=r"destination ids must be in \[0, 2\) \(got 0 to 2\)"):
        SparseGraph.from_coo(three, three, 3, 2)
    with pytest.raises(ValueError, match=r"one edge id per entry: 2 entries \(got 3 ids\)"):
        SparseGraph.from_csc(torch.tensor([0, 2]), two, three, num_src=2)
    with pytest.raises(ValueError, match=r"indptr of the in-edges must have one element more than there are rows"):
        SparseGraph.from_csc(two[:0], two[:0], num_src=2)
    with pytest.raises(ValueError, match=r"indices of the in-edges must have one dimension \(got shape \(1, 2\)\)"):
        SparseGraph.from_csc(torch.tensor([0, 2]), two[None], num_src=2)
    with pytest.raises(TypeError, match=r"indices of the in-edges must be int32 or int64 \(got torch.float32\)"):
        SparseGraph.from_csc(torch.tensor([0, 2]), two.float(), num_src=2)
    with pytest.raises(ValueError, match=r"indices of the in-edges must lie on the device of indptr, cpu \(got meta\)"):
        SparseGraph.from_csc(torch.tensor([0, 2]), two.to("meta"), num_src=2)
    with pytest.raises(ValueError, match=r"out-edges must have 2 rows and 2 entries .* \(got 1 and 2\)"):
        SparseGraph.from_csc(torch.tensor([0, 2]), two, num_src=2, out_edges=(torch.tensor([0, 2]), two, None))
    meta = tuple(ids.to("meta") for ids in (torch.tensor([0, 1, 2]), two))
    with pytest.raises(ValueError, match=r"out-edges must lie on the device of the in-edges, cpu \(got meta\)"):
        SparseGraph.from_csc(torch.tensor([0, 2]), two, num_src=2, out_edges=(*meta, None))


def test_a_graph_that_is_first_used_in_inference_mode_can_train_later() -> None:
    """What is kept of a structure is saved by a backward, which takes no tensors of inference mode."""
    with torch.inference_mode():
        src, dst = torch.tensor([0, 1, 2, 2]), torch.tensor([1, 1, 0, 2])
        graph = SparseGraph.from_coo(src, dst, 3, 3)
        given = SparseGraph.from_csc(torch.tensor([0, 1, 3], dtype=torch.int32), src[:3].int(), num_src=3)
        spmm(graph, torch.ones(3, 2))
        spmm(graph, None, torch.ones(4, 2), reduce="max")
        kept = [*graph.in_edges.tensors(), *graph.out_edges.tensors(), *graph.to("cpu").in_edges.tensors()]
        kept += [*given.in_edges.tensors(), *given.reverse().in_edges.tensors()]
    assert not any(ids.is_inference() for ids in kept)
    for structure, num_edges in ((graph, 4), (given, 3)):
        x, w = torch.ones(3, 2, requires_grad=True), torch.ones(num_edges, 1, requires_grad=True)
        spmm(structure, x, w).sum().backward()
        assert x.grad is not None
        assert w.grad is not None
