# SPDX-License-Identifier: Apache-2.0
"""The transport through shared memory moves the bits of the collective one; it notices who is late, lost or astray."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dgl_hybrid.errors import ExchangeError
from dgl_hybrid.exchange import host_links, shared_memory_transport
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.connect import RankTransport, create_communicator
from dgl_hybrid.exchange.host_links import PeerLink
from dgl_hybrid.exchange.posts import LEAVING, Doing, Post
from dgl_hybrid.exchange.rows import extend_rows
from dgl_hybrid.exchange.shared_memory_transport import SharedMemoryTransport
from dgl_hybrid.exchange.shared_segments import Outbox, PeerSegment
from dgl_hybrid.exchange.transport import ExchangeTag
from tests.exchange.test_rows import NUM_ROWS, make_plans
from tests.helpers.hosts import on_hosts
from tests.helpers.world import run_ranks, run_ranks_expect_errors, stay_away, tell_who_stays_away

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.bool, torch.complex128]


def through_memory(timeout_s: float = 30.0, rank: int = 0, hosts: Sequence[int] | None = None) -> Communicator:
    """Of one host; or of those that ranks are to believe they are on."""
    with on_hosts(rank, hosts):
        return create_communicator(transport="shared_memory" if hosts is None else "auto", timeout_s=timeout_s)


@contextlib.contextmanager
def small_rounds(num_bytes: int) -> Iterator[None]:
    """Makes messages go through the outbox in many pieces."""
    before = shared_memory_transport.ROUND_BYTES
    shared_memory_transport.ROUND_BYTES = num_bytes
    try:
        yield
    finally:
        shared_memory_transport.ROUND_BYTES = before


# -------------------------------------------------------------------- the same bits as the collective transport


def run_both(rank: int, world_size: int, hosts: Sequence[int] | None = None) -> list[tuple[str, Tensor, Tensor]]:
    """Returns what differs."""
    ways, differing = (create_communicator(transport="collective"), through_memory(rank=rank, hosts=hosts)), []
    for seed, widths in enumerate([(3,), (1, 4), (0, 2, 5)]):
        plan = make_plans(world_size, seed)[rank]
        generator = torch.Generator().manual_seed(rank)
        values = [torch.randn(NUM_ROWS, width, generator=generator) for width in widths]
        weights = [torch.randn(NUM_ROWS + plan.num_received, width, generator=generator) for width in widths]
        found: list[list[Tensor]] = []
        for communicator in ways:
            fields = [value.clone().requires_grad_() for value in values]
            extended = extend_rows(fields, plan, communicator)
            grads = torch.autograd.grad(extended, fields, [w.clone().requires_grad_() for w in weights])
            twice = extend_rows([*fields, torch.arange(NUM_ROWS) + rank], plan, communicator)
            found.append([*extended, *grads, *twice])
        for number, (expected, actual) in enumerate(zip(*found, strict=True)):
            if not torch.equal(expected, actual) or expected.dtype != actual.dtype:
                differing.append((f"plan {seed}, tensor {number}", expected.detach(), actual.detach()))
    return differing


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_rows_and_gradients_are_bitwise_those_of_the_collective_transport(world_size: int) -> None:
    assert run_ranks(world_size, run_both) == [[]] * world_size


def run_raw(rank: int, world_size: int, round_bytes: int, hosts: Sequence[int] | None = None) -> list[str]:
    """Uneven and zero splits, rows for oneself among them, of any dtype, written here or where they are sent from."""
    collective, memory = create_communicator(transport="collective"), through_memory(rank=rank, hosts=hosts)
    rng, differing = random.Random(7), []
    with small_rounds(round_bytes):
        for number in range(15):
            counts = [[rng.choice([0, 0, 1, 2, 9, 40]) for _ in range(world_size)] for _ in range(world_size)]
            dtype, shape = rng.choice(DTYPES), rng.choice([(), (3,), (2, 5), (0,)])
            sent, expected = counts[rank], [row[rank] for row in counts]
            rows = torch.randint(-9, 9, (sum(sent), *shape)).to(dtype)
            if dtype == torch.complex128:
                gathered = collective.exchange(torch.view_as_real(rows), sent, expected)
                wanted = torch.view_as_complex(gathered)
            else:
                wanted = collective.exchange(rows, sent, expected)
            results = [memory.exchange(rows, sent, expected)]
            placed = memory.send_buffer(rows.shape, dtype, rows.device).copy_(rows)
            results.append(torch.cat(memory.borrow(placed, sent, expected)))
            results.append(torch.cat(memory.borrow(rows, sent, expected)))
            if rank % 2 or number % 3:  # ranks need not all do the same here
                placed = memory.send_buffer(rows.shape, dtype, rows.device).copy_(rows)
                results.append(memory.exchange(placed, sent, expected, out=torch.full_like(wanted, 1)))
            else:
                results.append(memory.exchange(rows, sent, expected))
            differing += [f"{number}.{k}" for k, result in enumerate(results) if not torch.equal(wanted, result)]
    return differing


@pytest.mark.parametrize("round_bytes", [48, 1 << 20])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_any_splits_of_any_dtype(world_size: int, round_bytes: int) -> None:
    assert run_ranks(world_size, run_raw, round_bytes) == [[]] * world_size


def run_uneven_pace(rank: int, world_size: int, hosts: Sequence[int] | None = None) -> list[str]:
    """Ranks dawdle at random, between exchanges and while they read; sizes go up and down."""
    communicator, wrong = through_memory(rank=rank, hosts=hosts), []
    shared, own = random.Random(3), random.Random(f"pace {rank}")
    for number in range(60):
        counts = [[shared.choice([0, 5, 1000, 30_000]) for _ in range(world_size)] for _ in range(world_size)]
        sent, expected = counts[rank], [row[rank] for row in counts]
        stamps = [number * 100 + rank * 10 + peer for peer in range(world_size)]
        rows = communicator.send_buffer((sum(sent),), torch.int64, torch.device("cpu"))
        rows.copy_(torch.repeat_interleave(torch.tensor(stamps), torch.tensor(sent)))
        if own.random() < 0.2:
            time.sleep(own.random() * 0.01)
        parts = communicator.borrow(rows, sent, expected, layer=number)
        if own.random() < 0.2:
            time.sleep(own.random() * 0.02)  # who reads late finds what was sent, not what comes after it
        for peer, part in enumerate(parts):
            if len(part) != expected[peer] or bool((part != number * 100 + peer * 10 + rank).any()):
                wrong.append(f"round {number} from {peer}")
    return wrong


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_fast_rank_does_not_overwrite_what_a_slow_one_reads(world_size: int) -> None:
    assert run_ranks(world_size, run_uneven_pace) == [[]] * world_size


def run_modes(rank: int, world_size: int) -> Tensor:
    """Memory that was mapped while nothing was to be differentiated serves training too."""
    communicator, plan = through_memory(), make_plans(world_size)[rank]
    with torch.inference_mode():
        extend_rows([torch.ones(NUM_ROWS, 2000)], plan, communicator)
    x = torch.ones(NUM_ROWS, 2000, requires_grad=True)
    extend_rows([x], plan, communicator)[0].sum().backward()
    assert x.grad is not None
    return x.grad[:, 0] - 1.0 - torch.bincount(plan.send_index, minlength=NUM_ROWS)


def test_inference_mode_first() -> None:
    for difference in run_ranks(3, run_modes):
        assert not difference.any()


def run_outbox_size(rank: int, world_size: int) -> tuple[int, int]:
    communicator = through_memory()
    transport = communicator.transport
    assert isinstance(transport, SharedMemoryTransport)
    counts = [0] * world_size
    counts[(rank + 1) % world_size], expected = 40 << 20, [0] * world_size
    expected[(rank - 1) % world_size] = 40 << 20
    rows = torch.arange(40 << 20).to(torch.uint8)
    received = communicator.exchange(rows, counts, expected)
    return int((received != rows).sum()), transport._outbox.num_bytes


def run_drop_amid_an_exchange(rank: int, world_size: int) -> list[int]:
    """Returns the MiB of the outbox: before, when asked to drop amid an exchange, and after it."""
    transport = through_memory().transport
    assert isinstance(transport, SharedMemoryTransport)
    held, counts = [], [8 << 20] * world_size
    send, received = (torch.full((sum(counts),), rank, dtype=torch.uint8) for _ in range(2))
    transport.all_to_all(received, send, counts, counts)
    finish = transport.start_all_to_all(received, send, counts, counts)
    for drop in (lambda: None, transport.drop_free, finish, transport.drop_free):
        drop()
        held.append(allocated_bytes(transport._outbox) >> 20)
    assert torch.unique_consecutive(received).tolist() == list(range(world_size))
    return [held[0], held[1], held[3]]


def test_nothing_is_dropped_amid_an_exchange() -> None:
    for before, amid, after in run_ranks(3, run_drop_amid_an_exchange):
        assert amid == before
        assert after < before


def test_large_transfers_go_in_rounds_of_bounded_memory() -> None:
    for num_wrong, outbox_bytes in run_ranks(2, run_outbox_size):
        assert num_wrong == 0
        assert outbox_bytes <= 2 * shared_memory_transport.ROUND_BYTES + (1 << 20)


def run_patient(rank: int, world_size: int) -> float:
    communicator, plan = through_memory(timeout_s=1e9), make_plans(world_size)[rank]
    time.sleep(0.3 * rank)  # somebody waits
    return sum(float(x.sum()) for x in extend_rows([torch.ones(NUM_ROWS, 2)], plan, communicator))


def test_ranks_may_be_told_to_wait_for_ever() -> None:
    """Longer than the system's calls take."""
    assert all(total >= 2.0 * NUM_ROWS for total in run_ranks(3, run_patient))


