# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark, on a machine without one: what it says, and every line of it on a CPU with the reference ops."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.ops import gpu
from benchmarks.ops.gpu import Bench, Scale, summarise
from benchmarks.ops.gpu_cells import (
    CHECKED,
    TIMED,
    GateError,
    Sizes,
    check,
    check_rows,
    make_graph,
)
from benchmarks.ops.gpu_report import newest, rows_of, tables, write_report
from dgl_hybrid.ops import backend as backend_module
from dgl_hybrid.ops.naive import NaiveBackend

CHECKOUT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
TINY = Scale(
    num_nodes=200,
    degree=8,
    gate_nodes=60,
    dtypes=(torch.float32,),
    distributions=("uniform",),
    widths=(16,),
    gate_widths=(16,),
    rounds=3,
    copy_bytes=1 << 20,
)


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """The reference serves every tensor, until a test puts something else in its place."""
    naive = NaiveBackend()

    def serve(backend: object) -> None:
        monkeypatch.setattr(backend_module, "_override", "cpu")
        monkeypatch.setattr(backend_module, "load_backend", lambda name: naive if name == "naive" else backend)

    serve(naive)
    return serve


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


@pytest.fixture
def fake_pyg(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A torch_geometric whose GATConv is written out here."""

    class GATConv(nn.Module):
        def __init__(
            self, in_channels: int, out_channels: int, heads: int, add_self_loops: bool, negative_slope: float
        ) -> None:
            super().__init__()
            assert not add_self_loops
            self.heads, self.slope = heads, negative_slope
            self.lin = nn.Linear(in_channels, heads * out_channels, bias=False)
            self.lin.in_channels, self.lin.out_channels = in_channels, heads * out_channels  # type: ignore[assignment]
            self.att_src, self.att_dst = (nn.Parameter(torch.randn(1, heads, out_channels)) for _ in range(2))
            self.bias = nn.Parameter(torch.randn(heads * out_channels))

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            src, dst = edge_index
            h = self.lin(x).view(len(x), self.heads, -1)
            z = (h * self.att_src).sum(-1)[src] + (h * self.att_dst).sum(-1)[dst]
            weights = nn.functional.leaky_relu(z, self.slope).float().exp()
            total = torch.zeros(len(x), self.heads).index_add(0, dst, weights)
            weights = (weights / total[dst]).to(h.dtype)
            out = torch.zeros_like(h).index_add(0, dst, weights[..., None] * h[src])
            return out.flatten(1) + self.bias

    package, module = types.ModuleType("torch_geometric"), types.ModuleType("torch_geometric.nn")
    module.GATConv = GATConv  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_geometric", package)
    monkeypatch.setitem(sys.modules, "torch_geometric.nn", module)
    return iter(())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_ends_with_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.ops.gpu", "--json", "--write", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "benchmarks.ops.gpu needs a CUDA GPU: " in done.stderr
    assert done.stderr.rstrip().endswith("Nothing was measured.")
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in str(gpu.why_not())
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.why_not() == "PyTorch sees no CUDA GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def refuse(name: str) -> object:
        raise gpu.KernelError("no NVRTC")

    monkeypatch.setattr(gpu, "load_backend", refuse)
    assert gpu.why_not() == "no NVRTC"
    monkeypatch.setattr(gpu, "load_backend", lambda name: object())
    assert gpu.why_not() is None


def test_a_whole_run(
    reference: Callable[[object], None],
    console: Console,
    fake_pyg: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Gate, cells, comparisons, files and the last line, at the size of a test."""
    monkeypatch.setattr(gpu, "why_not", lambda: None)
    monkeypatch.setattr(gpu, "QUICK", dataclasses.replace(TINY, dtypes=(torch.float32, torch.bfloat16)))
    monkeypatch.setattr(gpu.torch, "device", lambda *name: CPU)
    assert gpu.main(["--quick", "--json", "--write", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    result: dict[str, Any] = json.loads(said.out.splitlines()[-1])
    assert (result["wrong"], result["not_measured"]) == ([], [])
    # 8 ops and the layer, 2 dtypes.
    assert result["num_cells"] == len(result["cells"]) == (len(TIMED) + 1) * 2
    assert 0 < result["largest_error"] <= 1.6e-2
    assert result["copy_gbytes_per_s"] > 0
    assert result["copy_u_sum_vs_torch_sparse_min"] is None, "of widths from 64 on"
    assert result["gat_layer_vs_pyg_median"] > 0
    cells = {(c["variant"], c["dataset"], c["feat_dim"], c["dtype"]): c for c in result["cells"]}
    copied = cells["copy_u sum", "uniform", 16, "float32"]
    expected = copied["gather_floor_ms"] / copied["p50"] * 100
    assert copied["gather_floor_percent"] == pytest.approx(expected)
    assert copied["gather_floor_ms"] == pytest.approx(
        (1600 * 16 * 4 + 200 * 16 * 4 + 1600 * 4 + 200 * 4) / copied["copy_bytes_per_s"] * 1e3
    )
    assert copied["vs_torch_sparse"] == pytest.approx(copied["torch_sparse_ms"] / copied["p50"])
    assert cells["copy_u max", "uniform", 16, "float32"]["torch_sparse_missing"] == "torch.sparse has no such op"
    assert {"p20", "p50", "p80", "machine", "versions", "git_sha", "dirty", "iters", "warmup"} <= set(copied)

    written = sorted(file.name for file in (tmp_path / "out").iterdir())
    figures = [
        f"gpu_{name}.{ending}"
        for name in ("copy_u_floor", "copy_u_vs_sparse", "gat_floor", "gat_vs_pyg")
        for ending in ("png", "svg")
    ]
    assert written == sorted(["gpu.jsonl", "gpu_tables.md", *figures])
    lines = (tmp_path / "out" / "gpu.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == result["cells"]
    table = (tmp_path / "out" / "gpu_tables.md").read_text()
    assert "| copy_u sum | uniform | 16 | float32 |" in table
    assert "Copy bandwidth" in table


def test_without_pyg_the_layer_is_listed_as_missing(
    reference: Callable[[object], None], console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch_geometric", None)
    bench = Bench(CPU, dataclasses.replace(TINY, gate_widths=()), console)
    bench.run()
    assert summarise(bench)["gat_layer_vs_pyg_median"] is None
    assert {line["vs_pyg"] for line in bench.lines} == {None}
    assert bench.not_measured == [
        "GAT layer + backward, uniform, width 16, float32: PyTorch Geometric is not installed"
    ]


def test_what_is_out_of_time_is_listed(reference: Callable[[object], None], console: Console) -> None:
    bench = Bench(CPU, dataclasses.replace(TINY, limit_s=-1.0, gate_widths=()), console)
    bench.run()
    assert bench.lines == []
    assert len(bench.not_measured) == len(TIMED) + 1
    assert bench.not_measured[0] == "copy_u sum, uniform, width 16, float32: out of time"


class WrongSum(NaiveBackend):
    """Forgets the last column of weighted sums."""

    def spmm(self, rows, x, w, reduce):  # type: ignore[no-untyped-def]
        out, arg = super().spmm(rows, x, w, reduce)
        if w is not None and x is not None:
            out[..., -1] = 0
        return out, arg


class Unsteady(NaiveBackend):
    """Gives other bits in every run."""

    calls = 0

    def edge_softmax(self, rows, logits):  # type: ignore[no-untyped-def]
        self.calls += 1
        return super().edge_softmax(rows, logits) * (1 + self.calls * 2e-7)


class WrongHub(NaiveBackend):
    """Loses an edge of rows that the small graph of the gate does not have."""

    def gat(self, rows, *arguments, **options):  # type: ignore[no-untyped-def]
        out, lse, positive = super().gat(rows, *arguments, **options)
        lengths = rows.indptr.diff()
        if len(lengths) > 100 and rows.indptr.dtype == torch.int32:
            out[lengths.argmax()] *= 1.01
        return out, lse, positive


def test_gate_refuses_a_wrong_gradient_or_result(reference: Callable[[object], None]) -> None:
    graph = make_graph("power-law", 60, 8, CPU, num_heavy=30)
    by_name = {op.name: op for op in CHECKED}
    reference(WrongSum())
    with pytest.raises(GateError, match=r"u_mul_e sum, width 16, float32: expected the result within 1e-06 of float64"):
        check(by_name["u_mul_e sum"], graph, 16, torch.float32)
    assert check(by_name["copy_e sum"], graph, 16, torch.float32) <= 1e-6
    reference(Unsteady())
    with pytest.raises(GateError, match="edge_softmax, width 16, float32: two runs give different bits in the result"):
        check(by_name["edge_softmax"], graph, 16, torch.float32)


def test_wrong_cells_are_not_timed(reference: Callable[[object], None], console: Console, fake_pyg: None) -> None:
    """An error that only shows at full size is found by the rows that are checked there."""
    reference(WrongHub())
    bench = Bench(CPU, dataclasses.replace(TINY, gate_widths=()), console)
    bench.run()
    assert not [line for line in bench.lines if line["variant"].startswith("gat ") or line["variant"] == "gat"]
    assert [line for line in bench.lines if line["variant"] == "gatv2 + backward"]
    assert len(bench.wrong) == 2, "alone and with its backward"
    assert bench.wrong[0].startswith("gat on 1600 edges, float32: expected the rows [")


@pytest.mark.parametrize("op", TIMED, ids=lambda op: op.name)
def test_rows_at_full_size_are_right(op: Any, reference: Callable[[object], None]) -> None:
    graph = make_graph("power-law", 300, 8, CPU)
    operands = op.draw(graph, 32, torch.float32, torch.Generator().manual_seed(1))
    out = op.call(graph, *operands)
    assert check_rows(op, graph, operands, out) <= 1e-6
    out[graph.in_edges.indptr.diff().argmax() if op.role == "v" else slice(None)] += 1
    with pytest.raises(GateError, match=f"{op.name.replace('+', '.')} on 2400 edges"):
        check_rows(op, graph, operands, out)


@pytest.mark.parametrize("op", TIMED, ids=lambda op: op.name)
def test_floors_count_every_byte_once(op: Any) -> None:
    """The compulsory floor is at most the gather floor, and both grow with what is moved."""
    sizes = Sizes(
        num_src=100, num_dst=80, num_edges=1000, num_read=90, width=64, heads=4, feature_bytes=4, index_bytes=4
    )
    gather, compulsory = op.floors(sizes)
    if op.name == "edge_softmax":
        assert gather == compulsory == 2 * 1000 * 4 * 4 + 80 * 4
        return
    assert compulsory < gather
    wider = op.floors(dataclasses.replace(sizes, width=128))
    num_gathers = {"gat + backward": 2, "gatv2 + backward": 4}.get(op.name, 1)
    assert (wider[0] - wider[1]) - (gather - compulsory) >= num_gathers * (1000 - 100) * 64 * 4


def test_floors_of_a_sum_and_a_fused_layer_by_hand() -> None:
    sizes = Sizes(num_src=3, num_dst=2, num_edges=5, num_read=3, width=8, heads=4, feature_bytes=2, index_bytes=4)
    by_name = {op.name: op for op in TIMED}
    # Five rows of 16 bytes (or three), two rows written, five indices, two row starts.
    assert by_name["copy_u sum"].floors(sizes) == (5 * 16 + 2 * 16 + 5 * 4 + 2 * 4, 3 * 16 + 2 * 16 + 5 * 4 + 2 * 4)
    # With one weight of two bytes per edge and head.
    assert by_name["u_mul_e sum"].floors(sizes)[0] == 5 * 16 + 2 * 16 + 5 * 4 + 2 * 4 + 5 * 4 * 2
    # With a winner per element.
    assert by_name["copy_u max"].floors(sizes)[0] == 5 * 16 + 2 * 16 + 5 * 4 + 2 * 4 + 2 * 8 * 4
    # Source rows with a term of four floats; out, er and lse.
    assert by_name["gat"].floors(sizes)[0] == 5 * (16 + 16) + 2 * (16 + 16 + 16) + 5 * 4 + 2 * 4


@pytest.mark.parametrize("distribution", ["power-law", "uniform", "local"])
def test_graphs(distribution: str) -> None:
    graph = make_graph(distribution, 2000, 8, CPU, num_heavy=500)
    graph.validate()
    assert (graph.num_src, graph.num_dst, graph.num_edges) == (2000, 2000, 16_000)
    assert graph.in_edges.edge_ids is None
    lengths = graph.in_edges.indptr.diff()
    assert lengths[1000] >= 500
    dst = torch.repeat_interleave(torch.arange(2000), lengths)
    distance = (graph.in_edges.indices - dst).abs()
    near = (torch.minimum(distance, 2000 - distance) < 256).float().mean()
    assert (near > 0.95) == (distribution == "local")
    without = make_graph(distribution, 2000, 8, CPU).in_edges.indptr.diff()
    assert (without.max() > 100 * 8 / 2) == (distribution == "power-law")
    again = make_graph(distribution, 2000, 8, CPU, num_heavy=500)
    assert torch.equal(graph.in_edges.indices, again.in_edges.indices)
    with pytest.raises(ValueError, match=r"must be one of power-law, uniform, local \(got 'ring'\)"):
        make_graph("ring", 10, 2, CPU)


def make_line(**facts: Any) -> dict[str, Any]:
    return {
        "variant": "copy_u sum",
        "dataset": "uniform",
        "num_nodes": 10,
        "feat_dim": 64,
        "dtype": "float32",
        "machine": {"device": "GPU A", "l2_bytes": 1 << 20},
        "versions": {"torch": "1", "nvrtc": None},
        "git_sha": "abc",
        "dirty": False,
        "copy_bytes_per_s": 2e12,
        "time": "2026-01-01T00:00:00",
        "p20": 1.0,
        "p50": 2.0,
        "p80": 3.0,
        "gather_floor_percent": 50.0,
        "compulsory_floor_percent": None,
        "vs_torch_sparse": 1.234,
        "vs_pyg": None,
        **facts,
    }


def test_tables_show_the_newest_of_each_machine() -> None:
    lines = [make_line(), make_line(dtype="float16"), make_line(p50=4.0), make_line(machine={"device": "GPU B"})]
    kept = newest(lines)
    assert [(line["machine"]["device"], line["dtype"], line["p50"]) for line in kept] == [
        ("GPU A", "float32", 4.0),
        ("GPU A", "float16", 2.0),
        ("GPU B", "float32", 2.0),
    ]
    text = tables(kept)
    assert "## GPU A" in text
    assert "## GPU B" in text
    assert "Copy bandwidth 2,000 GB/s (read and written); L2 1 MiB; graphs of 10 vertices; torch 1; commit abc" in text
    assert rows_of([lines[0]]) == [
        ("copy_u sum", "uniform", "64", "float32", "2.000 (1.000 to 3.000)", "50", "", "1.23", "")
    ]


def test_plots_come_from_the_lines_alone(tmp_path: Path) -> None:
    lines = [make_line(feat_dim=width, dataset=graph) for width in (16, 64) for graph in ("uniform", "local")]
    (tmp_path / "gpu.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(tmp_path)
    assert sorted(file.name for file in tmp_path.glob("*.svg")) == ["gpu_copy_u_floor.svg", "gpu_copy_u_vs_sparse.svg"]
    first = (tmp_path / "gpu_copy_u_floor.svg").read_bytes()
    write_report(tmp_path)
    assert first.startswith(b"<?xml")
    assert "GPU A" in (tmp_path / "gpu_tables.md").read_text()


def test_summary_takes_the_cells_it_promises(console: Console) -> None:
    bench = Bench(CPU, TINY, console)
    bench.bandwidth, bench.worst_error = 3e12, 5e-7
    cell = {"feature_bytes": 2 << 20, "machine": {"device": "GPU A", "l2_bytes": 1 << 20}}
    bench.lines = [
        make_line(**cell, vs_torch_sparse=1.5, gather_floor_percent=80.0),
        make_line(**cell, vs_torch_sparse=1.2, gather_floor_percent=90.0),
        make_line(**cell, vs_torch_sparse=0.4, gather_floor_percent=20.0, feat_dim=32),
        make_line(**cell | {"feature_bytes": 1 << 19}, vs_torch_sparse=None, gather_floor_percent=10.0),
        make_line(**cell, variant="GAT layer + backward", vs_pyg=3.0),
        make_line(**cell, variant="GAT layer + backward", vs_pyg=5.0),
        make_line(**cell, variant="GAT layer + backward", vs_pyg=None),
    ]
    found = summarise(bench)
    assert found["copy_u_sum_vs_torch_sparse_min"] == 1.2, "narrow rows are not promised"
    assert found["copy_u_sum_gather_floor_percent_min"] == 80.0, "nor features that fit into L2"
    assert found["gat_layer_vs_pyg_median"] == 4.0
    assert (found["copy_gbytes_per_s"], found["largest_error"], found["num_cells"]) == (3000.0, 5e-7, 7)
