# SPDX-License-Identifier: Apache-2.0
"""Rows on the host with a transport that moves tensors of another device only, as NCCL does; and which one is chosen.

The device is "meta", whose tensors have no numbers. What is moved there by PyTorch's own operators is remembered beside
it (`FarMemory`), so that the numbers that come back are those that were taken there, and nothing else is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from dgl_hybrid.errors import ExchangeError
from dgl_hybrid.exchange import connect
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.connect import create_communicator
from dgl_hybrid.exchange.transport import NO_TAG, CollectiveTransport, ExchangeTag
from dgl_hybrid.training.loader_arguments import check_device
from tests.helpers.world import run_ranks

FAR = torch.device("meta")


class FarMemory(TorchDispatchMode):
    """Gives tensors of the far device numbers: those that they were copied from, or that were put there."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and args[1].device == FAR:
            return func(args[0], self.numbers[args[1]])
        result = func(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default and result.device == FAR:
            self.numbers[result] = args[0].clone()
        return result


class FarTransport(CollectiveTransport):
    """Moves what lies on the far device, through the group's own memory."""

    def __init__(self, memory: FarMemory) -> None:
        assert dist.group.WORLD is not None
        super().__init__(dist.group.WORLD)
        self.memory = memory

    @property
    def device(self) -> torch.device:
        return FAR

    def start_all_to_all(
        self,
        received: Tensor,
        send: Tensor,
        recv_counts: list[int],
        send_counts: list[int],
        tag: ExchangeTag = NO_TAG,
    ) -> Callable[[], None]:
        assert received.device == send.device == FAR, "no backend for tensors of the host"
        arrived = torch.empty(received.shape, dtype=received.dtype)
        finish = super().start_all_to_all(arrived, self.memory.numbers[send], recv_counts, send_counts, tag)

        def finish_there() -> None:
            finish()
            self.memory.numbers[received] = arrived

        return finish_there

    def all_reduce(self, tensor: Tensor, what: str = "") -> None:
        assert tensor.device == FAR, "no backend for tensors of the host"
        super().all_reduce(self.memory.numbers[tensor])


def exchange_from_the_host(rank: int, world_size: int) -> dict[str, bool]:
    near, memory = create_communicator(transport="collective", timeout_s=20), FarMemory()
    far = Communicator(FarTransport(memory))
    send_counts = [1 + rank + 2 * peer for peer in range(world_size)]
    recv_counts = [1 + peer + 2 * rank for peer in range(world_size)]
    checks = {}
    # Ids, rows of static fields, masks (which travel as bytes), and rows that have no numbers.
    for name, shape, dtype in (
        *(("ids", (), torch.int64), ("rows", (3,), torch.float32), ("flags", (2,), torch.bool)),
        *(("half", (2, 2), torch.bfloat16), ("nothing", (0,), torch.float64)),
    ):
        rows = (torch.arange(sum(send_counts)) + 100 * rank).view(-1, *(1,) * len(shape))
        rows = (rows % 7 if dtype == torch.bool else rows).expand(-1, *shape).to(dtype).contiguous()
        expected = near.exchange(rows, send_counts, recv_counts)
        with memory:
            found = far.exchange(rows, send_counts, recv_counts)
            parts = far.start_exchange(rows, send_counts, recv_counts).wait()
        checks[f"{name} come back"] = found.device.type == "cpu" and torch.equal(found, expected)
        checks[f"{name} are split"] = [len(part) for part in parts] == recv_counts
        checks[f"{name} in parts"] = torch.equal(torch.cat(parts), expected)
    total = torch.arange(4.0) + rank
    with memory:
        same = far.sum_(total)
    checks["sums are in place"] = same is total
    checks["sums"] = torch.equal(total, sum(torch.arange(4.0) + peer for peer in range(world_size)))
    return checks


@pytest.mark.parametrize("world_size", [1, 3])
def test_rows_of_the_host_are_taken_to_where_they_can_travel(world_size: int) -> None:
    """NCCL knows no memory of the host; ids and static fields are there before training begins."""
    for checks in run_ranks(world_size, exchange_from_the_host):
        assert all(checks.values()), checks


def choose_backend(rank: int, world_size: int, folder: str, backend: str | None) -> tuple[str, list[int]]:
    """With a default group made in that way, instead of the test's own."""
    dist.barrier()  # a group is made on one rank before it is on another, which would find its peer gone
    dist.destroy_process_group()
    where = f"file://{folder}/rendezvous"
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=world_size)
    communicator = create_communicator(transport="collective", timeout_s=20)
    rows = torch.arange(world_size) + 10 * rank
    received = communicator.exchange(rows, [1] * world_size, [1] * world_size)
    return communicator.backend, received.tolist()