# -------------------------------------------------------------------- ranks that part ways


def checking(transport: RankTransport) -> Communicator:
    """The collective transport looks at nothing: there ranks compare beforehand what they are about to exchange."""
    communicator = create_communicator(transport=transport, timeout_s=20.0)
    communicator.cross_check = transport == "collective"
    return communicator


def run_parting(rank: int, world_size: int, way: str, transport: RankTransport = "shared_memory") -> None:
    communicator = checking(transport)
    plan = make_plans(world_size)[rank]
    x = torch.ones(NUM_ROWS, 2)
    extend_rows([x], plan, communicator)
    if rank == 2:
        if way == "layer":
            plan = replace(plan, layer=1)
        elif way == "width":
            x = torch.ones(NUM_ROWS, 3)
        elif way == "dtype":
            x = torch.ones(NUM_ROWS, 2, dtype=torch.int32)
        elif way == "direction":
            communicator.exchange(x[: plan.num_received], plan.recv_counts, plan.send_counts, layer=2, backward=True)
        elif way == "order":
            communicator.exchange_counts([0] * world_size)
    extend_rows([x], plan, communicator)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("layer", "rank 2 exchanges float32 rows of 8 bytes for layer 1 in forward"),
        ("width", "rank 2 exchanges float32 rows of 12 bytes for layer 2 in forward"),
        ("dtype", "rank 2 exchanges int32 rows of 8 bytes for layer 2 in forward"),
        ("direction", "rank 2 exchanges float32 rows of 8 bytes for layer 2 in backward"),
        ("order", "rank 2 exchanges int64 rows of 8 bytes for layer 0 in forward"),
    ],
)
def test_ranks_that_disagree_all_say_so(way: str, words: str) -> None:
    start_s = time.monotonic()
    for error in run_ranks_expect_errors(3, run_parting, way):
        assert error.type_name == "ExchangeError"
        assert "rank 0 of 3 exchanges float32 rows of 8 bytes for layer 2 in forward" in error.message
        assert words in error.message
    assert time.monotonic() - start_s < 100.0


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("layer", "floating-point rows of 8 bytes for layer 1 in forward"),
        ("width", "floating-point rows of 12 bytes for layer 2 in forward"),
        ("dtype", "integer rows of 8 bytes for layer 2 in forward"),
        ("direction", "floating-point rows of 8 bytes for layer 2 in backward"),
    ],
)
def test_ranks_that_compare_what_they_exchange_all_say_the_same(way: str, words: str) -> None:
    """A process group moves whatever it is given; what nobody compared would arrive as rows of another layer."""
    errors = run_ranks_expect_errors(3, run_parting, way, "collective")
    assert {(error.type_name, error.message) for error in errors} == {("ExchangeError", errors[0].message)}
    assert errors[0].message.startswith(
        f"ranks disagree about exchange 2: rank 0 of 3 exchanges floating-point rows of 8 bytes for layer 2 in "
        f"forward, rank 2 exchanges {words}. Every rank must run the same layers"
    )


