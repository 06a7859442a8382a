# SPDX-License-Identifier: Apache-2.0
"""The exchange of rows and its derivative are adjoint, for any order, dtype and number of ranks."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dgl_hybrid.errors import ExchangeError
from dgl_hybrid.exchange import connect
from dgl_hybrid.exchange import ids as ids_module
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.connect import RankTransport, create_communicator, default_timeout_s
from dgl_hybrid.exchange.ids import Ownership, fetch_rows, request_ids
from dgl_hybrid.exchange.plan import ExchangePlan, check_symmetry
from dgl_hybrid.exchange.rows import extend_rows
from tests.helpers.world import run_ranks, run_ranks_expect_errors, stay_away, tell_who_stays_away

NUM_ROWS = 7


def make_plans(world_size: int, seed: int = 0) -> list[ExchangePlan]:
    """Random plans that fit together; some pairs exchange nothing, some rows go to several peers."""
    generator = torch.Generator().manual_seed(seed)
    chosen = [
        [
            torch.nonzero(torch.rand(NUM_ROWS, generator=generator) < (0.0 if to == at or (at, to) == (0, 1) else 0.5))
            for to in range(world_size)
        ]
        for at in range(world_size)
    ]
    sent = [[rows.flatten() for rows in by_peer] for by_peer in chosen]
    return [
        ExchangePlan(
            rank=rank,
            world_size=world_size,
            layer=2,
            num_rows=NUM_ROWS,
            send_index=torch.cat(sent[rank]),
            send_counts=tuple(len(rows) for rows in sent[rank]),
            recv_counts=tuple(len(sent[peer][rank]) for peer in range(world_size)),
            recv_global=torch.cat([sent[peer][rank] + NUM_ROWS * peer for peer in range(world_size)]),
        )
        for rank in range(world_size)
    ]


def run_adjoint(rank: int, world_size: int) -> dict[str, float]:
    communicator, plan = create_communicator(), make_plans(world_size)[rank]
    generator = torch.Generator().manual_seed(rank)
    x = torch.rand(NUM_ROWS, 3, generator=generator, dtype=torch.float64).requires_grad_()
    y = torch.rand(NUM_ROWS + plan.num_received, 3, generator=generator, dtype=torch.float64).requires_grad_()
    (extended,) = extend_rows([x], plan, communicator)
    (back,) = torch.autograd.grad(extended, x, y, create_graph=True)
    products = torch.stack([(extended * y).sum(), (x * back).sum()]).detach()
    # The map y -> back is linear; its derivative along z is the forward of z.
    z = torch.rand(NUM_ROWS, 3, generator=generator, dtype=torch.float64)
    (twice,) = torch.autograd.grad(back, y, z)
    (expected,) = extend_rows([z], plan, communicator)
    dist.all_reduce(products)
    return {
        "forward": float(products[0]),
        "adjoint": float(products[1]),
        "double": float((twice - expected).abs().max()),
    }


def run_values(rank: int, world_size: int, dtype: torch.dtype) -> dict[str, Any]:
    communicator, plan = create_communicator(), make_plans(world_size)[rank]
    own = (torch.arange(NUM_ROWS) + NUM_ROWS * rank) % 2 if dtype == torch.bool else torch.arange(NUM_ROWS) + 10 * rank
    held = torch.stack([own, own], 1).to(dtype)
    communicator.clock.drain()
    extended, single = extend_rows([held, held[:, 0]], plan, communicator)
    (event,) = communicator.clock.drain()
    return {
        "extended": extended.to(torch.float64),
        "single": single.to(torch.float64),
        "bytes": event.bytes_sent,
        "dtype": extended.dtype,
        "layer": event.layer,
    }


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_adjoint_and_double_backward(world_size: int) -> None:
    check_symmetry(make_plans(world_size))
    for result in run_ranks(world_size, run_adjoint):
        assert result["forward"] == pytest.approx(result["adjoint"], rel=1e-13)
        assert result["double"] == 0.0


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int16, torch.bool]
)
def test_values_and_bytes(dtype: torch.dtype) -> None:
    plans = make_plans(3)
    for rank, result in enumerate(run_ranks(3, run_values, dtype)):
        ids = plans[rank].recv_global
        peer, row = ids // NUM_ROWS, ids % NUM_ROWS
        expected = (ids % 2 if dtype == torch.bool else row + 10 * peer).double()
        assert torch.equal(result["extended"][NUM_ROWS:], torch.stack([expected, expected], 1))
        assert torch.equal(result["single"][NUM_ROWS:], expected)
        assert result["dtype"] == dtype
        assert result["layer"] == 2
        assert result["bytes"] == plans[rank].num_sent * 3 * torch.empty(0, dtype=dtype).element_size()


def test_a_field_has_one_row_for_each_row_computed() -> None:
    (plan,) = make_plans(1)
    with pytest.raises(ValueError, match="must have 7 rows"):
        extend_rows([torch.ones(6, 2)], plan, Communicator(None))


def run_with_absentee(rank: int, world_size: int) -> tuple[str, float]:
    communicator, plan = create_communicator(timeout_s=4.0), make_plans(world_size)[rank]
    start_s = time.perf_counter()
    if rank == 1:
        stay_away(rank, world_size)
        return "", 0.0
    try:
        extend_rows([torch.ones(NUM_ROWS, 2)], plan, communicator)
    except ExchangeError as error:
        tell_who_stays_away(rank)
        return str(error), time.perf_counter() - start_s
    return "no error", 0.0


def meet_with_absentee(rank: int, world_size: int, transport: RankTransport) -> str:
    def never_comes(*args: Any, **options: Any) -> str:
        stay_away(rank, world_size)
        return "nobody met"

    place = "torch.distributed.barrier" if transport == "collective" else f"{connect.__name__}.connect_through_memory"
    with mock.patch(place, never_comes) if rank == 1 else contextlib.nullcontext():
        try:
            create_communicator(timeout_s=4.0, transport=transport)
        except ExchangeError as error:
            tell_who_stays_away(rank)
            return str(error)
    return "no error"


@pytest.mark.parametrize("transport", ["auto", "collective"])
def test_who_is_missing_as_ranks_meet_is_named(transport: RankTransport) -> None:
    results = run_ranks(3, meet_with_absentee, transport)
    for rank in (0, 2):
        assert results[rank].startswith(
            f"the meeting of all ranks did not complete on rank {rank} of 3: rank 1 did not"
        )


def test_the_missing_rank_is_named() -> None:
    results = run_ranks(3, run_with_absentee)
    for rank in (0, 2):
        message, elapsed_s = results[rank]
        assert f"on rank {rank} of 3: rank 1 did not take part" in message
        assert "same calls in the same order" in message
        assert elapsed_s < 100.0


def run_apart(rank: int, world_size: int) -> str:
    """Rank 1 skips an exchange and waits where the others come later."""
    communicator, plan = create_communicator(timeout_s=4.0, transport="collective"), make_plans(world_size)[rank]
    extend_rows([torch.ones(NUM_ROWS, 2)], plan, communicator)
    try:
        if rank == 1:
            communicator.barrier()
            communicator.barrier()
        extend_rows([torch.ones(NUM_ROWS, 2)], plan, communicator)
    except ExchangeError as error:
        return str(error)
    return "no error"


def test_ranks_that_wait_for_each_other_in_different_places_say_where() -> None:
    """Over a process group each of them came somewhere, so "a peer left or failed" was all that was said."""
    first, second, third = run_ranks(3, run_apart)
    assert "exchange 2 (layer 2, forward) did not complete on rank 0 of 3: rank 1 waits in a barrier after" in first
    assert "a barrier after exchange 1 did not complete on rank 1 of 3" in second
    assert "rank 0 waits in exchange 2 (layer 2, forward); rank 2 waits in exchange 2 (layer 2, forward)" in second
    assert "rank 1 waits in a barrier after exchange 1" in third


def ask_for_timeouts(rank: int, world_size: int) -> list[float]:
    dist.destroy_process_group()
    found = []
    for options in ({"timeout": timedelta(seconds=77)}, {}, {"timeout": timedelta(minutes=30)}):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, **options)
        found.append(default_timeout_s())
        dist.destroy_process_group()
    return [*found, default_timeout_s()]


def test_ranks_wait_as_long_as_the_script_told_its_process_group() -> None:
    # PyTorch's own default counts as none.
    assert run_ranks(1, ask_for_timeouts) == [[77.0, 600.0, 600.0, 600.0]]


def ask_beyond(rank: int, world_size: int) -> str:
    """Rank 0 believes that rank 1 owns more than it does."""
    offsets = torch.tensor([0, 5, 12] if rank == 0 else [0, 5, 10])
    ownership = Ownership(offsets=offsets, rank=rank)
    try:
        request_ids(create_communicator(), ownership, torch.tensor([11] if rank == 0 else [2]))
    except ExchangeError as error:
        return str(error)
    return ""


def test_ids_that_a_rank_does_not_own_are_refused() -> None:
    """They were taken for positions of other rows, or from the end."""
    _, said = run_ranks(2, ask_beyond)
    assert said.startswith("rank 1 of 2 owns ids [5, 10), but was asked for 11 and 0 more outside: peers know another")


SHAPES = [(3,), (), (0,), (2, 2)]
"""Of one row."""
BLOCK_ROWS = 4


def ids_to_fetch(kind: str, rank: int, offsets: Sequence[int]) -> Tensor:
    """Other ids on each rank."""
    generator = torch.Generator().manual_seed(rank)
    every = torch.arange(offsets[-1])
    is_own = (every >= offsets[rank]) & (every < offsets[rank + 1])
    return {
        # Some are there several times, and own and foreign ones have no order.
        "mixed": torch.randint(offsets[-1], (45,), generator=generator),
        "foreign, each once, ascending": every[~is_own],
        "foreign, each once, descending": every[~is_own].flip(0),
        "foreign, each twice": every[~is_own].repeat(2)[torch.randperm(2 * int((~is_own).sum()), generator=generator)],
        "own": every[is_own].flip(0),
        "none on one rank": every[: 0 if rank == 1 else None].flip(0),
    }[kind]


def run_fetch(rank: int, world_size: int, kind: str, offsets: Sequence[int]) -> list[str]:
    """Returns which fetched rows are not those of the whole table."""
    communicator = create_communicator()
    ownership = Ownership(offsets=torch.tensor(offsets), rank=rank)
    wanted, differing = ids_to_fetch(kind, rank, offsets), list[str]()
    for shape, is_placed in itertools.product(SHAPES, (False, True)):
        table = torch.randn(offsets[-1], *shape, generator=torch.Generator().manual_seed(7))
        made = list[Tensor]()

        def new_rows(size: tuple[int, ...], dtype: torch.dtype, made: list[Tensor] = made) -> Tensor:
            made.append(torch.full(size, float("nan"), dtype=dtype))
            return made[-1]

        with mock.patch.object(ids_module, "_BLOCK_BYTES", BLOCK_ROWS * 4 * math.prod(shape)):
            found = fetch_rows(
                communicator,
                ownership,
                table[ownership.start : ownership.stop],
                wanted,
                new_rows=new_rows if is_placed else None,
            )
        is_right = found.dtype == table.dtype and torch.equal(found, table[wanted])
        if not is_right or [one.data_ptr() for one in made] != [found.data_ptr()] * is_placed:
            differing.append(f"rows of {shape}{', placed' * is_placed}")
    return differing


@pytest.mark.parametrize(
    "kind",
    [
        *("mixed", "foreign, each once, ascending", "foreign, each once, descending", "foreign, each twice", "own"),
        "none on one rank",
    ],
)
@pytest.mark.parametrize("offsets", [(0, 5, 12, 20), (0, 9, 9, 14)], ids=["each owns some", "one owns nothing"])
def test_fetched_rows_are_those_of_the_whole_table(kind: str, offsets: tuple[int, ...]) -> None:
    """Rows are taken to their places a block at a time, of which a small graph has but one."""
    assert run_ranks(3, run_fetch, kind, offsets) == [[]] * 3


def run_beside_one_without_memory(rank: int, world_size: int) -> str:
    """Rank 1 has no memory for an exchange of rows, and tells the others so."""
    communicator, plan = create_communicator(transport="shared_memory"), make_plans(world_size)[rank]
    transport = communicator.transport
    assert transport is not None
    if rank == 1:
        transport._leave(OSError(12, "Cannot allocate memory"))  # type: ignore[attr-defined]
        return "gone"
    try:
        extend_rows([torch.ones(NUM_ROWS, 2)], plan, communicator)
    except (RuntimeError, ExchangeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_memory_that_a_peer_lacks_is_not_ones_own() -> None:
    """It was raised as it came, so that a script that catches its own lack of memory would have caught it."""
    first, gone, third = run_ranks(3, run_beside_one_without_memory)
    assert gone == "gone"
    for told in (first, third):
        assert told.startswith("ExchangeError: exchange 1 (layer 2, forward) did not complete")
        assert "rank 1 of 3: [Errno 12] Cannot allocate memory" in told


def run_out_of_memory(rank: int, world_size: int) -> int:
    """Returns how often peers were looked for, which takes seconds."""
    communicator = create_communicator()
    assert communicator.transport is not None
    look = mock.Mock(return_value=[])
    communicator.transport.find_late_ranks = look  # type: ignore[method-assign]
    for error in (
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: out of memory"),  # of pinned memory
        RuntimeError("CUDA error: device-side assert triggered"),  # of a kernel before the copy that waits for it
    ):
        with pytest.raises(RuntimeError) as caught, communicator.naming("exchange 1"):
            raise error
        assert caught.value is error
    num_looked = look.call_count
    with pytest.raises(ExchangeError), communicator.naming("exchange 1"):
        raise RuntimeError("Connection reset by peer")
    assert look.call_count == num_looked + 1
    return num_looked


def test_what_fails_on_this_rank_is_no_peers_fault() -> None:
    assert run_ranks(2, run_out_of_memory) == [0, 0]


GATHERED = (torch.float64, torch.bfloat16, torch.int16, torch.uint16, torch.bool, torch.float8_e4m3fn)


def gather_of_each_dtype(rank: int, world_size: int) -> list[tuple[torch.dtype, Tensor]]:
    """Returns what came, as float64: some dtypes do not travel to the test."""
    communicator = create_communicator()
    rows = 10 * rank + torch.arange(3 * rank).view(rank, 3)
    gathered = [communicator.gather_rows(rows.to(torch.float32).to(dtype)) for dtype in GATHERED]
    return [(found.dtype, found.to(torch.float64)) for found in gathered]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rows_of_all_ranks_in_dtypes_that_gloo_does_not_send(world_size: int) -> None:
    """A peer was said to have left."""
    expected = torch.cat([10 * rank + torch.arange(3 * rank).view(rank, 3) for rank in range(world_size)])
    for found in run_ranks(world_size, gather_of_each_dtype):
        assert [dtype for dtype, _ in found] == list(GATHERED)
        for dtype, rows in found:
            assert torch.equal(rows, expected.to(torch.float32).to(dtype).to(torch.float64))


def gather_of_other_rows(rank: int, world_size: int, what: str) -> Tensor:
    communicator = create_communicator()
    rows = torch.zeros(0 if rank == 1 else 4, 3 + (what == "width" and rank == 1))
    return communicator.gather_rows(rows.to(torch.int32) if what == "dtype" and rank == 1 else rows)


@pytest.mark.parametrize(("what", "found"), [("width", "[4, 'torch.float32']"), ("dtype", "[3, 'torch.int32']")])
def test_rows_that_do_not_go_below_each_other_are_refused_on_all_ranks(what: str, found: str) -> None:
    """Of another width gloo ended the processes; of another dtype, what came was taken for this rank's."""
    for error in run_ranks_expect_errors(3, gather_of_other_rows, what):
        assert error.type_name == "ExchangeError"
        assert f"(got [3, 'torch.float32'] on rank 0 and {found} on rank 1 of 3)" in error.message
