# SPDX-License-Identifier: Apache-2.0
"""What the probe and the trace time is what layers run."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from dgl_hybrid.graph import op_rates
from dgl_hybrid.graph.layer_block import LayerBlock
from dgl_hybrid.graph.op_rates import InEdgeSum, attention_slowdown, row_slowdown, weighted_slowdown
from dgl_hybrid.ops.op_counts import op_counts, reset_op_counts


def test_sums_over_in_edges() -> None:
    sum_in_edges = InEdgeSum()
    rows = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])
    # In-neighbours: 0 reads 1 and 2, 1 reads nothing, 2 reads 0 and itself.
    indptr, sources = torch.tensor([0, 2, 2, 4]), torch.tensor([1, 2, 0, 2])
    expected = torch.tensor([[5.0, 50.0], [0.0, 0.0], [4.0, 40.0]])
    assert torch.equal(sum_in_edges(indptr, sources, rows), expected)
    assert torch.equal(sum_in_edges(indptr, sources, 2 * rows), 2 * expected)
    # Another structure is not taken for the last one.
    assert torch.equal(sum_in_edges(torch.tensor([0, 0, 1, 1]), torch.tensor([2]), rows)[1], rows[2])


def test_what_blocks_run_is_timed() -> None:
    reset_op_counts()
    weighted_slowdown(2, 5)
    counts = op_counts()
    assert counts["spmm.u_mul_e.sum/ours"] == counts["spmm.copy_u.sum/ours"] > 1
    assert not any("dgl" in name for name in counts)


def test_slowdowns_are_ratios_of_at_least_one() -> None:
    # Timings themselves are not asserted: machines are noisy.
    assert 1.0 <= weighted_slowdown(4, 8) < float("inf")
    for has_dropout in (False, True):
        assert 1.0 <= attention_slowdown("gat", 4, 8, has_dropout=has_dropout) < float("inf")
        assert 1.0 <= attention_slowdown("gatv2", 4, 8, has_dropout=has_dropout) < float("inf")
    assert 1.0 <= row_slowdown(lambda x: torch.exp(torch.sin(x))) < float("inf")


def test_what_is_timed_on_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[LayerBlock]] = []

    def sample_block(device: torch.device, num_nodes: int) -> LayerBlock:
        block = make_block(device, num_nodes)
        made.append(weakref.ref(block))
        return block

    make_block = op_rates._sample_block
    monkeypatch.setattr(op_rates, "_sample_block", sample_block)
    weighted_slowdown(3, 7)
    attention_slowdown("gat", 3, 7, has_dropout=True)
    gc.collect()
    assert made
    assert [block() for block in made] == [None] * len(made)


@pytest.mark.cuda
def test_slowdowns_on_a_gpu_are_of_its_own_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_rates, "_GPU_NODES", 1 << 10)
    gpu, seen = torch.device("cuda", 0), set()

    def double(x: torch.Tensor) -> torch.Tensor:
        seen.add(x.device)
        return 2 * x

    reset_op_counts()
    assert 1.0 <= weighted_slowdown(2, 12, gpu) < float("inf")
    assert set(op_counts()) == {"spmm.u_mul_e.sum/ours", "spmm.copy_u.sum/ours"}
    for has_dropout in (False, True):
        assert 1.0 <= attention_slowdown("gat", 2, 12, gpu, has_dropout=has_dropout) < float("inf")
        assert 1.0 <= attention_slowdown("gatv2", 2, 12, gpu, has_dropout=has_dropout) < float("inf")
    assert 1.0 <= row_slowdown(double, gpu) < float("inf")
    assert seen == {gpu}


def test_timing_leaves_the_generators_of_this_process_alone() -> None:
    """On a GPU it drew rows from that one's, on rank 0 alone."""
    before = torch.get_rng_state()
    row_slowdown(lambda x: x * 3.0)
    assert torch.equal(torch.get_rng_state(), before)