def choose_with_gpus(rank: int, world_size: int, gpus: list[str | None], bound_to: int | None = None) -> str:
    """With GPUs of these names and a group that names no backend, as far as ranks are told; makes none of NCCL."""
    name = gpus[rank]
    functions = {
        "is_available": lambda: name is not None,
        "current_device": lambda: 0,
        "get_device_properties": lambda number: SimpleNamespace(uuid=f"{name} {number}"),
    }
    with contextlib.ExitStack() as stack:
        if bound_to is not None:
            stack.enter_context(
                mock.patch.object(connect, "bound_gpu", return_value=torch.device("cuda", bound_to + rank))
            )
        for function, answer in functions.items():
            stack.enter_context(mock.patch.object(torch.cuda, function, answer))
        stack.enter_context(mock.patch.object(dist, "is_nccl_available", return_value=True))
        stack.enter_context(mock.patch.object(dist, "get_backend", return_value="undefined"))
        new_group = stack.enter_context(mock.patch.object(dist, "new_group"))
        with contextlib.suppress(ExchangeError):  # that was no group
            create_communicator(transport="collective", timeout_s=20)
    return str(new_group.call_args.kwargs["backend"])


@pytest.mark.parametrize(
    ("gpus", "expected"), [(["a", "b"], "nccl"), (["a", "a"], "gloo"), (["a", None], "gloo"), ([None, None], "gloo")]
)
def test_nccl_is_for_ranks_with_a_gpu_each(gpus: list[str | None], expected: str) -> None:
    """Ranks that merely see a GPU, and may share it or train on CPUs, got NCCL, too, which refuses that."""
    assert run_ranks(2, choose_with_gpus, gpus) == [expected, expected]


def test_the_gpu_of_a_rank_is_the_one_that_its_group_is_bound_to() -> None:
    """`init_process_group(device_id=)` leaves the current device alone: all ranks seemed to have the first one."""
    assert run_ranks(2, choose_with_gpus, ["of one host", "of one host"], 1) == ["nccl", "nccl"]


@pytest.mark.parametrize(("bound_to", "expected"), [(torch.device("cuda", 3), 3), (None, 5), (torch.device("cpu"), 5)])
def test_nccl_moves_tensors_of_the_gpu_that_its_group_is_bound_to(
    bound_to: torch.device | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, answer in (("get_rank", 0), ("get_world_size", 2), ("get_backend", "nccl")):
        monkeypatch.setattr(dist, name, lambda group, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    group: Any = SimpleNamespace(bound_device_id=bound_to)
    transport = CollectiveTransport(group)
    assert transport.device == torch.device("cuda", expected)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)  # as in a thread that has just begun
    assert transport.device == torch.device("cuda", expected)


def test_blocks_lie_where_nccl_moves_rows_from() -> None:
    """The first exchange failed, and a peer was blamed for it."""
    transport: Any = SimpleNamespace(device=torch.device("cuda", 1))
    with pytest.raises(ValueError, match=r"blocks would lie on cuda:0, and NCCL .* of cuda:1 .*: give device='cuda:1'"):
        check_device(torch.device("cuda", 0), transport)
    check_device(torch.device("cuda", 1), transport)
    for device, of_transport in (("cuda:0", "cpu"), ("cpu", "cuda:1"), ("cpu", "cpu")):
        check_device(torch.device(device), cast(Any, SimpleNamespace(device=torch.device(of_transport))))
    check_device(torch.device("cuda", 0), None)


@pytest.mark.parametrize(
    "backend",
    [
        None,
        pytest.param(
            "cpu:gloo,cuda:nccl",
            marks=pytest.mark.skipif(
                not (dist.is_nccl_available() and torch.cuda.is_available()),
                reason="no NCCL in this PyTorch, or no GPU",
            ),
        ),
    ],
)
def test_a_default_group_for_each_kind_of_device_is_one_for_this_kind(backend: str | None, tmp_path: Path) -> None:
    """`init_process_group()` names no backend, and PyTorch then says that it is undefined."""
    if torch.cuda.is_available():  # one GPU is one rank to NCCL
        assert run_ranks(1, choose_backend, str(tmp_path), backend) == [("nccl", [0])]
    else:
        assert run_ranks(2, choose_backend, str(tmp_path), backend) == [("gloo", [0, 10]), ("gloo", [1, 11])]
