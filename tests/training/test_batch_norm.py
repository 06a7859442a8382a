# SPDX-License-Identifier: Apache-2.0
"""Distributed batch norm equals `F.batch_norm` of the whole graph, element by element, with replicas recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dgl_hybrid.exchange.connect import create_communicator
from dgl_hybrid.exchange.shared_memory_transport import SharedMemoryTransport
from dgl_hybrid.training import batch_norm
from dgl_hybrid.training.batch_norm import distributed_batch_norm
from tests.helpers.world import run_ranks, run_ranks_expect_errors

NUM_NODES, WIDTHS, NUM_STEPS = 30, (5, 4, 3), 3


@dataclass(kw_only=True)
class Problem:
    """Two layers of (linear, batch norm, relu, aggregate); the loss is a weighted sum of the output rows."""

    adjacency: Tensor
    features: Tensor
    parameters: list[Tensor]  # per layer: linear (F, F'), batch norm's weight and bias (F',)
    loss_weights: Tensor
    part: Tensor


def make_problem(world_size: int, parts: str) -> Problem:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    parameters = []
    for width_in, width_out in pairwise(WIDTHS):
        parameters += [draw(width_in, width_out), draw(width_out), draw(width_out)]
    part = torch.randint(world_size, (NUM_NODES,), generator=generator)
    if parts == "one rank owns nothing" and world_size > 1:
        part[part == 1] = 0
    return Problem(
        adjacency=draw(NUM_NODES, NUM_NODES) * (torch.rand(NUM_NODES, NUM_NODES, generator=generator) < 0.15),
        features=draw(NUM_NODES, WIDTHS[0]) * 3 + 10,
        parameters=parameters,
        loss_weights=draw(NUM_NODES, WIDTHS[-1]),
        part=part,
    )


@dataclass(kw_only=True)
class Result:
    outputs: Tensor  # (N, F) rows of the last step; zero where the rank owns nothing
    gradients: list[Tensor]  # features (N, F), then the parameters, of the last step
    running: list[Tensor]
    num_collectives: list[int]  # in each forward and each backward


def reference(problem: Problem, momentum: float) -> Result:
    leaves = [t.clone().requires_grad_() for t in (problem.features, *problem.parameters)]
    running = fresh_running()
    for _ in range(NUM_STEPS):
        h = leaves[0]
        for layer in range(2):
            linear, weight, bias = leaves[1 + 3 * layer : 4 + 3 * layer]
            mean, var = running[2 * layer : 2 * layer + 2]
            h = problem.adjacency @ F.batch_norm(h @ linear, mean, var, weight, bias, True, momentum).relu()
        gradients = torch.autograd.grad((h * problem.loss_weights).sum(), leaves)
    return Result(outputs=h.detach(), gradients=list(gradients), running=running, num_collectives=[])


def fresh_running() -> list[Tensor]:
    return [start(w, dtype=torch.float64) for w in WIDTHS[1:] for start in (torch.zeros, torch.ones)]


def held_rows(problem: Problem, owned: Tensor, generator: torch.Generator) -> Tensor:
    """The rows that `owned` aggregate, and `owned`, in random order: ids (n,)."""
    needed = problem.adjacency[owned].ne(0).any(0)
    needed[owned] = True
    ids = needed.nonzero()[:, 0]
    return ids[torch.randperm(len(ids), generator=generator)]


def run_rank(rank: int, world_size: int, problem: Problem, momentum: float) -> Result:
    """Holds level 2 of its own nodes, level 1 of what those read, level 0 of what that reads: all recomputed here."""
    generator = torch.Generator().manual_seed(rank)
    owned = (problem.part == rank).nonzero()[:, 0]
    held_1 = held_rows(problem, owned, generator)
    held_0 = held_rows(problem, held_1, generator)
    levels = [(held_0, held_1), (held_1, owned)]
    leaves = [t.clone().requires_grad_() for t in (problem.features[held_0], *problem.parameters)]
    running = fresh_running()
    marks = [0]
    communicator = create_communicator()
    with counted_all_reduces() as counter:
        for _ in range(NUM_STEPS):
            h = leaves[0]
            for layer, (sources, targets) in enumerate(levels):
                linear, weight, bias = leaves[1 + 3 * layer : 4 + 3 * layer]
                mean, var = running[2 * layer : 2 * layer + 2]
                is_owned = problem.part[sources] == rank
                normed = distributed_batch_norm(
                    h @ linear,
                    is_owned,
                    mean,
                    var,
                    weight,
                    bias,
                    training=True,
                    momentum=momentum,
                    communicator=communicator,
                )
                h = problem.adjacency[targets][:, sources] @ normed.relu()
            marks.append(counter[0])
            gradients = torch.autograd.grad((h * problem.loss_weights[owned]).sum(), leaves)
            marks.append(counter[0])
    return Result(
        outputs=torch.zeros(NUM_NODES, WIDTHS[-1], dtype=torch.float64).index_add(0, owned, h.detach()),
        gradients=[torch.zeros_like(problem.features).index_add(0, held_0, gradients[0]), *gradients[1:]],
        running=running,
        num_collectives=[b - a for a, b in pairwise(marks)],
    )


@contextmanager
def counted_all_reduces() -> Iterator[list[int]]:
    """Counts the sums of this process, whose ranks are on one host."""
    counter, original = [0], SharedMemoryTransport.all_reduce

    def counting(transport: SharedMemoryTransport, tensor: Tensor, what: str = "") -> None:
        counter[0] += 1
        original(transport, tensor, what)

    with mock.patch.object(SharedMemoryTransport, "all_reduce", counting):
        yield counter


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    """|a - b| <= 1e-9 · max(|b|, max |tensor|) for each element."""
    assert ours.shape == theirs.shape
    bound = 1e-9 * torch.maximum(theirs.abs(), theirs.abs().max())
    assert bool(((ours - theirs).abs() <= bound).all()), (ours - theirs).abs().max()


@pytest.mark.parametrize("parts", ["random", "one rank owns nothing"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equals_one_process(world_size: int, parts: str) -> None:
    problem = make_problem(world_size, parts)
    expected = reference(problem, momentum=0.3)
    results = run_ranks(world_size, run_rank, problem, 0.3)
    assert_equal(sum_of([r.outputs for r in results]), expected.outputs)
    for k, gradient in enumerate(expected.gradients):
        assert_equal(sum_of([r.gradients[k] for r in results]), gradient)
    for result in results:
        for ours, theirs, first in zip(result.running, expected.running, results[0].running, strict=True):
            assert_equal(ours, theirs)
            assert torch.equal(ours, first)  # the same bits: evaluation must not differ by rank


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_collective_per_layer_each_way_on_every_rank(world_size: int) -> None:
    for result in run_ranks(world_size, run_rank, make_problem(world_size, "one rank owns nothing"), 0.1):
        assert result.num_collectives == [2, 2] * NUM_STEPS  # two layers: forward, backward


def sum_of(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


def run_empty_rank(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Rank 1 holds no row at all; it takes part all the same."""
    rows = torch.arange(12.0, dtype=torch.float64).reshape(6, 2).sin()
    x = (rows if rank == 0 else rows[:0]).clone().requires_grad_()
    y = distributed_batch_norm(
        *(x, torch.ones(len(x), dtype=torch.bool), None, None), training=True, communicator=create_communicator()
    )
    (dx,) = torch.autograd.grad((y**3).sum(), x)
    return y.detach(), dx


