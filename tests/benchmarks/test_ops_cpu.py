# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the CPU ops on a tiny grid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks.ops import cpu, entries, packing, products, row_order
from dgl_hybrid.ops.cpu.products import most_entries


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


def test_packing_is_measured_in_processes_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("above\n\n" + packing.MARK + "\n\nold\n" + packing.END + "\n\nbelow\n")
    monkeypatch.setattr(packing, "README", readme)
    packing.main(["--rows", "300", "--rows", "500", "--rounds", "2", "--processes", "3", "--json", "--write"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(cell["rows"], cell["columns"]) for cell in result["cells"][::4]] == [
        (rows, columns) for columns in packing.WIDTHS for rows in (300, 500)
    ]
    for cell in result["cells"]:
        assert cell["gain"] == cell["in_place_s"] / cell["packed_s"]
        assert not cell["by_rule"]
    assert result["packed_gain_median"] is None
    assert result["left_gain_max"] == max(cell["gain"] for cell in result["cells"])
    text = readme.read_text()
    assert text.startswith("above\n")
    assert text.endswith("\nbelow\n")
    assert "old" not in text
    assert text.count("\n| ") == 2 + len(result["cells"])


def test_packed_sums_that_differ_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = packing.Operand.columns

    def shifted(self, num_reads):  # type: ignore[no-untyped-def]
        for one in columns(self, num_reads):
            if one.x is not self.x:
                one.x.add_(0.01)
            yield one

    monkeypatch.setattr(packing.Operand, "columns", shifted)
    with pytest.raises(AssertionError, match="not close"):
        packing.measure_here((100, 4, 64), 1)


def test_entries_are_measured_in_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("above\n\n" + entries.MARK + "\nold\n" + entries.END + "\n\nbelow\n")
    monkeypatch.setattr(entries, "README", readme)
    entries.main(["--rows", "300", "--rounds", "2", "--json", "--write"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(cell["inputs"], cell["outputs"], cell["share"]) for cell in result["cells"]] == [
        (*shape, share) for shape in entries.SHAPES for share in entries.SHARES
    ]
    for cell in result["cells"]:
        assert cell["gain"] == cell["all_s"] / cell["entries_s"]
        assert cell["by_rule"] == (cell["share"] <= most_entries(cell["inputs"], torch.float32))
    assert result["entries_gain_max"] == max(cell["gain"] for cell in result["cells"] if cell["by_rule"])
    assert "old" not in readme.read_text()
    assert readme.read_text().count("\n| ") == 2 + len(result["cells"])


def test_products_by_entries_that_differ_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    times = entries.SparseRows.times
    monkeypatch.setattr(entries.SparseRows, "times", lambda *args, **options: times(*args, **options) * 1.001)
    with pytest.raises(AssertionError, match="not close"):
        entries.measure_here((100, 400, 16, 0.02), 1)


@pytest.mark.slow
def test_products_are_measured_in_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("above\n\n" + products.MARK + "\nold\n" + products.END + "\n\nbelow\n")
    monkeypatch.setattr(products, "README", readme)
    products.main(["--shrink", "500", "--rounds", "2", "--json", "--write"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(cell["rows"], cell["outputs"]) for cell in result["cells"]] == [
        (cell.rows // 500, cell.outputs) for cell in products.GRID
    ]
    for cell in result["cells"]:
        for way in ("forward", "backward"):
            assert cell[f"{way}_gain"] == cell[f"{way}_pytorch_s"] / cell[f"{way}_kernel_s"]
            assert cell[f"{way}_floor"] > 0
    assert result["forward_gain_min"] == min(cell["forward_gain"] for cell in result["cells"])
    text = readme.read_text()
    assert text.startswith("above\n")
    assert text.endswith("\nbelow\n")
    assert "old" not in text
    assert text.count("\n| ") == 2 + len(products.GRID)


def test_products_that_differ_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = products.load_backend("cpu").row_products
    monkeypatch.setattr(
        type(products.load_backend("cpu")), "row_products", lambda self, *arguments: multiply(*arguments) * 1.001
    )
    with pytest.raises(AssertionError, match="not close"):
        products.measure_here(products.Cell(50, (4,), 3), 1)


def test_row_orders_are_measured_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("above\n\n" + row_order.MARK + "\n\nold\n" + row_order.END + "\n\nbelow\n")
    monkeypatch.setattr(row_order, "README", readme)
    names = ["grid, shuffled", "grid, in order", "uniform", "products"]
    graphs = [word for name in names for word in ("--graph", name)]
    row_order.main([*graphs, "--scale", "0.1", "--rounds", "1", "--json", "--write"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    cells = {cell["graph"]: cell for cell in result["cells"]}
    assert list(cells) == names
    assert [cell["by_rule"] for cell in cells.values()] == [True, False, False, True]
    shuffled, in_order = (cells[name]["distinct"] for name in names[:2])
    assert shuffled["clusters"] < 0.5 * shuffled["id"]
    assert in_order["id"] < 0.4
    times = [cells[names[0]][op] for op in ("sum_s", "attention_s")]
    assert cells[names[0]]["gain"] == sum(op["id"] for op in times) / sum(op["clusters"] for op in times)
    text = readme.read_text()
    assert text.startswith("above\n")
    assert text.endswith("\nbelow\n")
    assert "old" not in text
    assert text.count("\n| ") == 2 + len(names)


def test_results_that_differ_by_row_order_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = row_order.spmm
    called: list[None] = []

    def wrong(*arguments: torch.Tensor) -> torch.Tensor:
        called.append(None)
        return sums(*arguments) * (1.1 if len(called) == 3 else 1.0)

    monkeypatch.setattr(row_order, "spmm", wrong)
    with pytest.raises(AssertionError, match="not close"):
        row_order.measure_here(("communities of 500, shuffled", 0.01), 1)
