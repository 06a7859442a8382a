# SPDX-License-Identifier: Apache-2.0
"""The pretended GPU takes what CUDA takes and refuses what CUDA refuses; so does a real one, where there is one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid.ops import SparseGraph, spmm
from tests.pretend_gpu.device import GPU, GpuTensor, MixedDevicesError
from tests.pretend_gpu.ranks import IS_REAL, PretendedGpus

REFUSAL = RuntimeError if IS_REAL else MixedDevicesError


def to_gpu(of_cpu: Tensor) -> Tensor:
    assert of_cpu.device.type == "cpu"
    return of_cpu.to(GPU)


MIXED: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda gpu, cpu: gpu + cpu,
    "product": lambda gpu, cpu: gpu @ cpu.T,
    "concatenation": lambda gpu, cpu: torch.cat([gpu, cpu]),
    "comparison of all elements": lambda gpu, cpu: torch.equal(gpu, cpu),
    "number of the GPU with rows of the CPU": lambda gpu, cpu: gpu[0, 0] * cpu,
    "sum into a number of the CPU": lambda gpu, cpu: cpu.sum().add_(gpu.sum()),
    "rows chosen by ids of the CPU": lambda gpu, cpu: torch.index_select(gpu, 0, torch.tensor([1])),
    "ids of the GPU for rows of the CPU": lambda gpu, cpu: cpu[torch.ones(2, dtype=torch.int64, device=GPU)],
    "rows of the CPU put among the GPU's": lambda gpu, cpu: gpu.index_put((torch.tensor([0]),), cpu[:1]),
    "weights left on the CPU": lambda gpu, cpu: nn.Linear(3, 2)(gpu),
    "a generator of the CPU": lambda gpu, cpu: torch.rand(3, device=GPU, generator=torch.Generator()),
}
REFUSED: dict[str, Callable[[Tensor, Tensor], object]] = {
    "a generator of the GPU": lambda gpu, cpu: torch.rand(3, generator=torch.Generator(GPU)),
    "memory of the GPU as an array": lambda gpu, cpu: gpu.numpy(),
}
TAKEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "number of the GPU put among rows of the CPU": lambda gpu, cpu: to_gpu(
        cpu.index_put((torch.tensor([0]),), gpu[0, 0])
    ),
    "number of the CPU": lambda gpu, cpu: gpu + torch.tensor(2.0),
    "condition": lambda gpu, cpu: torch.where(gpu > 1, gpu, torch.tensor(0.0)),
    "ids of the CPU": lambda gpu, cpu: gpu[torch.tensor([1, 0])],
    "number put among rows": lambda gpu, cpu: gpu.index_put((torch.tensor([0]),), torch.tensor(5.0)),
    "copy from the CPU": lambda gpu, cpu: torch.empty_like(gpu).copy_(cpu),
    "list": lambda gpu, cpu: torch.tensor(cpu.tolist(), device="cuda"),
    "own copy": lambda gpu, cpu: copy.deepcopy(gpu),
    "view": lambda gpu, cpu: gpu.T[1:],
    "in place": lambda gpu, cpu: gpu.clone().mul_(3.0),
    "with room given": lambda gpu, cpu: torch.add(gpu, 1.0, out=torch.empty_like(gpu)),
}


def outcomes_of_mixing(rank: int, world_size: int) -> tuple[list[str], list[str], list[str]]:
    """Returns what was not refused as mixed, what was not refused at all, and what did not give the CPU's numbers."""
    cpu = torch.arange(6.0).view(2, 3)
    gpu = cpu.to("cuda")
    not_mixed, not_refused, wrong = [], [], []
    for name, run in MIXED.items():
        try:
            run(gpu, cpu)
            not_mixed.append(name)
        except REFUSAL:
            pass
    for name, run in REFUSED.items():
        try:
            run(gpu, cpu)
            not_refused.append(name)
        except (RuntimeError, TypeError):
            pass
    for name, take in TAKEN.items():
        taken, expected = take(gpu, cpu), take(cpu, cpu) if name != "list" else cpu
        is_there = IS_REAL or isinstance(taken, GpuTensor)
        if not is_there or taken.device != GPU or not torch.equal(taken.cpu(), expected.cpu()):
            wrong.append(name)
    return not_mixed, not_refused, wrong


def test_operands_are_refused_as_cuda_does(gpus: PretendedGpus) -> None:
    assert gpus.run(1, outcomes_of_mixing) == [([], [], [])]


def train_a_layer(rank: int, world_size: int, device: str) -> tuple[list[Tensor], list[torch.device], list[str]]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    graph = SparseGraph.from_coo(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), 2, 2).to(device)
    x = torch.arange(6.0).view(2, 3).to(device).requires_grad_()
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(spmm(graph, model(x)), torch.tensor([0, 1], device=device)).backward()
        optimizer.step()
    tensors = [x.grad, *(p for p in model.parameters()), *(p.grad for p in model.parameters())]
    assert all(tensor is not None for tensor in tensors)
    kinds = [type(tensor).__name__ for tensor in tensors]
    return [tensor.detach().cpu() for tensor in tensors], [tensor.device for tensor in tensors], kinds


def test_autograd_and_our_ops_run_there(gpus: PretendedGpus) -> None:
    ((expected, *_),) = gpus.run(1, train_a_layer, "cpu")
    ((trained, devices, kinds),) = gpus.run(1, train_a_layer, "cuda")
    assert set(devices) == {GPU}
    assert set(kinds) == ({"Tensor", "Parameter"} if IS_REAL else {"GpuTensor"})
    for actual, wanted in zip(trained, expected, strict=True):
        torch.testing.assert_close(actual, wanted)


def draw(rank: int, world_size: int) -> list[bool]:
    def draws(device: str, generator: torch.Generator | None = None) -> list[float]:
        return torch.rand(4, device=device, generator=generator).tolist()

    torch.manual_seed(5)
    on_cpu, on_gpu = draws("cpu"), draws("cuda")
    torch.manual_seed(5)
    of_gpu_first = draws("cuda")
    state = torch.cuda.get_rng_state()
    next_on_gpu = draws("cuda")
    torch.cuda.set_rng_state(state)
    given = torch.Generator("cuda").manual_seed(9)
    of_given = draws("cuda", given)
    return [
        draws("cuda") == next_on_gpu,
        of_gpu_first == on_gpu,
        draws("cpu") == on_cpu,
        draws("cuda", given) != of_given,
        draws("cuda", given.manual_seed(9)) == of_given,
    ]


def test_each_device_has_a_generator_of_its_own(gpus: PretendedGpus) -> None:
    assert gpus.run(1, draw) == [[True] * 5]