def test_a_rank_without_rows_takes_part() -> None:
    rows = torch.arange(12.0, dtype=torch.float64).reshape(6, 2).sin().requires_grad_()
    expected = F.batch_norm(rows, None, None, training=True)
    (gradient,) = torch.autograd.grad((expected**3).sum(), rows)
    (y, dx), (empty_y, empty_dx) = run_ranks(2, run_empty_rank)
    assert_equal(y, expected.detach())
    assert_equal(dx, gradient)
    assert empty_y.shape == empty_dx.shape == (0, 2)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("num_vertices", [None, 40])
def test_without_process_group_it_is_batch_norm(affine: bool, num_vertices: int | None) -> None:
    x = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    weight, bias = (
        (torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)) if affine else (None, None)
    )
    owned = torch.ones(40, dtype=torch.bool)
    y = distributed_batch_norm(x, owned, None, None, weight, bias, training=True, num_vertices=num_vertices)
    expected = F.batch_norm(x, None, None, weight, bias, training=True)
    assert_equal(y.detach(), expected.detach())
    upstream = torch.randn_like(x)
    assert_equal(torch.autograd.grad(y, x, upstream)[0], torch.autograd.grad(expected, x, upstream)[0])


def test_a_replica_enters_no_statistic_and_gets_the_direct_gradient_only() -> None:
    """One replica in row 1: of a vertex whose own row is elsewhere, so any value may stand there."""
    x = torch.tensor([[1.0], [100.0], [3.0]], dtype=torch.float64, requires_grad=True)
    owned = torch.tensor([True, False, True])
    y = distributed_batch_norm(x, owned, None, None, training=True, eps=0.0)
    assert y.flatten().tolist() == [-1.0, 98.0, 1.0]  # mean 2, standard deviation 1
    (dx,) = torch.autograd.grad(y[1, 0], x)
    assert dx.flatten().tolist() == [-0.5 + 98 * 0.5, 1.0, -0.5 - 98 * 0.5]


