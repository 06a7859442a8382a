# SPDX-License-Identifier: Apache-2.0
"""Logits of -inf in attention that is split by source: all of a part's, all of a row's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dgl_hybrid import ops
from dgl_hybrid.exchange.connect import create_communicator
from dgl_hybrid.exchange.parts import ring_messages, whole_message
from dgl_hybrid.graph import split_attention
from dgl_hybrid.graph.split_attention import _Attended
from dgl_hybrid.graph.split_block import SplitBlock
from dgl_hybrid.ops import EdgeDropout, SparseGraph
from dgl_hybrid.ops.sparse_graph import Adjacency
from tests.exchange.test_partial_sums import World, random_world
from tests.helpers.world import run_ranks

HEADS = 2
HUGE = 1e155
"""Times itself it is infinite."""


def make_operands(world: World, op: str, width: int) -> list[Tensor]:
    """Of all ranks, one after the other: in the first head, sources of rank 1 have logits of -inf for everyone, and
    every fifth destination has none that is not."""
    num_dst, num_held = world.matrix.shape
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "gat": [(num_held, HEADS, width), (num_held, HEADS), (num_dst, HEADS)],
        "gatv2": [(num_held, HEADS, width), (num_dst, HEADS, width), (1, HEADS, width)],
    }
    operands = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes[op]]
    first = world.structures[0].num_held
    of_rank_1 = slice(first, first + world.structures[1].num_held)
    if op == "gat":
        _, el, er = operands
        el[of_rank_1, 0] = er[::5, 0] = float("-inf")
    else:
        # x is what is summed, too, so it has to be finite: the product with the attention is not.
        x, x_dst, attention = operands
        x[:, 0, 0] /= HUGE
        x_dst[:, 0, 0] /= HUGE
        attention[:, 0, 0] = HUGE
        x[of_rank_1, 0, 0] = x_dst[::5, 0, 0] = -HUGE
    return [operand.requires_grad_() for operand in operands]


def gradients_of(out: Tensor, operands: list[Tensor]) -> list[Tensor]:
    weights = torch.arange(1, 1 + out.shape[-1], dtype=torch.float64).expand(out.shape)
    return list(torch.autograd.grad(out, operands, weights))


def run_unsplit(world: World, op: str, width: int, slope: float = 0.2) -> list[Tensor]:
    """Result and gradients on one process; rows of `world.matrix` are destinations."""
    dst, src = world.matrix.nonzero(as_tuple=True)
    counts = world.matrix[dst, src].long()
    dst, src = dst.repeat_interleave(counts), src.repeat_interleave(counts)
    graph = SparseGraph.from_coo(src, dst, world.matrix.shape[1], world.matrix.shape[0])
    operands = make_operands(world, op, width)
    out = (ops.gat if op == "gat" else ops.gatv2)(graph, *operands, negative_slope=slope)
    return [out.detach(), *gradients_of(out, operands)]


def run_split(
    rank: int,
    world_size: int,
    op: str,
    chunk_rows: int | None,
    width: int,
    slope: float = 0.2,
    *,
    least_readers: int | None = None,
    drops: bool = False,
    piece_numbers: int | None = None,
) -> list[Tensor]:
    for name, value in (("_LEAST_READERS", least_readers), ("_PIECE_NUMBERS", piece_numbers)):
        if value is not None:
            before = getattr(split_attention, name)
            setattr(split_attention, name, value)
            try:
                return run_split(rank, world_size, op, chunk_rows, width, slope, drops=drops)
            finally:
                setattr(split_attention, name, before)
    world = random_world(world_size, 21)
    structure, communicator = world.structures[rank], create_communicator()
    plan = structure.exchange
    messages = [whole_message(plan)] if chunk_rows is None else ring_messages(plan, communicator, chunk_rows)
    attention = SplitBlock(structure, communicator, messages, device=torch.device("cpu")).attention
    assert attention is not None
    num_readers = [[len(some.rows) for some in of_part] for of_part in attention._readers]
    assert [sum(numbers) for numbers in num_readers] == [len(part.dst_rows) for part in attention.layer.parts]
    if chunk_rows is not None:
        most = max(chunk_rows, split_attention._LEAST_READERS)
        assert all(number <= most for numbers in num_readers for number in numbers)
    dropout = EdgeDropout(p=0.4, keys=(3, 5), edge_keys=torch.arange(structure.num_edges)) if drops else None
    held, read = ([getattr(s, name) for s in world.structures] for name in ("num_held", "num_dst"))
    first, second, third = make_operands(world, op, width)
    if op == "gat":
        mine = [first.split(held)[rank], second.split(held)[rank], third.split(read)[rank]]
        out = attention.gat(*mine, negative_slope=slope, dropout=dropout)
    else:
        mine = [first.split(held)[rank], second.split(read)[rank], third]
        out = attention.gatv2(*mine, negative_slope=slope, dropout=dropout)
    return [out.detach(), *gradients_of(out, mine)]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("chunk_rows", [None, 2])
@pytest.mark.parametrize("width", [3, 1])
@pytest.mark.parametrize("op", ["gat", "gatv2"])
def test_parts_without_a_finite_logit_weigh_nothing(
    op: str, width: int, chunk_rows: int | None, world_size: int
) -> None:
    world = random_world(world_size, 21)
    expected = run_unsplit(world, op, width)
    is_nan = expected[0].isnan()
    first = world.structures[0].num_held
    reads_rank_1 = world.matrix[:, first : first + world.structures[1].num_held].sum(1) > 0
    assert bool((reads_rank_1 & ~is_nan.any(2).any(1)).any()), "no row is finite beside a part that is not"
    assert bool(is_nan[::5, 0].any()), "no row is -inf in all its parts"
    assert not bool(is_nan[:, 1].any())
    assert_same(op, expected, run_ranks(world_size, run_split, op, chunk_rows, width))
    if width == 3:
        assert_same(op, expected, run_ranks(world_size, run_split, op, chunk_rows, width, piece_numbers=7))


def test_few_numbers_are_gathered_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_attention, "_PIECE_NUMBERS", 12)
    rows = SparseGraph.from_csc(torch.tensor([0, 0, 5, 6, 13]), torch.arange(13), num_src=13).in_edges
    pieces = list(split_attention._in_pieces(rows, torch.tensor([3, 0, 1]), 4))
    assert [row.tolist() for row, _ in pieces] == [[0, 0, 0], [0, 0, 0], [0, 2, 2], [2, 2, 2]]
    assert torch.cat([source for _, source in pieces]).tolist() == [*range(6, 13), *range(5)]
    assert list(split_attention._in_pieces(rows, torch.tensor([0]), 4)) == []


def test_no_row_is_gathered_where_all_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that diverges ended for want of memory, where its loss would have told."""
    graph = SparseGraph.from_csc(torch.tensor([0, 3]), torch.tensor([0, 1, 1]), num_src=2)
    x, el, er = torch.full((2, 1, 4), float("nan")), torch.full((2, 1), float("nan")), torch.zeros(1, 1)
    call = split_attention._Call("gat", 0.2, (None,), False)
    looked_at: list[int] = []
    in_pieces_of = split_attention._in_pieces

    def in_pieces(rows: Adjacency, chosen: Tensor, width: int) -> Iterator[tuple[Tensor, Tensor]]:
        looked_at.append(len(chosen) * width)
        return in_pieces_of(rows, chosen, width)

    monkeypatch.setattr(split_attention, "_in_pieces", in_pieces)
    result = split_attention._attend(call, None, graph, split_attention._Sources(x, el), er, None)
    assert bool(result.out.isnan().all())
    assert looked_at == [1, 0], "logits of one row, and no row of x"


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("least_readers", [1, 3])
@pytest.mark.parametrize("op", ["gat", "gatv2"])
def test_readers_of_a_message_take_turns(op: str, least_readers: int, drops: bool) -> None:
    """A few sources may be read by nearly all rows: copies and results for all of these would not fit the budget."""
    together = run_ranks(3, run_split, op, 2, 3, drops=drops)
    in_turns = run_ranks(3, run_split, op, 2, 3, drops=drops, least_readers=least_readers)
    for one, other in zip(together, in_turns, strict=True):
        for expected, found in zip(one, other, strict=True):
            scale = expected.nan_to_num(0.0).abs().amax(0, keepdim=True).clamp(min=1e-300)
            torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=1e-11, equal_nan=True)