def run_wrong_counts(rank: int, world_size: int, transport: RankTransport = "shared_memory") -> None:
    communicator = checking(transport)
    counts = [1] * world_size
    rows = torch.ones(world_size, 2)
    expected = [1, 1, 1] if rank != 0 else [1, 2, 1]
    communicator.exchange(rows, counts, expected, layer=3)
    communicator.exchange(rows, counts, counts, layer=3)


def test_counts_that_do_not_match_end_all_ranks() -> None:
    """The rank that sees it says so; the others learn it in its words where they wait for it next."""
    start_s = time.monotonic()
    errors = run_ranks_expect_errors(3, run_wrong_counts)
    for error in errors:
        assert error.type_name == "ExchangeError"
        assert "rank 0 of 3 expects 2 rows from peer 1 for layer 3, which sends 1" in error.message
    assert "exchange 2 (layer 3, forward) did not complete on rank 2 of 3" in errors[2].message
    assert time.monotonic() - start_s < 100.0


def test_counts_that_do_not_match_are_seen_by_all_ranks_that_compare_them() -> None:
    errors = run_ranks_expect_errors(3, run_wrong_counts, "collective")
    assert {(error.type_name, error.message) for error in errors} == {("ExchangeError", errors[0].message)}
    assert errors[0].message.startswith(
        "recv_counts do not match: rank 0 of 3 expects 2 rows from peer 1 for layer 3, which sends 1. Rebuild both"
    )


