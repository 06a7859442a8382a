# SPDX-License-Identifier: Apache-2.0
"""What ranks of one host gather and sum goes through its memory, as exactly as rows do."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from dgl_hybrid.errors import ExchangeError
from dgl_hybrid.exchange.connect import create_communicator
from dgl_hybrid.exchange.rows import extend_rows
from tests.exchange.test_rows import NUM_ROWS, make_plans
from tests.exchange.test_shared_memory import DTYPES, small_rounds, through_memory
from tests.helpers.world import run_ranks


def run_gathers_and_sums(rank: int, world_size: int, round_bytes: int, hosts: Sequence[int] | None = None) -> list[str]:
    """Of any dtype and size, some in rounds and shares; rows that were lent out before stay what they are."""
    memory, wrong = through_memory(rank=rank, hosts=hosts), []
    transport = memory.transport
    assert transport is not None
    rng, large = random.Random(5), 40_000 if round_bytes > 1000 else 2000
    with small_rounds(round_bytes):
        for number in range(40):
            dtype, shape = rng.choice(DTYPES), rng.choice([(), (0,), (1,), (7,), (3, 5), (large,)])
            of_rank = [torch.randint(-9, 9, shape, generator=make(number, peer)) for peer in range(world_size)]
            tensors = [tensor.to(dtype) for tensor in of_rank]
            lent = memory.borrow(torch.full((world_size, 2), rank), [1] * world_size, [1] * world_size)
            gathered = transport.all_gather(tensors[rank], "a test")
            if any(not torch.equal(a, b) or a.dtype != b.dtype for a, b in zip(gathered, tensors, strict=True)):
                wrong.append(f"{number}: gather of {dtype} {shape}")
            if dtype != torch.bool:
                mine = tensors[rank].clone()
                if number % 3 == 0 and len(shape) == 2:
                    mine = mine.t().contiguous().t()  # not one row after the other
                if number % 5 == 0 and dtype == torch.float32:
                    mine.requires_grad_()
                transport.all_reduce(mine, "a test")
                if not torch.equal(mine.detach(), torch.stack(of_rank).sum(dim=0).to(dtype)):
                    wrong.append(f"{number}: sum of {dtype} {shape}")
            if [part.tolist() for part in lent] != [[[peer, peer]] for peer in range(world_size)]:
                wrong.append(f"{number}: {lent}")
    return wrong


def make(*seeds: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(1000**k * seed for k, seed in enumerate(seeds)))


@pytest.mark.parametrize("round_bytes", [96, 1 << 20])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gathers_and_sums_of_any_dtype(world_size: int, round_bytes: int) -> None:
    assert run_ranks(world_size, run_gathers_and_sums, round_bytes) == [[]] * world_size


def run_bits_of_sums(rank: int, world_size: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Sums of numbers that round, and what comes of adding them in the order of ranks."""
    transport, found = through_memory().transport, {}
    assert transport is not None
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for size in (5, 100_000):
            summands = [torch.randn(size, generator=make(size, peer)).to(dtype) for peer in range(world_size)]
            total = summands[rank].clone()
            transport.all_reduce(total)
            wide = [x.float() if dtype.itemsize == 2 else x for x in summands]
            found[f"{dtype} {size}"] = total, sum(wide[1:], start=wide[0]).to(dtype)
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sums_are_in_the_order_of_ranks_on_all_of_them(world_size: int) -> None:
    for found in run_ranks(world_size, run_bits_of_sums):
        for name, (total, expected) in found.items():
            assert torch.equal(total, expected), name


def run_sums_at_uneven_pace(rank: int, world_size: int) -> list[str]:
    """A rank that reads late finds what was shown, not what comes after it."""
    communicator, own, wrong = through_memory(), random.Random(f"sums {rank}"), []
    for number in range(150):
        for size in (3, 30_000):
            if own.random() < 0.1:
                time.sleep(own.random() * 0.01)
            total = communicator.sum_(torch.full((size,), float(number + rank)))
            if bool((total != number * world_size + sum(range(world_size))).any()):
                wrong.append(f"{number}: {total}")
        told = communicator.gather_ints([number, rank])
        if told != [[number, peer] for peer in range(world_size)]:
            wrong.append(f"{number}: {told}")
    return wrong


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sums_of_ranks_that_dawdle(world_size: int) -> None:
    assert run_ranks(world_size, run_sums_at_uneven_pace) == [[]] * world_size


