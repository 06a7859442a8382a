# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the CPU ops on a tiny grid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.ops import cpu


def test_the_grid_runs_and_is_summed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu, "FOLDER", tmp_path)
    monkeypatch.setattr(cpu, "QUICK", cpu.Sizes(300, 3000, (16, 32), 2, 2))
    monkeypatch.setattr(cpu, "copy_bandwidth", lambda: 1e10)
    cpu.main(["--quick", "--json", "--write"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(result["cells"]) == 3 * 3 * 2
    ratios = [cell["vs_dgl"] for cell in result["cells"]]
    assert result["min_cell_vs_dgl"] == min(ratios)
    for op in ("copy_u_sum", "u_mul_e_sum", "gat"):
        cells = [cell for cell in result["cells"] if cell["op"] == op]
        assert {(cell["graph"], cell["width"]) for cell in cells} == {
            (graph, width) for graph in ("power-law", "uniform", "local") for width in (16, 32)
        }
        assert min(cell["vs_dgl"] for cell in cells) <= result[f"{op}_vs_dgl_median"]
    assert len((tmp_path / "cpu.jsonl").read_text().splitlines()) == 18
    assert (tmp_path / "cpu.md").read_text().count("\n| ") == 19
    assert (tmp_path / "cpu.png").stat().st_size > 1000


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    spmm = cpu.ops.spmm
    monkeypatch.setattr(cpu.ops, "spmm", lambda *arguments: spmm(*arguments) * 1.001)
    with pytest.raises(AssertionError, match="copy_u_sum on power-law, width 16: relative error"):
        cpu.run_grid(cpu.Sizes(100, 500, (16,), 1, 1), log=Console(quiet=True))


def test_a_ratio_is_theirs_by_ours_round_by_round() -> None:
    assert cpu.ratio([2.0, 9.0, 8.0], [1.0, 3.0, 1.0]) == 3.0