def run_absent(rank: int, world_size: int) -> tuple[str, float]:
    communicator, plan = through_memory(timeout_s=3.0), make_plans(world_size)[rank]
    extend_rows([torch.ones(NUM_ROWS, 2)], plan, communicator)
    start_s = time.monotonic()
    try:
        if rank == 1:
            stay_away(rank, world_size)
        for _ in range(2):  # who comes late finds the rows, and in the next exchange that nobody is there any more
            extend_rows([torch.ones(NUM_ROWS, 2)], plan, communicator)
    except ExchangeError as error:
        tell_who_stays_away(rank)
        return str(error), time.monotonic() - start_s
    return "no error", 0.0


def test_the_missing_rank_is_named_with_layer_and_call() -> None:
    results = run_ranks(3, run_absent)
    for rank in (0, 2):
        message, elapsed_s = results[rank]
        assert (
            f"exchange 2 (layer 2, forward) did not complete on rank {rank} of 3: rank 1 did not take part" in message
        )
        assert "nothing came for 3 s" in message
        assert elapsed_s < 100.0
    message, elapsed_s = results[1]
    assert "exchange 3 (layer 2, forward) did not complete on rank 1 of 3" in message
    assert "of 3: nothing came for 3 s" in message
    assert elapsed_s < 100.0


def run_after_an_error(rank: int, world_size: int) -> str:
    communicator = through_memory(timeout_s=10.0)
    rows = torch.ones(world_size, 2)
    with contextlib.suppress(ExchangeError):
        communicator.exchange(rows, [1, 1], [1, 1 if rank else 2])
    try:
        communicator.exchange(rows, [1] * world_size, [1] * world_size)
    except ExchangeError as error:
        return str(error)
    return "no error"


