# SPDX-License-Identifier: Apache-2.0
"""Results have the same bits whatever runs beside them: threads, other callers, a forked child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from dgl_hybrid.ops import EdgeDropout, SparseGraph, spmm
from dgl_hybrid.ops.cpu import compiler, threads
from dgl_hybrid.ops.cpu.backend import CpuBackend
from dgl_hybrid.ops.cpu.tasks import LONG_ROW_ENTRIES, cut_evenly, cut_rows

NUM_NODES, HEADS, WIDTH = 3000, 2, 12


@pytest.fixture(scope="module")
def graph() -> SparseGraph:
    """Large enough for several tasks; a destination and a source with rows that are cut into parts."""
    generator = torch.Generator().manual_seed(0)
    src, dst = torch.randint(NUM_NODES, (2, 50_000), generator=generator)
    src[:4000], dst[4000:9000] = 11, 7
    return SparseGraph.from_coo(src, dst, NUM_NODES, NUM_NODES)


@pytest.fixture(autouse=True, params=["OpenMP", "helpers"])
def _threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whose threads run kernels: PyTorch's OpenMP, or ours, as where there is none."""
    if request.param == "helpers":
        monkeypatch.setattr(threads, "_openmp", lambda: None)
    elif threads._openmp() is None:
        pytest.skip("PyTorch does not run on GNU's OpenMP here")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def everything(graph: SparseGraph) -> list[Tensor]:
    """The results of every op."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, NUM_NODES, HEADS, WIDTH, generator=generator)
    w = torch.randn(graph.num_edges, HEADS, generator=generator)
    el, er = torch.randn(2, NUM_NODES, HEADS, generator=generator)
    attention = torch.randn(HEADS, WIDTH, generator=generator)
    dropout = EdgeDropout.from_call(0.3, seed=1, step=2, call_index=3)
    cpu, rows, out_rows = CpuBackend(), graph.in_edges, graph.out_edges
    largest, arg = cpu.spmm(rows, x, None, "max")
    assert arg is not None
    out, lse, positive = cpu.gat(rows, x, el, er, 0.2, dropout, for_backward=True)
    assert positive is not None
    out2, lse2 = cpu.gatv2(rows, x, y, attention, 0.2, None)
    alpha = cpu.edge_softmax(rows, w)
    results = [largest, arg, out, lse, *positive, out2, lse2, alpha]
    results += [cpu.spmm(rows, x, weights, "sum")[0] for weights in (None, w)]
    results += [cpu.spmm_select_backward(out_rows, y, arg, w), cpu.spmm_select_backward_edges(rows, y, arg, x)]
    results += [cpu.sddmm(rows, x, y, "dot", "u", "v"), cpu.sddmm(rows, x, y, "sub", "v", "u")]
    results += [cpu.edge_softmax_backward(rows, alpha, w)]
    grads = cpu.gat_backward(rows, out_rows, x, el, er, out, lse, positive, y, 0.2, dropout)
    assert grads[2] is not None
    results += grads
    results += cpu.gatv2_backward(rows, out_rows, x, y, attention, out2, lse2, y, 0.2, None)
    results += [cpu.segment_reduce(rows.indptr, w, "sum")[0]]
    return results


def assert_same_bits(results: list[Tensor], expected: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(results, expected, strict=True)):
        assert torch.equal(a, b), f"result {i} differs"


def test_the_number_of_threads_changes_no_bit(graph: SparseGraph) -> None:
    torch.set_num_threads(1)
    expected = everything(graph)
    for num_threads in (2, 3, 7):
        torch.set_num_threads(num_threads)
        assert_same_bits(everything(graph), expected)


def test_helpers_take_part(graph: SparseGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    start = threads._start
    monkeypatch.setattr(threads, "_openmp", lambda: None)
    monkeypatch.setattr(threads, "_start", lambda n: started.append(n) or start(n))
    x = torch.ones(NUM_NODES, 1, 4)
    torch.set_num_threads(3)
    CpuBackend().spmm(graph.in_edges, x, None, "sum")
    assert started, "a graph of several tasks should wake the pool"
    assert max(started) == 2
    started.clear()
    torch.set_num_threads(1)
    CpuBackend().spmm(graph.in_edges, x, None, "sum")
    assert started == []


def test_several_callers_at_once(graph: SparseGraph) -> None:
    torch.set_num_threads(3)
    expected = everything(graph)
    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(lambda _: everything(graph), range(8)):
            assert_same_bits(results, expected)


INTERRUPTED = """
import random, signal, sys, time, torch
from dgl_hybrid.ops import SparseGraph, spmm
from dgl_hybrid.ops.cpu import threads

if sys.argv[1] == "helpers":
    threads._openmp = lambda: None

class Stop(Exception): pass
def stop(*_): raise Stop

signal.signal(signal.SIGALRM, stop)
torch.set_num_threads(4)
n = 20_000
graph = SparseGraph.from_coo(torch.randint(n, (300_000,)), torch.randint(n, (300_000,)), n, n)
x = torch.rand(n, 64) + 1.0
spmm(graph, x)
interrupts, overwritten, end = 0, 0, time.monotonic() + 60
while interrupts < 150 and time.monotonic() < end:
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0005, 0.01))
        while time.monotonic() < end:  # Python may drop what a handler raises, as where an object is taken down
            y = spmm(graph, x)
    except Stop:
        interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    z = torch.zeros(n, 64)  # takes the memory that the broken-off call gave back
    time.sleep(0.002)
    overwritten += bool(z.any())
