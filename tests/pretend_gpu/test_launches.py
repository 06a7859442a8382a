# SPDX-License-Identifier: Apache-2.0
"""Every launch of the CUDA backend gives its kernel what the source's signature says: number, types, dtypes, layout.

The signatures are read from the source's text, so nothing is compiled. What kernels make of the arguments is tested in
`tests/ops/simt` and `tests/ops/cuda`.
"""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dgl_hybrid.ops.cuda.backend import CudaBackend
from dgl_hybrid.ops.cuda.driver import Extent
from dgl_hybrid.ops.cuda.launch import Argument, Options
from dgl_hybrid.ops.cuda.runtime import SOURCE
from dgl_hybrid.ops.cuda.tasks import TaskLists
from dgl_hybrid.ops.edge_dropout import EdgeDropout
from dgl_hybrid.ops.sparse_graph import Adjacency, SparseGraph

NUM_SOURCES, NUM_ROWS, NUM_EDGES, NUM_OUT = 9, 11, 60, 30
SHAPES = ((1, 1), (1, 7), (4, 8), (2, 130), (1, 1500), (3, 33), (40, 1))
LONG_TASKS, SHORT_TASKS = 1 << 20, 4
"""Entries of a task: with short ones rows are split, and their parts merged."""

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
POINTERS = {"float": torch.float32, "int": torch.int32, "i64": torch.int64}
NUMBERS = {"int": ctypes.c_int, "i64": ctypes.c_longlong, "u64": ctypes.c_ulonglong, "float": ctypes.c_float}


def read_signatures(source: str) -> dict[str, list[str]]:
    """Returns the types of every kernel's parameters, macros replaced, such as "T*" and "i64"."""
    text = re.sub(r"//.*|\\\n", "", source)
    macros = dict(re.findall(r"^#define (\w+_PARAMS)\s+(.*)$", text, re.MULTILINE))
    signatures = {}
    for name, parameters in re.findall(r"\bKERNEL\((\w+)\)\s*\((.*?)\)\s*\{", text, re.DOTALL):
        for macro, meaning in macros.items():
            parameters = re.sub(rf"\b{macro}\b", meaning, parameters)
        signatures[name] = [type_of(parameter) for parameter in parameters.split(",")]
    return signatures


def type_of(parameter: str) -> str:
    words = re.findall(r"\w+", re.sub(r"\bconst\b|\b__restrict__\b|\bRESTRICT\b", "", parameter))
    return words[0] + "*" * ("*" in parameter)


class Recorder:
    """Launches nothing: checks what is given, and notes it."""

    def __init__(self, signatures: dict[str, list[str]]) -> None:
        self.signatures = signatures
        self.launched: set[str] = set()
        self.faults: list[str] = []

    def launch(self, kernel: str, options: Options, grid: Extent, block: Extent, arguments: Sequence[Argument]) -> None:
        self.launched.add(kernel)
        expected = self.signatures[kernel]
        if len(expected) != len(arguments):
            self.faults.append(f"{kernel} takes {len(expected)} arguments (got {len(arguments)})")
            return
        told = dict(option.removeprefix("-D").partition("=")[::2] for option in options)
        dtypes = POINTERS | {
            "T": DTYPES[told["DTYPE"].removeprefix("DTYPE_")],
            "Index": torch.int32 if told["INDEX_BITS"] == "32" else torch.int64,
        }
        for position, (wanted, argument) in enumerate(zip(expected, arguments, strict=True)):
            if not is_given(wanted, argument, dtypes):
                self.faults.append(f"{kernel}: parameter {position} is {wanted} (got {argument!r})")
        # The least limits of GPUs of any generation.
        limits = (2**31, 2**16, 2**16)
        if block != (128, 1, 1) or not all(1 <= extent < limit for extent, limit in zip(grid, limits, strict=True)):
            self.faults.append(f"{kernel}: a grid {grid} of blocks {block} cannot be launched")


def is_given(wanted: str, argument: Argument, dtypes: dict[str, torch.dtype]) -> bool:
    if not wanted.endswith("*"):
        return type(argument) is NUMBERS[wanted]
    if argument is None:
        return True
    return isinstance(argument, Tensor) and argument.dtype == dtypes[wanted[:-1]] and argument.is_contiguous()