def test_a_communicator_that_failed_does_not_go_on() -> None:
    for message in run_ranks(2, run_after_an_error):
        assert "expects 2 rows from peer 1" in message


def run_in_two_threads(rank: int, world_size: int) -> list[str]:
    communicator, messages = through_memory(), []
    transport = communicator.transport
    assert transport is not None
    if rank == 0:

        def wait_for_peer() -> None:
            communicator.exchange_counts([1, 1])

        thread = threading.Thread(target=wait_for_peer)
        thread.start()
        while not transport._lock.locked():
            time.sleep(0.001)
        try:
            transport.all_to_all(torch.ones(2), torch.ones(2), [1, 1], [1, 1])
        except RuntimeError as error:
            messages.append(str(error))
        dist.barrier()
        thread.join()
    else:
        dist.barrier()
        communicator.exchange_counts([1, 1])
    return messages


def test_two_threads_of_a_rank_do_not_mix() -> None:
    messages, _ = run_ranks(2, run_in_two_threads)
    assert len(messages) == 1
    assert "two threads exchange at once" in messages[0]


def run_fork(rank: int, world_size: int) -> int:
    communicator = through_memory()
    own = communicator.send_buffer((4, 2), torch.float32, torch.device("cpu")).fill_(1.0)
    child = os.fork()
    if child == 0:
        communicator.send_buffer((4, 2), torch.float32, torch.device("cpu")).fill_(2.0)
        try:
            communicator.exchange_counts([1] * world_size)
        except ExchangeError as error:
            os._exit(7 if "forked from a rank" in str(error) else 8)
        os._exit(9)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert bool((own == 1.0).all()), "what the rank is about to send is its own"
    communicator.exchange_counts([1] * world_size)  # and the rank itself goes on
    return status


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_cannot_exchange() -> None:
    assert run_ranks(2, run_fork) == [7, 7]


# -------------------------------------------------------------------- which transport


def run_choice(rank: int, world_size: int, change: str | None) -> tuple[str, str]:
    before = host_links._describe_host
    before_can = shared_memory_transport.can_share_memory

    def elsewhere(*, can_share: bool) -> list[str]:
        described = before(can_share=can_share)
        if rank == 1 and change is not None and change.isdigit():
            described[int(change)] = "another"
        return described

    def refuse(*args: object) -> Any:
        raise ConnectionRefusedError("not today")

    join, timeout_s = host_links._join, host_links.MEETING_TIMEOUT_S
    host_links._describe_host, host_links.MEETING_TIMEOUT_S = elsewhere, 0.5 if change == "unjoined" else timeout_s
    if change == "unjoined" and rank == 1:
        host_links._join = refuse
    if change == "unable" and rank == 1:
        shared_memory_transport.can_share_memory = lambda: False
    try:
        chosen = create_communicator().backend
        try:
            forced = create_communicator(transport="shared_memory").backend
        except ExchangeError as error:
            forced = str(error)
    finally:
        host_links._describe_host, host_links._join, host_links.MEETING_TIMEOUT_S = before, join, timeout_s
        shared_memory_transport.can_share_memory = before_can
    return chosen, forced


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("unable", "rank 1 of 3 has no memfd"),
        ("1", "ranks 0 and 1 of 3 are not on one host"),
        ("2", "ranks 0 and 1 of 3 are not in one network namespace"),
        ("3", "ranks 0 and 1 of 3 are not in one process namespace"),
        ("4", "ranks 0 and 1 of 3 are not of one user"),
        ("unjoined", "of 3 could not be joined to the others"),
    ],
)
def test_a_rank_that_cannot_share_memory_uses_the_process_group(change: str, words: str) -> None:
    results = run_ranks(3, run_choice, change)
    # Without the one that is elsewhere the two others share theirs, unless it was to be one of them.
    assert [chosen for chosen, _ in results] == (["gloo"] * 3 if change == "unjoined" else ["mixed", "gloo", "mixed"])
    for _, forced in results:
        assert words in forced
        assert "Give transport='collective'." in forced