def test_a_mean_far_from_zero_keeps_the_digits() -> None:
    x = torch.randn(1000, 3, dtype=torch.float64) + 1e5
    y = distributed_batch_norm(x, torch.ones(1000, dtype=torch.bool), None, None, training=True)
    centred = x - x.mean(0)
    expected = centred / (centred.square().mean(0) + 1e-5).sqrt()
    # Values of 1e5 have 11 digits left behind the point, and 1e10 + 1 in the sum of squares has 6.
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    x = (torch.randn(500, 4) * 2 + 1).to(dtype).requires_grad_()
    weight, bias = torch.rand(4, requires_grad=True), torch.rand(4, requires_grad=True)
    y = distributed_batch_norm(x, torch.ones(500, dtype=torch.bool), None, None, weight, bias, training=True)
    expected = F.batch_norm(x.float(), None, None, weight, bias, training=True)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # bfloat16 has 8 bits
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), expected, rtol=tolerance, atol=tolerance)
    upstream = torch.randn(500, 4).to(dtype)
    ours = torch.autograd.grad(y, (x, weight, bias), upstream)
    theirs = torch.autograd.grad(expected, (x, weight, bias), upstream.float())
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=10 * tolerance, atol=10 * tolerance)


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(50, 4, dtype=torch.float64, requires_grad=True)
    owned, upstream = torch.rand(50) < 0.6, torch.randn(50, 4, dtype=torch.float64)

    def step() -> tuple[Tensor, Tensor]:
        y = distributed_batch_norm(x, owned, None, None, training=True)
        return y.detach(), torch.autograd.grad(y, x, upstream)[0]

    whole = step()
    monkeypatch.setattr(batch_norm, "_CHUNK_ELEMENTS_CPU", 28)  # 7 rows, the last chunk shorter
    for ours, theirs in zip(step(), whole, strict=True):
        assert_equal(ours, theirs)


def test_evaluation_uses_the_running_statistics_and_communicates_nothing() -> None:
    x, mean, var = torch.randn(7, 3), torch.randn(3), torch.rand(3) + 0.5
    before = mean.clone(), var.clone()
    y = distributed_batch_norm(x, torch.zeros(7, dtype=torch.bool), mean, var, training=False)
    assert torch.equal(y, F.batch_norm(x, mean, var))
    assert torch.equal(mean, before[0])
    assert torch.equal(var, before[1])
    with pytest.raises(ValueError, match="evaluation needs running_mean and running_var"):
        distributed_batch_norm(x, torch.zeros(7, dtype=torch.bool), None, None, training=False)


def run_one_vertex(rank: int, world_size: int) -> None:
    owned = torch.tensor([rank == 0])
    distributed_batch_norm(torch.ones(1, 2), owned, None, None, training=True, communicator=create_communicator())