def assert_same(op: str, expected: list[Tensor], results: list[list[Tensor]]) -> None:
    for position, whole in enumerate(expected):
        pieces = [result[position] for result in results]
        found = sum(pieces) if op == "gatv2" and position == 3 else torch.cat(pieces)
        scale = whole.nan_to_num(0.0).abs().amax(0, keepdim=True).clamp(min=1e-300)  # of HUGE's column, its own
        torch.testing.assert_close(found / scale, whole / scale, rtol=0, atol=1e-11, equal_nan=True)


@pytest.mark.parametrize("slope", [2, -1, 0])
@pytest.mark.parametrize("op", ["gat", "gatv2"])
def test_slopes_may_be_integers(op: str, slope: int) -> None:
    """Kernels took the bits of one for a float: 2 was 0, and -1 not a number."""
    world = random_world(2, 21)
    expected = run_unsplit(world, op, 3, float(slope))
    assert bool(expected[0].isfinite().any())
    assert_same(op, expected, run_ranks(2, run_split, op, None, 3, slope))


@pytest.mark.parametrize("size", [1.0, 1e3, 1e5, 3e7])
def test_shares_of_parts_add_up_whatever_the_logits(size: float) -> None:
    """By the logarithm of all weights, which is rounded as the logits are, parts of 1 gave 0.996 to 1.004, or 2."""
    generator = torch.Generator().manual_seed(0)
    num_rows, rows = 400, torch.arange(400)
    ours, other = (
        _Attended(torch.ones(num_rows, HEADS, 3), size + torch.randn(num_rows, HEADS, generator=generator), None)
        for _ in range(2)
    )
    ours.lse[:5], other.lse[3:8] = float("-inf"), float("-inf")
    ours.out[:5], other.out[3:8] = 0.0, 0.0
    before, added = ours.lse.double(), other.lse.double()
    ours.add(rows, other)
    expected = torch.ones(num_rows, HEADS, 3)
    expected[3:5] = 0.0
    torch.testing.assert_close(ours.out, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.lse.double(), torch.logaddexp(before, added), rtol=2e-7, atol=1e-6)