def test_ranks_of_one_host_share_memory_by_default() -> None:
    assert run_ranks(3, run_choice, None) == [("shared_memory", "shared_memory")] * 3


def test_one_rank_alone_needs_none() -> None:
    assert run_ranks(1, run_choice, None) == [("gloo", "shared_memory")]


def test_what_a_transport_may_be() -> None:
    with pytest.raises(ValueError, match="'auto', 'collective' or 'shared_memory' \\(got 'carrier pigeon'\\)"):
        create_communicator(transport="carrier pigeon")  # type: ignore[arg-type]


# -------------------------------------------------------------------- memory


def test_messages_of_two_rounds_never_overlap() -> None:
    outbox, rng, largest = Outbox(), random.Random(1), 0
    last = (0, 0)
    for _ in range(2000):
        num_bytes = rng.choice([0, 1, 100, 4096, 70_000, 300_000])
        assert len(outbox.place(num_bytes + 17)) == num_bytes + 17  # not posted: may be given up
        memory = outbox.place(num_bytes)
        begin, end = outbox.offset, outbox.offset + num_bytes
        assert len(memory) == num_bytes
        assert begin % 4096 == 0
        assert end <= last[0] or begin >= last[1]
        outbox.post()
        last, largest = (begin, end), max(largest, num_bytes)
    assert outbox.num_bytes <= 3 * largest + (1 << 20)
    os.close(outbox.descriptor)


def allocated_bytes(outbox: Outbox) -> int:
    return os.fstat(outbox.descriptor).st_blocks * 512


def test_free_memory_goes_back_and_comes_again() -> None:
    outbox, mib = Outbox(), 1 << 20

    def values(offset: int, num_bytes: int) -> list[int]:
        # Not tensors: a failed comparison of those is explained element by element.
        return torch.unique(segment.read(offset, num_bytes)).tolist()

    outbox.place(40 * mib).fill_(1)
    outbox.post()
    outbox.place(5 * mib).fill_(2)
    segment, placed = PeerSegment(os.dup(outbox.descriptor)), outbox.offset
    outbox.drop_free()  # a peer may still read the first, the second is being written
    assert values(0, 40 * mib) == [1]
    assert values(placed, 5 * mib) == [2]
    outbox.post()
    outbox.drop_free()
    assert allocated_bytes(outbox) == 5 * mib
    assert values(placed, 5 * mib) == [2]
    assert outbox.num_bytes == 45 * mib  # as far as peers have mapped it
    outbox.place(3 * mib + 5).fill_(3)
    assert outbox.offset == 0
    assert allocated_bytes(outbox) == (5 + 4) * mib
    assert values(0, 3 * mib + 5) == [3]
    assert values(placed, 5 * mib) == [2]
    outbox.post()
    outbox.place(50 * mib).fill_(4)
    assert values(outbox.offset, 50 * mib) == [4]
    for descriptor in (outbox.descriptor, segment.descriptor):
        os.close(descriptor)


def test_memory_given_back_that_cannot_be_had_again_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = Outbox()
    outbox.place(4 << 20)
    outbox.post()
    outbox.place(1 << 20)
    outbox.post()
    outbox.drop_free()

    def refuse(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ExchangeError, match=r"needs 2097152 bytes .* No space left"):
        outbox.place(2 << 20)
    os.close(outbox.descriptor)


def test_memory_is_private_cannot_shrink_and_is_checked() -> None:
    outbox = Outbox()
    outbox.place(5000).fill_(3)
    assert os.fstat(outbox.descriptor).st_mode & 0o777 == 0o600
    with pytest.raises(PermissionError):
        os.ftruncate(outbox.descriptor, 10)
    segment = PeerSegment(os.dup(outbox.descriptor))
    assert bool((segment.read(100, 4900) == 3).all())
    with pytest.raises(
        RuntimeError, match="must lie within its sender's memory of 1048576 bytes \\(got one to 1048577\\)"
    ):
        segment.read(1 << 20, 1)
    outbox.place(2 << 20).fill_(5)  # it grows, and who mapped it finds the rest
    assert bool((segment.read((1 << 20) + 3, 1 << 19) == 5).all())
    for descriptor in (outbox.descriptor, segment.descriptor):
        os.close(descriptor)
    unsealed = os.memfd_create("unsealed")
    with pytest.raises(OSError, match="sealed against shrinking"):
        PeerSegment(unsealed)
    os.close(unsealed)


