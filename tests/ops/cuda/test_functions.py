# SPDX-License-Identifier: Apache-2.0
"""The public functions on the CUDA backend: autograd, broadcasts and strided gradients reach the kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dgl_hybrid import ops
from dgl_hybrid.ops import backend as backend_module
from dgl_hybrid.ops.cuda.backend import CudaBackend
from dgl_hybrid.ops.naive import NaiveBackend
from tests.ops.cuda.fake_driver import FakeDriver
from tests.ops.cuda.host_gpu import make_backend
from tests.ops.cuda.test_backend import make_graph
from tests.ops.simt.build import needs_compiler

pytestmark = needs_compiler

GRAPH = make_graph()
S, N, E = GRAPH.num_src, GRAPH.num_dst, GRAPH.num_edges
DROPOUT = ops.EdgeDropout.from_call(0.4, seed=5, step=6, call_index=7)

Function = Callable[..., Tensor]
CASES: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "copy_u sum": (lambda x: ops.spmm(GRAPH, x), ((S, 32),)),
    "u_mul_e mean": (lambda x, w: ops.spmm(GRAPH, x, w, "mean"), ((S, 4, 8), (E, 4, 1))),
    "u_mul_e max": (lambda x, w: ops.spmm(GRAPH, x, w, "max"), ((S, 4, 8), (E, 4, 1))),
    "copy_e sum": (lambda w: ops.spmm(GRAPH, None, w), ((E, 4),)),
    "u_dot_v": (lambda x, y: ops.sddmm(GRAPH, "dot", x, y), ((S, 4, 8), (N, 4, 8))),
    "u_add_v": (lambda x, y: ops.sddmm(GRAPH, "add", x, y), ((S, 32), (N, 32))),
    "edge_softmax": (lambda z: ops.edge_softmax(GRAPH, z), ((E, 4),)),
    "gat": (lambda x, el, er: ops.gat(GRAPH, x, el, er, dropout=DROPOUT), ((S, 4, 8), (S, 4), (N, 4))),
    "gatv2": (lambda x, y, a: ops.gatv2(GRAPH, x, y, a, dropout=DROPOUT), ((S, 4, 8), (N, 4, 8), (4, 8))),
}


@pytest.fixture(scope="module")
def gpu(built_driver: FakeDriver) -> CudaBackend:
    return make_backend(built_driver, 8)[0]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """Makes a backend serve every tensor."""

    def serve(backend: object) -> None:
        monkeypatch.setattr(backend_module, "load_backend", lambda name: backend)
        monkeypatch.setattr(backend_module, "_override", "cuda")

    return serve


def gradients(function: Function, operands: list[Tensor], seed: Tensor) -> list[Tensor]:
    operands = [operand.clone().requires_grad_() for operand in operands]
    out = function(*operands)
    # A gradient that is not contiguous, as those of a transposition or an expansion are.
    out.backward(seed.to(out.dtype).flatten().as_strided(out.shape, tuple(reversed(range(1, out.dim() + 1)))))
    return [out.detach(), *(operand.grad for operand in operands if operand.grad is not None)]


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_the_reference(
    name: str, gpu: CudaBackend, fake: FakeDriver, use: Callable[[object], None]
) -> None:
    function, shapes = CASES[name]
    generator = torch.Generator().manual_seed(11)
    operands = [torch.randn(*shape, generator=generator) for shape in shapes]
    seed = torch.randn(E * 64, generator=generator)
    before = fake.launches
    use(gpu)
    found = gradients(function, operands, seed)
    assert fake.launches >= before + 2, "forward and backward ran on the kernels"
    use(NaiveBackend())
    expected = gradients(function, [operand.double() for operand in operands], seed.double())
    assert len(found) == len(expected) == len(shapes) + 1
    for value, reference in zip(found, expected):
        assert (value.double() - reference).norm().item() <= 1e-6 * reference.norm().item()
        torch.testing.assert_close(value.double(), reference, rtol=4e-6, atol=4e-6 * reference.abs().max().item())


def test_tasks_of_a_structure_are_made_once(
    gpu: CudaBackend, fake: FakeDriver, use: Callable[[object], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The structure passes through the registered ops as tensors; its task lists must still be found again."""
    from dgl_hybrid.ops.cuda import tasks

    made = []
    cut_rows = tasks.cut_rows
    monkeypatch.setattr(tasks, "cut_rows", lambda *given: made.append(1) or cut_rows(*given))  # type: ignore[func-returns-value]
    use(gpu)
    graph = make_graph()
    for _ in range(3):
        x = torch.ones(S, 32, requires_grad=True)
        ops.spmm(graph, x).sum().backward()
    assert len(made) == 2, "one list by destination, one by source"


@pytest.mark.parametrize("is_inference", [False, True])
def test_segments_whose_offsets_lie_in_a_buffer_that_is_used_again(
    is_inference: bool, gpu: CudaBackend, fake: FakeDriver, use: Callable[[object], None]
) -> None:
    """With the task lists of what lay there before, the kernels cut rows where other segments ended."""
    use(gpu)
    x = torch.arange(40.0 * 32).view(40, 32)
    with torch.inference_mode(is_inference):
        offsets = torch.zeros(4, dtype=torch.int32)
        for ends in ([30, 35, 40], [2, 4, 40], [0, 40, 40]):
            offsets[1:] = torch.tensor(ends)
            bounds = [0, *ends]
            expected = torch.stack([x[first:last].sum(0) for first, last in zip(bounds, ends, strict=False)])
            torch.testing.assert_close(ops.segment_reduce(offsets, x, "sum"), expected)
