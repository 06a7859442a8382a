# SPDX-License-Identifier: Apache-2.0
"""DGL's functions are wrapped once, pass ordinary graphs through, and can be put back."""

from __future__ import annotations

import sys

import dgl
import dgl.nn as dglnn
import pytest
import torch

from dgl_hybrid.graph import dispatch
from tests.graph.blocks import run_routes, run_sums
from tests.helpers.world import run_ranks


def current() -> list[object]:
    names = ("EdgeWeightNorm", *dispatch._NOT_ON_BLOCKS)
    forwards = [getattr(dgl.nn.pytorch.conv, name).__dict__["forward"] for name in names]
    ops = (("spmm", "gspmm_internal"), ("sddmm", "gsddmm_internal"), ("edge_softmax", "edge_softmax_internal"))
    forwards.append(dglnn.TypedLinear.__dict__["forward"])
    return forwards + [getattr(sys.modules[f"dgl.ops.{module}"], name) for module, name in ops]


def test_install_and_remove_restore_the_originals() -> None:
    dispatch.remove()
    originals = current()
    dispatch.install()
    wrapped = current()
    assert all(a is not b for a, b in zip(originals, wrapped, strict=True))
    dispatch.install()
    assert all(a is b for a, b in zip(wrapped, current(), strict=True)), "installed twice"
    dispatch.remove()
    assert all(a is b for a, b in zip(originals, current(), strict=True))
    dispatch.remove()
    dispatch.install()


def test_ordinary_graphs_pass_through() -> None:
    graph = dgl.rand_graph(10, 40)
    x = torch.rand(10, 3)
    w = torch.rand(40)

    def results() -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [
            dgl.ops.copy_u_sum(graph, x),
            dgl.ops.u_dot_v(graph, x, x),
            dgl.ops.edge_softmax(graph, w, norm_by="src"),
            dglnn.EdgeWeightNorm("both")(graph, w + 0.5),
            dglnn.SGConv(3, 2, k=2, allow_zero_in_degree=True)(graph, x),
            dglnn.GraphConv(3, 2, allow_zero_in_degree=True)(graph, x),
        ]

    dispatch.remove()
    plain = results()
    dispatch.install()
    for a, b in zip(plain, results(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("regularizer", [None, "basis", "bdd"])
def test_types_are_taken_for_sorted_where_they_are(regularizer: str | None) -> None:
    linear = dglnn.TypedLinear(4, 2, 3, regularizer, None if regularizer is None else 2)
    x = torch.rand(6, 4)
    mixed, alike = torch.tensor([2, 0, 1, 0, 2, 1]), torch.tensor([0, 0, 1, 1, 2, 2])
    dispatch.remove()
    of_mixed, of_sorted = linear(x, mixed), linear(x, alike, sorted_by_type=True)
    dispatch.install()
    assert torch.equal(linear(x, mixed, sorted_by_type=True), of_mixed)
    assert torch.equal(linear(x, mixed), of_mixed)
    assert torch.equal(linear(x, alike, True), of_sorted)
    assert linear(x[:0], mixed[:0], True).shape == (0, 2)


def test_modules_of_dgl_ops_are_the_ones_wrapped() -> None:
    assert sys.modules["dgl.ops.spmm"].gspmm_internal.__wrapped__


@pytest.mark.parametrize("served", ["layer_blocks", "all", "none"])
def test_layer_blocks_reach_our_ops_unless_told_otherwise(served: str, folder: str) -> None:
    ops = (
        *("edge_softmax.dst", "sddmm.u_add_v", "sddmm.u_dot_v"),
        *("spmm.copy_u.max", "spmm.u_mul_e.sum"),
    )
    times = {"edge_softmax.dst": 2, "spmm.u_mul_e.sum": 2}
    route = "dgl: routing is off" if served == "none" else "ours"
    for counts in run_ranks(3, run_routes, folder, served):
        assert counts == {f"{op}/{route}": times.get(op, 1) for op in ops}


def test_no_sum_is_ours_where_none_is_asked_for(folder: str) -> None:
    ours, dgls = (run_ranks(3, run_sums, folder, served, None) for served in ("layer_blocks", "none"))
    for (out, _, grad, counts), (same, _, same_grad, of_dgl) in zip(ours, dgls, strict=True):
        torch.testing.assert_close(same, out)
        torch.testing.assert_close(same_grad, grad)
        assert any("ours" in op for op in counts)
        assert of_dgl
        assert all(op.endswith("dgl: routing is off") for op in of_dgl)


def test_sums_in_chunks_are_ours_even_so(folder: str) -> None:
    """DGL's kernels would need all rows at once, which a budget of memory may not allow."""
    ours, chunked = (run_ranks(3, run_sums, folder, "none", chunk_rows) for chunk_rows in (None, 2))
    for (out, _, grad, _), (same, _, same_grad, counts) in zip(ours, chunked, strict=True):
        torch.testing.assert_close(same, out)
        torch.testing.assert_close(same_grad, grad)
        assert "copy_u/ours: split by source" in counts