def test_a_lack_of_memory_is_an_error_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    outbox = Outbox()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ExchangeError, match=r"needs 3145728 bytes .* No space left .* transport='collective'"):
        outbox.place(3 << 20)
    assert len(outbox.place(1 << 20)) == 1 << 20
    os.close(outbox.descriptor)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left"):
        Outbox()
    assert len(os.listdir("/proc/self/fd")) == num_open


def hello(send: Callable[[socket.socket], None], expected: range = range(1, 3)) -> PeerLink:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.settimeout(0.2)
        send(theirs)
        return host_links._receive_hello(ours, b"s" * 16, expected, 2)


def test_strangers_are_turned_away() -> None:
    outbox = Outbox()
    pack, descriptors = host_links._HELLO.pack, [outbox.descriptor] * 2
    link = hello(lambda peer: socket.send_fds(peer, [pack(b"s" * 16, 2)], descriptors) and None)
    assert link.rank == 2
    link.close()
    for send, kind in (
        (lambda peer: socket.send_fds(peer, [pack(b"x" * 16, 2)], descriptors), PermissionError),
        (lambda peer: socket.send_fds(peer, [pack(b"s" * 16, 0)], descriptors), PermissionError),
        (lambda peer: peer.send(pack(b"s" * 16, 2)), ConnectionError),
        (lambda peer: socket.send_fds(peer, [b"hi"], descriptors), ConnectionError),
        (lambda peer: socket.send_fds(peer, [pack(b"s" * 16, 2)], descriptors[:1]), ConnectionError),
        (lambda peer: peer.close(), ConnectionError),
        (lambda peer: None, TimeoutError),
    ):
        num_open = len(os.listdir("/proc/self/fd"))
        with pytest.raises(kind):
            hello(send)
        assert len(os.listdir("/proc/self/fd")) == num_open
    os.close(outbox.descriptor)


def test_a_message_is_read_as_it_was_packed() -> None:
    post = Post(
        call=2**40, layer=-3, is_backward=True, row_bytes=12, dtype="bfloat16", num_rows=5, offset=2**41, num_bytes=60
    )
    assert Post.unpack(post.pack()) == post
    assert post.describe() == "exchanges bfloat16 rows of 12 bytes for layer -3 in backward"
    assert ExchangeTag() == ExchangeTag(call=0, layer=0, backward=False)
    post = replace(post, doing=Doing.SUM, what="a step of many words, more of them than there is room for in a post")
    assert Post.unpack(post.pack()) == replace(post, what=post.what[:48])
    assert replace(post, what="").describe() == "sums 5 bfloat16 values"
    assert replace(post, doing=Doing.GATHER, what="a barrier").describe() == "gathers 12 bytes (a barrier)"
    for message in (post.pack() + b"x", b"", bytes([17]) + post.pack()[1:], bytes([LEAVING]) + b"why"):
        with pytest.raises(ValueError, match=r"expected a post of 112 bytes"):
            Post.unpack(message)


def run_descriptors(rank: int, world_size: int) -> int:
    through_memory()  # libraries open what they keep
    before = len(os.listdir("/proc/self/fd"))
    communicator = through_memory()
    communicator.exchange_counts([1] * world_size)
    during = len(os.listdir("/proc/self/fd"))
    group = communicator.transport._group  # type: ignore[union-attr]
    del communicator
    after = len(os.listdir("/proc/self/fd"))
    del group
    return (during - after) - 3 * (world_size - 1) - 2 if after >= before else -1


def test_a_communicator_that_nobody_has_any_more_closes_what_it_opened() -> None:
    """Its outboxes, mapped; and for each peer its socket, its process and its memory."""
    for difference in run_ranks(3, run_descriptors):
        assert difference >= 2