print(interrupts, overwritten)
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no interval timers")
def test_who_breaks_off_a_call_gets_its_memory_back_unwritten(request: pytest.FixtureRequest) -> None:
    """As Ctrl-C in a notebook: helpers must not go on writing to what the caller has freed."""
    whose = request.node.callspec.params["_threads"]
    command = [sys.executable, "-c", INTERRUPTED, whose]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    interrupts, overwritten = map(int, result.stdout.split())
    assert interrupts > 20
    assert overwritten == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_computes(graph: SparseGraph) -> None:
    torch.set_num_threads(2)
    x = torch.randn(NUM_NODES, 1, 5)
    expected, _ = CpuBackend().spmm(graph.in_edges, x, None, "sum")  # the pool has threads now, the child has none
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads: what is tested here
        child = os.fork()
    if child == 0:
        same = torch.equal(CpuBackend().spmm(graph.in_edges, x, None, "sum")[0], expected)
        wide = CpuBackend().spmm(graph.in_edges, x.expand(-1, 1, 5).repeat(1, 1, 2), None, "sum")[0]  # a new kernel
        os._exit(0 if same and torch.equal(wide[:, :, :5], expected) else 1)
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert ended[1] == 0


def test_a_fork_waits_for_who_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks that the compiler holds would never be released in the child."""
    has_begun, has_ended = threading.Event(), threading.Event()

    def compile_slowly(assembly: str) -> compiler.Kernel:
        has_begun.set()
        time.sleep(0.5)
        has_ended.set()
        return lambda arguments: None

    monkeypatch.setattr(compiler, "_compile", compile_slowly)
    monkeypatch.setattr(compiler, "_kernels", {})
    thread = threading.Thread(target=compiler.compile_kernel, args=("slow", str))
    thread.start()
    assert has_begun.wait(10.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        is_right = False
        try:
            is_right = has_ended.is_set() and compiler.compile_kernel("another", str) is not None
        finally:
            os._exit(0 if is_right else 1)
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_threads_go_back_through_one_node() -> None:
    num_rows = 2000
    ends = torch.randint(num_rows, (2, 40 * num_rows), generator=torch.Generator().manual_seed(0))
    graph = SparseGraph.from_coo(*ends, num_rows, num_rows)
    x = torch.randn(num_rows, 64, requires_grad=True)
    out = spmm(graph, x).sum()
    (expected,) = torch.autograd.grad(out, x, retain_graph=True)

    def go_back(_: int) -> bool:
        return all(torch.equal(torch.autograd.grad(out, x, retain_graph=True)[0], expected) for _ in range(40))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(go_back, range(4)))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_tasks_cover_every_row_and_parts_every_long_row(dtype: type) -> None:
    random = np.random.default_rng(0)
    degrees = random.integers(0, 40, 20_000)
    degrees[[5, 19_999]] = [LONG_ROW_ENTRIES + 1, 100_000]
    degrees[77] = LONG_ROW_ENTRIES
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(dtype)
    tasks = cut_rows(indptr)
    assert tasks.bounds[0] == 0
    assert tasks.bounds[-1] == 20_000
    assert (np.diff(tasks.bounds) > 0).all()
    entries = np.diff(indptr[tasks.bounds])
    assert entries.max() < 100_000 + 2 * 8192, "a task holds one long row and little else"
    assert tasks.long_rows.tolist() == [5, 19_999]
    assert tasks.part_begins.dtype == tasks.part_offsets.dtype == dtype
    for i, row in enumerate(tasks.long_rows):
        parts = slice(tasks.part_offsets[i], tasks.part_offsets[i + 1])
        begins, ends = tasks.part_begins[parts], tasks.part_ends[parts]
        assert begins[0] == indptr[row]
        assert ends[-1] == indptr[row + 1]
        assert (begins[1:] == ends[:-1]).all()
        assert 0 < (ends - begins).min() <= (ends - begins).max() <= LONG_ROW_ENTRIES


@pytest.mark.parametrize("num_rows", [0, 1, 4096, 4097, 3_000_000])
def test_rows_without_entries_are_cut_evenly(num_rows: int) -> None:
    bounds = cut_evenly(num_rows)
    assert bounds[0] == 0
    assert bounds[-1] == num_rows
    assert len(bounds) <= 258
    assert (np.diff(bounds) > 0).all()


def test_row_starts_changed_in_place_are_cut_again() -> None:
    indptr = torch.tensor([0, 1, 2, 10_000], dtype=torch.int32)
    x = torch.ones(10_000, 1)
    cpu = CpuBackend()
    assert cpu.segment_reduce(indptr, x, "sum")[0].flatten().tolist() == [1.0, 1.0, 9998.0]
    indptr[2] = 9999
    assert cpu.segment_reduce(indptr, x, "sum")[0].flatten().tolist() == [1.0, 9998.0, 1.0]


def test_offsets_that_numpy_has_written_to_are_cut_again() -> None:
    """PyTorch does not count such writes: rows that had become long were never written."""
    buffer = np.array([0, 10, 20])
    offsets, x = torch.from_numpy(buffer), torch.ones(5000, 2)
    for bounds in ([0, 10, 20], [0, 10, 5000], [0, 2500, 5000]):
        buffer[:] = bounds
        assert CpuBackend().segment_reduce(offsets, x, "sum")[0][:, 0].tolist() == np.diff(bounds).tolist()