def run_missing_vertices(rank: int, world_size: int) -> None:
    distributed_batch_norm(
        *(torch.ones(2, 2), torch.tensor([True, rank == 0]), None, None),
        training=True,
        num_vertices=6,
        communicator=create_communicator(),
    )


def test_fewer_vertices_than_the_graph_has_raise_on_every_rank() -> None:
    for error in run_ranks_expect_errors(3, run_missing_vertices):
        assert error.type_name == "ValueError"
        assert "batch norm over 4 of 6 vertices" in error.message


def test_too_few_vertices_raise_on_every_rank() -> None:
    for error in run_ranks_expect_errors(3, run_one_vertex):
        assert error.type_name == "ValueError"
        assert "at least 2 values of a feature in training (got 1 over all ranks)" in error.message


@pytest.mark.parametrize("shape", [(40, 3, 5), (40, 2, 3, 4), (40, 3, 1)])
def test_dimensions_after_the_features_enter_the_statistics(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(shape[1], dtype=torch.float64, requires_grad=True) for _ in range(2))
    ours, theirs = ([start(shape[1], dtype=torch.float64) for start in (torch.zeros, torch.ones)] for _ in range(2))
    owned = torch.ones(40, dtype=torch.bool)
    y = distributed_batch_norm(x, owned, *ours, weight, bias, training=True, num_vertices=40)
    expected = F.batch_norm(x, *theirs, weight, bias, training=True)
    assert_equal(y.detach(), expected.detach())
    upstream = torch.randn_like(x)
    gradients = (torch.autograd.grad(of, (x, weight, bias), upstream) for of in (y, expected))
    for a, b in zip(*gradients, strict=True):
        assert_equal(a, b)
    for a, b in zip(ours, theirs, strict=True):
        assert_equal(a, b)
    with pytest.raises(ValueError, match="batch norm over 40 of 41 vertices"):
        distributed_batch_norm(x, owned, *ours, weight, bias, training=True, num_vertices=41)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"\(rows, features\) \(got shape \(2,\)\)"):
        distributed_batch_norm(torch.ones(2), torch.ones(2, dtype=torch.bool), None, None, training=True)
    with pytest.raises(ValueError, match=r"owned_mask must be \(2,\) bool \(got \(3,\) torch.bool\)"):
        distributed_batch_norm(torch.ones(2, 3), torch.ones(3, dtype=torch.bool), None, None, training=True)


def test_of_several_dimensions_replicas_take_no_part_in_the_statistics() -> None:
    """Every other row is another rank's; values of one vertex lie side by side, so must what says whose they are."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, 4, dtype=torch.float64, generator=generator)
    owned = torch.tensor([True, False, True, True, False, False])
    out = distributed_batch_norm(x, owned, None, None, training=True, num_vertices=3)
    of_owned = x[owned].transpose(1, 2).flatten(0, 1)
    mean, var = of_owned.mean(0), of_owned.var(0, unbiased=False)
    expected = (x - mean.view(3, 1)) / torch.sqrt(var.view(3, 1) + 1e-5)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def norm_from_other_statistics(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    communicator = create_communicator()
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 5
    own = x.tensor_split(world_size)[rank].clone().requires_grad_()
    running_mean = torch.full((3,), torch.nan if rank == 0 else 2.0 * rank, dtype=torch.float64)
    is_owned = torch.ones(len(own), dtype=torch.bool)
    out = distributed_batch_norm(own, is_owned, running_mean, None, training=True, communicator=communicator)
    (out * out * torch.arange(3)).sum().backward()
    assert own.grad is not None
    return out.detach(), own.grad


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_running_statistics_of_ranks_may_differ(world_size: int) -> None:
    """After each has trained by itself before. Each rank's own were what its sums referred to: results were wrong by
    what they differed, and no training brought them together.
    """
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 5
    x.requires_grad_()
    out = F.batch_norm(x, None, None, training=True)
    (out * out * torch.arange(3)).sum().backward()
    assert x.grad is not None
    results = run_ranks(world_size, norm_from_other_statistics)
    torch.testing.assert_close(torch.cat([out for out, _ in results]), out.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([grad for _, grad in results]), x.grad, rtol=1e-12, atol=1e-12)