def run_odd_layouts(rank: int, world_size: int, way: str) -> list[str]:
    """Strides of one entry, or of none, may be anything; values may lie in memory negated, to be read otherwise."""
    communicator, wrong = create_communicator(transport=way, timeout_s=30.0), []
    assert communicator.transport is not None
    layouts: dict[str, Callable[[Tensor], Tensor]] = {
        "one row's column": lambda table: table[:1, 0],
        "nothing, by twos": lambda table: table.flatten()[:0:2],
        "expanded": lambda table: table[0, 0].expand(1, 1),
        "one entry of a transposed": lambda table: table.t()[:1, :1],
        "one row of a transposed": lambda table: table[:, :1].t()[:1],
        "no rows, by twos": lambda table: table[:0, ::2],
        "negated": lambda table: torch.complex(table, table).conj().imag,
        "conjugated": lambda table: torch.complex(table, table + 1).conj(),
    }
    for name, layout in layouts.items():
        tensor = layout(torch.arange(10.0, dtype=torch.float64).view(2, 5) + rank)
        gathered = communicator.transport.all_gather(tensor)
        if not torch.equal(gathered[rank], tensor) or len(gathered) != world_size:
            wrong.append(f"gather: {name}")
        if tensor.dim() == 2:
            to, of = (rank + 1) % world_size, (rank - 1) % world_size
            sent, received = [0] * world_size, [0] * world_size
            sent[to] = received[of] = len(tensor)
            if not torch.equal(communicator.exchange(tensor, sent, received), gathered[of]):
                wrong.append(f"exchange: {name}")
            if not torch.equal(communicator.borrow(tensor, sent, received)[of], gathered[of]):
                wrong.append(f"borrow: {name}")
        if name != "expanded":
            expected = sum(gathered[1:], start=gathered[0])
            if not torch.equal(communicator.sum_(tensor), expected):
                wrong.append(f"sum: {name}")
    return wrong


@pytest.mark.parametrize("way", ["collective", "shared_memory"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_tensors_of_any_layout(world_size: int, way: str) -> None:
    assert run_ranks(world_size, run_odd_layouts, way) == [[]] * world_size


def run_elsewhere(rank: int, world_size: int, way: str) -> str:
    """Rank 1 is somewhere else than the others are."""
    communicator, plan = through_memory(timeout_s=600.0), make_plans(world_size)[rank]
    extend_rows([torch.ones(NUM_ROWS, 2)], plan, communicator)
    try:
        if way == "sum of other size":
            communicator.sum_(torch.ones(3 + rank % 2))
        elif way == "sum of something else":
            communicator.sum_(torch.ones(3), what="x" + "é" * 30 + "." * rank)  # 48 bytes of it are told
            communicator.sum_(torch.ones(3), what="more gradients" if rank == 1 else "gradients")
        elif way == "sum of other dtype":
            communicator.sum_(torch.ones(3, dtype=torch.float64 if rank == 1 else torch.float32))
        elif rank != 1:
            extend_rows([torch.ones(NUM_ROWS, 2)], plan, communicator)
        elif way == "gather":
            communicator.gather_ints([1], what="an evaluation")
        else:
            communicator.sum_(torch.ones(3), what="gradients")
    except ExchangeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("way", "first", "second"),
    [
        ("gather", "exchanges float32 rows of 8 bytes for layer 2 in forward", "gathers 1024 bytes (an evaluation)"),
        (
            "sum",
            "exchanges float32 rows of 8 bytes for layer 2 in forward",
            "sums 3 float32 values (gradients)",
        ),
        ("sum of other size", "sums 3 float32 values (sum over ranks)", "sums 4 float32 values (sum over ranks)"),
        ("sum of other dtype", "sums 3 float32 values (sum over ranks)", "sums 3 float64 values (sum over ranks)"),
        ("sum of something else", "sums 3 float32 values (gradients)", "sums 3 float32 values (more gradients)"),
    ],
)
def test_ranks_that_do_different_things_say_so_at_once(way: str, first: str, second: str) -> None:
    """Over a process group they waited for each other until one gave up, after ten minutes."""
    start_s = time.monotonic()
    for message in run_ranks(3, run_elsewhere, way):
        assert message.startswith(f"ranks are not in the same place: rank 0 of 3 {first}, rank 1 {second}. Every rank")
    assert time.monotonic() - start_s < 100.0