def run_all(backend: CudaBackend, index: torch.dtype, dtype: torch.dtype, heads: int, width: int) -> None:
    """Calls every method with every kind of operand."""
    generator = torch.Generator().manual_seed(0)

    def cast(rows: Adjacency) -> Adjacency:
        ids = rows.edge_ids
        return Adjacency(rows.indptr.to(index), rows.indices.to(index), None if ids is None else ids.to(index))

    def rand(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(of)

    src, dst = (torch.randint(count, (NUM_EDGES,), generator=generator) for count in (NUM_SOURCES, NUM_ROWS))
    graph = SparseGraph.from_coo(src, dst, NUM_SOURCES, NUM_ROWS)
    rows, out_rows = cast(graph.in_edges), cast(graph.out_edges)
    x, y, e = (rand(count, heads, width) for count in (NUM_SOURCES, NUM_ROWS, NUM_EDGES))
    w = rand(NUM_EDGES, heads)
    for reduce in ("sum", "max", "min"):
        for sources, weights in ((x, None), (x, w), (None, w)):
            _, arg = backend.spmm(rows, sources, weights, reduce)
            if arg is not None and sources is not None:
                arg.fill_(0)
                backend.spmm_select_backward(out_rows, y, arg, weights)
                if weights is not None:
                    backend.spmm_select_backward_edges(rows, y, arg, sources)
        backend.segment_reduce(rows.indptr, rand(NUM_EDGES, width), reduce)
    for weights, scale in ((w, None), (None, rand(NUM_ROWS))):
        backend.add_sums(torch.zeros(NUM_OUT, heads, width).to(dtype), torch.arange(NUM_ROWS), rows, x, weights, scale)
    backend.scaled_sums(rows, x, rand(NUM_SOURCES), None)
    backend.scaled_sums(rows, x, None, rand(NUM_ROWS))
    operands = (("u", x), ("v", y), ("e", e))
    for (lhs_target, lhs), (rhs_target, rhs) in itertools.product(operands, repeat=2):
        for op in ("add", "sub", "mul", "div", "dot"):
            backend.sddmm(rows, lhs, rhs, op, lhs_target, rhs_target)
    for target, operand in operands:
        backend.sddmm(rows, operand, None, "copy", target, "v")
    backend.edge_softmax_backward(rows, backend.edge_softmax(rows, w), w)
    keyed = EdgeDropout(1.0, (1, 2), torch.arange(NUM_EDGES))
    for dropout in (None, EdgeDropout(0.5, (2**64 - 1, 5)), keyed):
        el, er = (rand(count, heads, of=torch.float32) for count in (NUM_SOURCES, NUM_ROWS))
        out, logsumexp, _ = backend.gat(rows, x, el, er, 0.2, dropout, for_backward=True)
        backend.gat_backward(rows, out_rows, x, el, er, out, logsumexp, None, y, 0.2, dropout)
        attention = rand(heads, width)
        out, logsumexp = backend.gatv2(rows, x, y, attention, 0.2, dropout)
        backend.gatv2_backward(rows, out_rows, x, y, attention, out, logsumexp, y, 0.2, dropout)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(read_signatures(SOURCE.read_text("utf-8")))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_launches_fit_the_signatures(index: torch.dtype, dtype: torch.dtype, recorder: Recorder) -> None:
    by_turns = itertools.cycle((SHORT_TASKS, LONG_TASKS) if index == torch.int32 else (LONG_TASKS, SHORT_TASKS))
    for (heads, width), task_entries in zip(SHAPES, by_turns):
        run_all(CudaBackend(recorder, TaskLists(task_entries)), index, dtype, heads, width)
    assert recorder.faults == []
    assert recorder.launched == set(recorder.signatures), "every kernel is launched by something"


@pytest.mark.parametrize(("is_now", "was"), [("i64", "int"), ("float*", "T*"), ("int*", "Index*"), ("float", "u64")])
def test_another_signature_is_noticed(is_now: str, was: str, recorder: Recorder) -> None:
    changed = next(name for name, types in recorder.signatures.items() if was in types)
    types = recorder.signatures[changed]
    types[types.index(was)] = is_now
    run_all(CudaBackend(recorder, TaskLists(SHORT_TASKS)), torch.int64, torch.float16, 4, 8)
    assert {fault.split(":")[0] for fault in recorder.faults} == {changed}
