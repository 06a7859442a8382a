# SPDX-License-Identifier: Apache-2.0
"""The side-by-side benchmark: its grid and graphs, the check of results, ratios, resuming, and a tiny run."""

from __future__ import annotations

import contextlib
import json
import math
import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import psutil
import pytest
import torch
from matplotlib.axes import Axes
from tqdm import tqdm

from benchmarks.systems import accuracy, gate, measure, results, run
from benchmarks.systems import team as team_of_ranks
from benchmarks.systems.accuracy import MARGIN, judge, time_to
from benchmarks.systems.adaptors import base, distdgl, ours, plain_dgl
from benchmarks.systems.adaptors.ours import _digest
from benchmarks.systems.graphs import SHAPES, GraphShape, generate
from benchmarks.systems.grid import Cell, full_grid, quick_grid, quick_systems_of, systems_of
from benchmarks.systems.job import Job
from benchmarks.systems.measure import Bench, Settings, summarise_epochs
from benchmarks.systems.results import (
    append_lines,
    measured_run,
    newest,
    peer_versions,
    read_lines,
    spread,
    without_partial_runs,
)
from benchmarks.systems.run import main, parse, settings_of
from benchmarks.systems.summary import cell_summary, ratio_error, summarise
from benchmarks.systems.tables import CELL_HEAD, LINE_HEAD, cell_rows, drop_empty_columns, line_rows
from benchmarks.systems.team import SystemFailure, Team
from benchmarks.systems.write import BEGIN, END, draw_all, report, write
from dgl_hybrid.planner import DependencyPlan

SETTINGS = Settings(rounds=5).to_json()
MACHINE = {"cores": 2, "arch": "x86_64", "system": "Linux 1", "libc": "glibc 2.36"}
HEADLINE = [
    *("vs_distdgl_full_median", "vs_distdgl_full_min", "vs_best_pure_min", "vs_best_pure_max"),
    *("vs_neutronstar_min", "vs_neutronstar_max", "vs_sar_median", "vs_sar_min"),
    *("vs_dgl_one_rank_gcn_sage_median", "vs_dgl_one_rank_gat_median"),
    *("predicted_error_median", "predicted_error_max"),
]


def make_line(cell: Cell, system: str, seconds: float | None, **changes: Any) -> dict[str, Any]:
    return {
        "bench": "systems",
        "metric": "epoch_time",
        "unit": "s",
        "cell": cell.key,
        "dataset": cell.dataset,
        "run": "run1",
        "code": "code1",
        "git_sha": "abc",
        "dirty": False,
        "settings": SETTINGS,
        "config": cell.to_json(),
        "variant": system,
        "status": "ok" if seconds is not None else "failed",
        "error": None if seconds is not None else "it broke | here",
        "p20": seconds and 0.9 * seconds,
        "p50": seconds,
        "p80": seconds and 1.2 * seconds,
        "predicted": None,
        "cpu_s": 0.1,
        "compute_s": 0.1,
        "exchange_s": None,
        "wait_s": None,
        "floor_s": 0.01,
        "prepare_s": 3.0,
        "sent_bytes": None,
        "wire_bytes": 2e6,
        "peak_rss_bytes": [10**8, 2 * 10**8],
        "machine": MACHINE,
        "machine_rates": {"copy_bytes_per_s": 1e10, "flops": 1e11},
        "versions": {"python": "3.11", "torch": "2.13", "dgl": "2.1"},
        "allocator_variables": {"MALLOC_MMAP_MAX_": "0"},
        "load_before": 0.5,
        **changes,
    }


TWO = Cell(graph="products")
ONE_SAGE, ONE_GAT = replace(TWO, ranks=1), replace(TWO, ranks=1, model="gat")
SHAPED = replace(TWO, model="gcn", network="1gbit")


@pytest.fixture
def lines() -> list[dict[str, Any]]:
    def cell(of: Cell, **seconds: float | None) -> list[dict[str, Any]]:
        return [make_line(of, system, value) for system, value in seconds.items()]

    two = cell(
        TWO,
        hybrid=1.0,
        depcache=2.0,
        depcomm=1.5,
        neutronstar=1.2,
        distdgl_full=20.0,
        sar=6.0,
        sar_mfg=4.0,
        pipegcn=3.0,
    )
    two[0] |= {"predicted": 0.8, "peak_rss_bytes": [3 * 10**8]}
    shaped = cell(SHAPED, hybrid=2.0, depcache=1.9, depcomm=8.0, neutronstar=2.0, distdgl_full=8.0, sar=None)
    shaped[0]["predicted"] = 2.2
    one = cell(ONE_SAGE, hybrid=1.0, dgl=1.6, distdgl_full=3.0) + cell(ONE_GAT, hybrid=1.0, dgl=3.5)
    return [*two, *shaped, *one]


def test_each_start_is_held_to_its_own_prediction(lines: list[dict[str, Any]]) -> None:
    lines[0]["starts"] = [{"p50": p50, "predicted": told} for p50, told in ((1.0, 1.1), (2.0, 1.0), (1.0, None))]
    result = summarise(lines, {})
    assert result["cells"][0]["predicted_error"] == pytest.approx(0.3)
    assert result["cells"][0]["predicted_error_worst"] == pytest.approx(0.5)
    assert result["predicted_error_max"] == pytest.approx(0.5)
    assert result["predicted_error_median"] == pytest.approx(0.2), "of cells: 0.3, and 2.2 against 2.0"
    assert [row[-1] for row in cell_rows(result["cells"])] == ["30%, worst 50%", "10%", "", ""]


def test_error_of_ratios_is_what_starts_have_not_in_common(lines: list[dict[str, Any]]) -> None:
    systems = {line["variant"]: line for line in lines if line["cell"] == TWO.key}
    assert ratio_error(systems) is None, "started once, so it is not known"
    machine = (1.0, 1.4, 0.9)  # slower for everybody in one start
    for name, time_s in (("hybrid", 1.0), ("depcache", 2.0), ("depcomm", 1.5)):
        systems[name]["starts"] = [{"p50": time_s * factor} for factor in machine]
    del systems["neutronstar"]
    assert ratio_error(systems) == pytest.approx(0.0, abs=1e-12)
    del systems["depcomm"]
    for name in ("hybrid", "depcache"):
        systems[name]["starts"] = [{"p50": 1.0}, {"p50": 1.0}, {"p50": 9.0}]
    systems["hybrid"]["starts"][1]["p50"] = math.exp(0.3)
    # By hand, of logs 0 0.3 / 0 0: all four deviate by 0.075, with one degree of freedom, over two starts.
    two = {name: systems[name] | {"starts": systems[name]["starts"][:2]} for name in ("hybrid", "depcache")}
    assert ratio_error(two) == pytest.approx(math.sqrt(2 * 4 * 0.075**2 / 2))
    systems["depcache"]["starts"].pop()
    assert ratio_error(systems) == pytest.approx(ratio_error(two)), "of starts that both had"
    systems["depcache"]["status"] = results.FAILED
    assert ratio_error(systems) is None
    summary = summarise([line | {"starts": two["hybrid"]["starts"]} for line in lines], {})
    slower = {(one["cell"], one["against"]): one["ratio_error"] for one in summary["more"]["lost"]}
    assert slower[SHAPED.key, "best_pure"] == pytest.approx(0.0), "alike in all"
    assert all(error is None for (_, against), error in slower.items() if against not in ("best_pure", "neutronstar"))


# -------------------------------------------------------------------- the grid and the graphs


def test_grid_has_every_combination_once_and_the_plainest_first() -> None:
    cells = full_grid(("products", "debian-deps"))
    # models x layers x hidden x (one rank on loopback, three numbers of ranks on three networks)
    assert len(cells) == len({cell.key for cell in cells}) == 2 * 3 * 2 * 2 * (1 + 3 * 3)
    assert {cell.key for cell in cells[:6]} == {
        f"{graph}/{model}-2x128/2/1gbit" for graph in ("products", "debian-deps") for model in ("gcn", "sage", "gat")
    }
    scaled = full_grid(("products", "debian-deps"), scale=0.1)
    assert {cell.scale for cell in scaled if cell.graph == "debian-deps"} == {1.0}
    assert {cell.dataset for cell in scaled} == {"products@0.1", "debian-deps"}


def test_a_sample_is_the_grid_in_an_order_drawn_once() -> None:
    """Cells that were measured are told by this order: it stays."""
    cells = full_grid(ranks=(2, 3, 4), sample=5)
    assert set(cells) == set(full_grid(ranks=(2, 3, 4)))
    assert [cell.key for cell in cells[:3]] == [
        "debian-deps/gat-2x256/3/1gbit",
        "powerlaw/sage-3x256/4/200mbit",
        "moby-thesaurus/sage-3x128/3/loopback",
    ]
    assert full_grid(ranks=(2, 3, 4), sample=6) != cells


def test_quick_grid_has_what_every_figure_needs() -> None:
    cells = quick_grid()
    assert {cell.model for cell in cells if cell.ranks == 1} == {"gcn", "sage", "gat"}
    assert {cell.network for cell in cells} == {"loopback", "1gbit", "200mbit"}
    assert {3} <= {cell.num_layers for cell in cells}
    for cell in cells:
        assert set(quick_systems_of(cell)) <= set(systems_of(cell))
        assert {"dgl", "hybrid"} <= set(quick_systems_of(cell)) or cell.ranks > 1


def test_systems_that_run_a_cell() -> None:
    assert systems_of(ONE_GAT) == ("hybrid", "dgl", "dgl_blocks", "distdgl_full", "sar", "sar_mfg", "sar_mfg_no_sr")
    only_here = set(systems_of(TWO)) - set(systems_of(replace(TWO, network="1gbit")))
    assert only_here == {"dgl", "dgl_blocks", "dgl_one_thread"}
    # On blocks the norm of GCN takes other degrees.
    assert "dgl_blocks" not in systems_of(replace(TWO, model="gcn"))
    # SAR's message-flow graphs compute another GCN; PipeGCN has GraphSAGE only.
    assert not {"sar_mfg", "pipegcn"} & set(systems_of(SHAPED))


def test_cell_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="unknown network"):
        Cell(graph="products", network="wlan")
    with pytest.raises(ValueError, match="one rank uses no link"):
        Cell(graph="products", ranks=1, network="1gbit")
    with pytest.raises(ValueError, match="unknown allocator"):
        Settings(allocator="mine")


def test_generated_graph_is_what_its_shape_says() -> None:
    shape = GraphShape(nodes=4000, degree=30, features=16, classes=8, train=0.08, far=0.02, label_noise=0.0)
    graph = generate(shape)
    src, dst = graph["src"].astype(np.int64), graph["dst"].astype(np.int64)
    keys = src * shape.nodes + dst
    assert len(np.unique(keys)) == len(keys)
    assert not (src == dst).any()
    assert np.array_equal(np.sort(keys), np.sort(dst * shape.nodes + src))
    assert len(src) / shape.nodes == pytest.approx(30, rel=0.02)
    degrees = np.bincount(dst, minlength=shape.nodes)
    assert degrees.max() > 8 * np.median(degrees)
    label = graph["label"]
    assert set(label.tolist()) == set(range(8))
    assert (label[src] == label[dst]).mean() > 0.6
    assert graph["train_mask"].sum() == 320
    masks = np.stack([graph[name] for name in ("train_mask", "val_mask", "test_mask")])
    assert (masks.sum(0) == 1).all()
    # Features are drawn around their class's centre, so the nearest centre tells more than chance.
    centres = np.stack([graph["feat"][label == c].mean(0) for c in range(8)])
    nearest = ((graph["feat"][:, None] - centres) ** 2).sum(2).argmin(1)
    assert (nearest == label).mean() > 0.3
    again = generate(shape)
    assert all(np.array_equal(graph[name], again[name]) for name in graph)


def test_shapes_keep_their_degree_when_scaled() -> None:
    assert SHAPES["products"].scaled(0.05).nodes == 10_000
    assert SHAPES["products"].scaled(0.05).degree == 50
    small = SHAPES["reddit"].scaled(0.001)
    assert small.degree <= small.nodes / 8


# -------------------------------------------------------------------- the check of results

REFERENCE = {
    "losses": [2.0, 1.5],
    "logits": {3: [1.0, -4.0], 7: [0.5, 2.0]},
    "gradients": {"w": [2.0, -1.0], "b": [0.0, 0.0]},
    "why_no_gradients": None,
    "is_comparable": True,
}


def test_gate_lets_rounding_pass() -> None:
    gradients = {"w": [2.001, -1.0005], "b": [1e-6, -1e-6]}
    sample = {"losses": [2.00001], "logits": {3: [1.0, -4.0001], 7: [0.5, 2.0]}, "gradients": gradients}
    found = gate.compare(REFERENCE | sample, REFERENCE)
    assert found["losses"] == 1
    assert found["vertices"] == 2
    assert found["logit_error"] == pytest.approx(2.5e-5)
    assert found["gradient_error"] == pytest.approx(5e-4)
    why = "it steps by batches"
    found = gate.compare(REFERENCE | {"gradients": None, "why_no_gradients": why}, REFERENCE)
    assert found["no_gradients"] == why
    assert "gradient_error" not in found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"losses": [2.0, 1.6]}, "losses"),
        ({"losses": [float("nan"), 1.5]}, "losses"),
        ({"losses": [2.0, float("nan")]}, "losses"),
        ({"logits": {3: [1.0, float("nan")], 7: [0.5, 2.0]}}, "logits must equal"),
        ({"logits": {3: [1.0, -4.0], 7: [0.5, 2.01]}}, "logits must equal"),
        ({"logits": {3: [1.0, -4.0]}}, "1 of 2 vertices are missing"),
        # Adam does not see a factor, nor do losses; the sketch sees what a norm does not.
        ({"gradients": {"w": [4.0, -2.0], "b": [0.0, 0.0]}}, "the gradient of w must equal"),
        ({"gradients": {"w": [2.0, 1.0], "b": [0.0, 0.0]}}, "the gradient of w must equal"),
        ({"gradients": {"w": [float("nan"), -1.0], "b": [0.0, 0.0]}}, "the gradient of w must equal"),
        ({"gradients": {"w": [2.0, -1.0]}}, r"gradients must be of \['b', 'w'\] \(got \['w'\]\)"),
        ({"gradients": None}, "must tell its gradients, or why it cannot"),
    ],
)
def test_gate_stops_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(gate.GateError, match=message):
        gate.compare(REFERENCE | changes, REFERENCE)


@pytest.mark.parametrize(
    ("quantity", "just_right", "just_wrong"),
    [
        ("losses", {"losses": [2.000199, 1.5]}, {"losses": [2.000201, 1.5]}),
        ("losses", {"losses": [2.0, 1.499851]}, {"losses": [2.0, 1.499849]}),
        # Of the largest logit, which is 4, whatever the one that differs is.
        ("logits", {"logits": {3: [1.0, -4.0], 7: [0.500399, 2.0]}}, {"logits": {3: [1.0, -4.0], 7: [0.500401, 2.0]}}),
        # Of the norm of the weight's gradient, which is 2, and 1e-5 of the norm of all.
        *(
            (
                "the gradient of w",
                {"gradients": {"w": just_right, "b": [0.0, 0.0]}},
                {"gradients": {"w": just_wrong, "b": [0.0, 0.0]}},
            )
            for just_right, just_wrong in (([2.002019, -1.0], [2.002021, -1.0]), ([2.0, -1.002019], [2.0, -1.002021]))
        ),
        (
            "the gradient of b",
            {"gradients": {"w": [2.0, -1.0], "b": [1.9e-5, 0.0]}},
            {"gradients": {"w": [2.0, -1.0], "b": [2.1e-5, 0.0]}},
        ),
    ],
)
def test_gate_lets_no_more_than_rounding_pass(
    quantity: str, just_right: dict[str, Any], just_wrong: dict[str, Any]
) -> None:
    """In numbers of its own: a tolerance that is loosened is a decision about what the figures mean."""
    gate.compare(REFERENCE | just_right, REFERENCE)
    with pytest.raises(gate.GateError, match=quantity):
        gate.compare(REFERENCE | just_wrong, REFERENCE)


def test_gradients_that_differ_have_other_sketches() -> None:
    gradient = torch.arange(1.0, 7.0).reshape(2, 3)
    ways = {"as it is": gradient, "negated": -gradient, "permuted": gradient.flip(1), "again": gradient.clone()}
    sketches = {way: base.sketch([("w", one)])["w"] for way, one in ways.items()}
    norms, products = zip(*sketches.values(), strict=True)
    assert norms == (pytest.approx(math.sqrt(91.0)),) * 4
    assert products[0] == products[3] == -products[1]
    assert len({abs(product) for product in (products[0], products[2], norms[0])}) == 3
    # Directions are those of names, in any order: the ranks of a system and plain DGL draw them each for itself.
    both = base.sketch([("v", gradient), ("w", gradient)])
    assert both["w"] == sketches["as it is"]
    assert both["v"][1] != both["w"][1]
    assert base.sketch([("w", None)]) == {"w": [0.0, 0.0]}


def test_gate_of_another_model_and_of_several_ranks() -> None:
    assert gate.compare({"is_comparable": False}, REFERENCE) == {"is_comparable": False}
    by_rank = [{"losses": [1.0], "logits": {"3": [1.0]}}, {"losses": [1.0], "logits": {"7": [2.0]}}]
    assert gate.merge(by_rank) == {"losses": [1.0], "logits": {3: [1.0], 7: [2.0]}}
    steps = [answer | {"gradients": {"w": [2.0, sketch]}} for answer, sketch in zip(by_rank, (-1.0, -1.00001))]
    assert gate.merge(steps)["gradients"] == {"w": [2.0, -1.0]}
    steps[1]["gradients"] = {"w": [1.0, -0.5]}
    with pytest.raises(gate.GateError, match="the gradient of w must equal rank 0's"):
        gate.merge(steps)


# -------------------------------------------------------------------- lines


def test_epochs_are_of_the_slowest_rank() -> None:
    def rank(seconds: float, sent: int | None, wire: int) -> dict[str, Any]:
        parts = {"cpu_s": 0.5, "compute_s": 0.2, "exchange_s": None, "wait_s": None}
        return {"elapsed_s": seconds, "sent_bytes": sent, "wire_bytes": wire, **parts}

    epochs = [[rank(1.0, 30, 100), rank(3.0, 0, 200)], [rank(2.0, 30, 100), rank(1.0, 0, 200)]]
    found = summarise_epochs(epochs, is_emulated=True)
    assert (found["p50"], found["iters"], found["sent_bytes"], found["wire_bytes"]) == (2.5, 2, 30, 300)
    assert found["exchange_s"] is None
    assert found["exchanges"] is None
    # Ranks that share one interface all count the same bytes.
    assert summarise_epochs(epochs, is_emulated=False)["wire_bytes"] == 100


def test_exchanges_are_told_by_layer_and_direction() -> None:
    def epoch(*blocked: float) -> list[dict[str, Any]]:
        # The first layer exchanges twice in a forward.
        kinds = ((1, False), (1, False), (1, True))
        exchanges = [
            {"layer": layer, "backward": backward, "blocked_s": one, "beside_s": 2 * one}
            for (layer, backward), one in zip(kinds, blocked, strict=True)
        ]
        parts = dict.fromkeys(("cpu_s", "compute_s", "exchange_s", "wait_s", "sent_bytes", "wire_bytes"))
        return [{"elapsed_s": 1.0, "exchanges": exchanges, **parts}]

    found = summarise_epochs([epoch(1.0, 2.0, 5.0), epoch(1.0, 1.0, 3.0), epoch(4.0, 4.0, 4.0)], is_emulated=False)
    assert found["exchanges"] == [
        {"layer": 1, "backward": False, "blocked_s": 3.0, "beside_s": 6.0},
        {"layer": 1, "backward": True, "blocked_s": 4.0, "beside_s": 8.0},
    ]


def test_lines_survive_a_run_that_was_broken_off(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    assert read_lines(file) == []
    append_lines(file, [{"a": 1}, {"a": 2}])
    with file.open("a") as stream:
        stream.write('{"a": 3, "b')
    assert read_lines(file) == [{"a": 1}, {"a": 2}]
    append_lines(file, [{"a": 4}])
    assert read_lines(file) == [{"a": 1}, {"a": 2}, {"a": 4}]


def test_a_measured_cell_is_known_again(lines: list[dict[str, Any]]) -> None:
    def known(cell: Cell, *systems: str, code: str = "code1", **changes: Any) -> str | None:
        settings, machine = SETTINGS | changes.pop("settings", {}), MACHINE | changes.pop("machine", {})
        return measured_run(lines, cell.key, systems, code, settings, machine=machine, **changes)

    assert known(TWO, "hybrid", "sar") == "run1"
    assert not known(TWO, "hybrid", "dgl")
    assert not known(TWO, "hybrid", code="code2")
    assert not known(TWO, "hybrid", settings={"rounds": 7})
    assert not known(replace(TWO, ranks=3), "hybrid")
    # The file may have come with the sources, from somebody else's machine.
    assert not known(TWO, "hybrid", machine={"processor": "another"})
    assert known(TWO, "hybrid", machine={"system": "Linux 2"})
    # What failed counts as measured, unless it is to be tried again.
    assert known(SHAPED, "hybrid", "sar")
    assert not known(SHAPED, "hybrid", "sar", retry_failed=True)
    # Ratios are formed within a run, so two halves of two runs are not a measurement.
    lines.append(make_line(TWO, "dgl", 1.0, run="run2"))
    assert not known(TWO, "hybrid", "dgl")
    lines += [make_line(TWO, name, 1.0, run="run3") for name in ("hybrid", "dgl")]
    assert known(TWO, "hybrid", "dgl") == known(TWO, "hybrid") == "run3"
    assert known(TWO, "hybrid", "sar") == "run1"


def test_the_last_run_of_a_cell_counts(lines: list[dict[str, Any]]) -> None:
    lines += [make_line(ONE_GAT, "hybrid", 2.0, run="run2"), make_line(ONE_GAT, "dgl", 3.0, run="run2")]
    assert newest(lines)[ONE_GAT.key]["dgl"]["p50"] == 3.0
    assert summarise(lines, {})["vs_dgl_one_rank_gat_median"] == pytest.approx(1.5)


def test_a_run_of_a_part_of_the_systems_does_not_take_the_place_of_a_fuller_one(
    lines: list[dict[str, Any]], tmp_path: Path
) -> None:
    """`--system hybrid` left the tables without all the others, and so without its ratios."""
    readme = tmp_path / "README.md"
    readme.write_text(f"{BEGIN}\n{END}\n")
    write(lines, readme=readme, pictures=tmp_path)
    before = readme.read_text()
    cell = newest(lines)[TWO.key]
    lines.append(make_line(TWO, "hybrid", 77.0, run="a part"))
    lines.append(make_line(TWO, "sar", None, run="a part", status="unavailable", error="no checkout"))
    write(lines, readme=readme, pictures=tmp_path)
    assert readme.read_text() == before
    whole = [make_line(TWO, name, 88.0, run="whole") for name in cell if name != "sar"]
    whole.append(make_line(TWO, "sar", None, run="whole", status="failed", error="died"))
    write(lines + whole, readme=readme, pictures=tmp_path)
    after = readme.read_text()
    assert "| 88 " in after
    assert "| 77 " not in after
    assert "died" in after


@pytest.mark.parametrize(
    ("changes", "stays"),
    [
        ({}, True),
        ({"rounds": 7}, True),
        ({"rounds": 4}, False),
        ({"starts": 1}, False),
        ({"starts": 6}, True),
        ({"allocator": "default"}, False),
    ],
)
def test_a_run_of_other_settings_does_not_take_the_place_of_a_longer_one(
    changes: dict[str, Any], stays: bool, lines: list[dict[str, Any]]
) -> None:
    """One turn by another allocator stood in the table, as if it were like the others."""
    other = [line | {"run": "run2", "settings": SETTINGS | changes} for line in lines if line["cell"] == TWO.key]
    assert without_partial_runs(lines + other) == (lines + other if stays else lines)
    # More turns or starts than usual were one cell's: the next run has as many as all others.
    usual = [line | {"run": "run3", "settings": SETTINGS} for line in other]
    assert newest(without_partial_runs(lines + other + usual))[TWO.key]["hybrid"]["run"] == "run3"


def test_spread() -> None:
    assert spread([3.0]) == {"p20": 3.0, "p50": 3.0, "p80": 3.0}
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == {"p20": 2.0, "p50": 3.5, "p80": 5.0}


# -------------------------------------------------------------------- ratios


def test_final_object(lines: list[dict[str, Any]]) -> None:
    result = summarise(lines, {"ogb:ogbn-products": "no network"})
    assert list(result) == [*HEADLINE, "cells", "more"]
    # 20/1, 8/2 and, on one rank, 3/1
    assert result["vs_distdgl_full_median"] == pytest.approx(4.0)
    assert result["vs_distdgl_full_min"] == pytest.approx(3.0)
    # min(2, 1.5)/1 and min(1.9, 8)/2; one rank has nothing to cache
    assert result["vs_best_pure_max"] == pytest.approx(1.5)
    assert result["vs_best_pure_min"] == pytest.approx(0.95)
    assert result["vs_neutronstar_min"] == pytest.approx(1.0)
    assert result["vs_neutronstar_max"] == pytest.approx(1.2)
    # The fastest of SAR's variants; where it failed there is no ratio.
    assert result["vs_sar_median"] == result["vs_sar_min"] == pytest.approx(4.0)
    assert result["vs_dgl_one_rank_gcn_sage_median"] == pytest.approx(1.6)
    assert result["vs_dgl_one_rank_gat_median"] == pytest.approx(3.5)
    # 0.8 against 1.0, 2.2 against 2.0
    assert result["predicted_error_median"] == pytest.approx(0.15)
    assert result["predicted_error_max"] == pytest.approx(0.2)
    assert [cell["cell"] for cell in result["cells"]] == [TWO.key, SHAPED.key, ONE_SAGE.key, ONE_GAT.key]
    more = result["more"]
    assert more["vs_pipegcn_median"] == pytest.approx(3.0)
    assert more["vs_sar_loopback_median"] == pytest.approx(4.0)
    assert more["vs_sar_1gbit_median"] is None
    assert more["memory_vs_sar_max"] is None  # SAR had not given back what loading has freed
    assert (more["vs_best_pure_other_plan_min"], more["vs_neutronstar_other_plan_min"]) == (0.95, 1.0)
    # Without GCN: 20/1 and 3/1. Of all: 0.1 s of computing over 1, 2 and 1 s.
    assert more["vs_distdgl_full_checked_median"] == pytest.approx(11.5)
    assert (more["vs_distdgl_full_checked_min"], more["vs_distdgl_full_checked_max"]) == (3.0, 20.0)
    assert more["distdgl_compute_over_hybrid_median"] == pytest.approx(0.1)
    assert more["distdgl_compute_over_hybrid_min"] == pytest.approx(0.05)
    assert more["skipped"] == {"ogb:ogbn-products": "no network"}
    json.dumps(result, allow_nan=False)


def test_lost_cells_and_failures_are_told(lines: list[dict[str, Any]]) -> None:
    more = summarise(lines, {})["more"]
    (lost,) = more["lost"]
    expected = {"cell": SHAPED.key, "against": "best_pure", "ratio": pytest.approx(0.95), "ratio_error": None}
    assert lost == expected | {"plans": [], "same_plan": None}
    assert more["failed"] == [{"cell": SHAPED.key, "system": "sar", "error": "it broke | here"}]


def test_it_is_told_which_plans_lost(lines: list[dict[str, Any]]) -> None:
    (line,) = (line for line in lines if (line["cell"], line["variant"]) == (SHAPED.key, "hybrid"))
    line["starts"] = [{"p50": 1.0, "plan": plan} for plan in ("depcomm", "hybrid@0.5", None)]
    assert [one["plans"] for one in summarise(lines, {})["more"]["lost"]] == [["depcomm", "hybrid@0.5"]]


def test_it_is_told_whether_the_faster_one_ran_the_same_plan(lines: list[dict[str, Any]]) -> None:
    of_cell = {line["variant"]: line for line in lines if line["cell"] == SHAPED.key}
    pure = min((of_cell["depcache"], of_cell["depcomm"]), key=lambda line: line["p50"])

    def told(own: list[str | None], other: list[str | None]) -> bool | None:
        for line, digests in ((of_cell["hybrid"], own), (pure, other)):
            line["starts"] = [{"p50": 1.0, "plan": "any", "plan_digest": digest} for digest in digests]
        (lost,) = summarise(lines, {})["more"]["lost"]
        return lost["same_plan"]

    assert told(["a", "a"], ["a"]) is True
    assert summarise(lines, {})["more"]["vs_best_pure_other_plan_min"] == pytest.approx(1.5), "that of the other cell"
    assert told(["a", "b"], ["a"]) is False
    assert told(["a", "a"], ["b"]) is False
    assert told(["a", None], ["a"]) is None, "of older measurements it is not known"


def test_plans_of_all_ranks_are_in_one_digest() -> None:
    first, second = ({"plan": "hybrid", "plan_digest": digest} for digest in ("a", "b"))
    assert measure._of_all_ranks([first, second])["plan"] == "hybrid"
    assert measure._of_all_ranks([first, second]) != measure._of_all_ranks([first, first])
    assert measure._of_all_ranks([first, second]) == measure._of_all_ranks([first, second])
    assert measure._of_all_ranks([{"plan": None}, second]) == {"plan": None}, "none is made yet"


def test_a_digest_is_of_what_a_plan_does() -> None:
    plan = DependencyPlan(
        strategy="hybrid",
        rank=0,
        world_size=2,
        num_layers=2,
        cached=(torch.tensor([3, 5]), torch.tensor([5])),
        communicated=(1, 2),
        objective_s=0.5,
    )
    assert _digest(plan) == _digest(replace(plan, strategy="neutronstar", objective_s=0.25))
    others = [
        replace(plan, cached=(torch.tensor([3, 7]), torch.tensor([5]))),
        replace(plan, cached=(torch.tensor([3]), torch.tensor([5]))),
        replace(plan, chunk_rows=100),
        replace(plan, trace=cast(Any, SimpleNamespace(sums_first=(False, True)))),
        replace(plan, trace=cast(Any, SimpleNamespace(sums_first=(False, False)))),
    ]
    assert len({_digest(one) for one in (plan, *others)}) == 1 + len(others)


def test_without_peers_their_figures_are_null(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        if line["variant"].startswith(("sar", "pipegcn")):
            line |= {"status": "unavailable", "p50": None}
    result = summarise(lines, {})
    assert result["vs_sar_median"] is None
    assert result["vs_sar_min"] is None
    assert result["more"]["failed"] == []
    assert result["cells"][0]["unavailable"] == ["sar", "sar_mfg", "pipegcn"]
    assert list(summarise([], {})) == list(result)


def test_tables(lines: list[dict[str, Any]]) -> None:
    cells = summarise(lines, {})["cells"]
    rows = {row[0]: dict(zip(CELL_HEAD, row, strict=True)) for row in cell_rows(cells)}
    assert rows[SHAPED.key]["SAR"] == "failed"
    assert rows[SHAPED.key]["best_pure"] == "*0.95*"
    assert rows[TWO.key]["distdgl_full"] == "20.00"
    assert rows[ONE_GAT.key]["SAR"] == ""
    found = line_rows([line for line in lines if line["cell"] == SHAPED.key])
    assert all(len(row) == len(LINE_HEAD) for row in found)
    assert found[-1][:2] == ("SAR", "failed: it broke / here")
    assert found[-2] == (
        *("hybrid", "2 s (1.8 s to 2.4 s)", "", "100 ms", "100 ms", "", "", "", "2.0 MB", "100, 200 MB", "2.2 s"),
        *("10 ms", "3 s"),
    )
    full = next(line for line in lines if line["variant"] == "distdgl_full" and line["cell"] == SHAPED.key)
    named = [line_rows([full | {"facts": {"skips_largest": skips}}])[0][0] for skips in (False, True)]
    assert named == ["DistDGL, full", "DistDGL, full, not all seeds at once"]
    assert drop_empty_columns(("a", "b"), [("1", ""), ("2", "")]) == (("a",), [("1",), ("2",)])


def test_readme_is_written_from_lines_alone(lines: list[dict[str, Any]], tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"# Mine\n\n{BEGIN}\nold\n{END}\ntail\n")
    write(lines, readme=readme, pictures=tmp_path)
    text = readme.read_text()
    assert text.startswith("# Mine\n")
    assert text.endswith(f"{END}\ntail\n")
    assert "old" not in text
    assert f"| {SHAPED.key} | best_pure | 0.95 |" in text
    assert "it broke / here" in text
    assert "![epoch times](epoch_products_loopback.png)" in text
    assert {file.name for file in tmp_path.glob("epoch_*")} == {
        f"epoch_products_{network}.{ending}" for network in ("loopback", "1gbit") for ending in ("png", "svg")
    }
    write(lines, readme=readme, pictures=tmp_path)
    assert readme.read_text() == text
    readme.write_text("no marks")
    with pytest.raises(ValueError, match="must have the lines"):
        write(lines, readme=readme, pictures=tmp_path)


def test_report_says_on_which_processor_each_cell_was_measured(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        if line["cell"] == TWO.key:
            line["machine"] = {**line["machine"], "processor": "Quick 7"}
            line["git_sha"] = "def"
    text = report(lines)
    assert "Quick 7 (1 cells)" in text
    assert "processor not recorded (3 cells)" in text
    assert f"<summary>{TWO.key} (def, Quick 7)</summary>" in text
    assert f"<summary>{SHAPED.key} (abc, processor not recorded)</summary>" in text


def test_report_is_about_what_it_shows(lines: list[dict[str, Any]]) -> None:
    old = [{**line, "run": "run0", "git_sha": "old"} for line in lines if line["cell"] == TWO.key]
    assert "Commits (+: with changes): abc." in report([*old, *lines])


def test_processor_tells_its_name(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel\t\t: 17\nmodel name\t: Quick 7\n\nprocessor\t: 1\n")
    assert results.processor_name(cpuinfo) == "Quick 7, model 17"
    cpuinfo.write_text("Features\t: fp asimd\n")
    assert results.processor_name(cpuinfo) == "unknown, model unknown"
    assert results.processor_name(tmp_path / "none")


@pytest.mark.parametrize(
    ("figure", "factor", "is_logarithmic"), [("p50", 1.0, False), ("p50", 40.0, True), ("p80", 40.0, True)]
)
def test_bars_are_as_long_as_times_unless_those_are_far_apart(
    figure: str, factor: float, is_logarithmic: bool, lines: list[dict[str, Any]], tmp_path: Path
) -> None:
    shaped = [line for line in lines if line["cell"] == SHAPED.key]
    for line in shaped:
        if line["variant"] == "distdgl_full":
            line[figure] *= factor
    files = draw_all(shaped, tmp_path)
    (drawn,) = (file.read_text() for file in files if file.suffix == ".svg")
    assert ("logarithmic" in drawn) == is_logarithmic


def test_bars_are_medians_of_the_fastest_and_reach_to_both_quantiles(
    lines: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = [line for line in lines if line["cell"] == SHAPED.key]
    for line, quantiles in zip(cell, [(1.5, 2.0, 4.0), (1.0, 1.75, 2.75), (7.0, 8.0, 8.5)]):
        line["p20"], line["p50"], line["p80"] = quantiles
    drawn: dict[str, tuple[list[float], list[list[float]]]] = {}
    draw = Axes.barh

    def barh(self: Axes, places: Any, values: Any, *args: Any, **options: Any) -> Any:
        drawn[options["label"]] = (list(values), options["xerr"])
        return draw(self, places, values, *args, **options)

    monkeypatch.setattr(Axes, "barh", barh)
    draw_all(cell, tmp_path)
    assert drawn["hybrid"] == ([2.0], [[0.5], [2.0]])
    assert drawn["best pure"] == ([1.75], [[0.75], [1.0]]), "depcache, not depcomm"
    assert sorted(drawn) == ["DistDGL, full", "best pure", "hybrid", "neutronstar"]


# -------------------------------------------------------------------- time to accuracy


def test_time_to_accuracy_may_be_what_was_measured_last(lines: list[dict[str, Any]], tmp_path: Path) -> None:
    last = {key: value for key, value in lines[-1].items() if key not in ("machine_rates", "load_before")}
    last |= {"metric": "time_to_accuracy", "cell": "accuracy/some", "target": 0.5, "best_accuracy": 0.6, "status": "ok"}
    both = [
        last | {"variant": name, "p50": seconds, "ready_s": 10 * seconds}
        for name, seconds in (("hybrid", 2.0), ("distdgl_sampled", 3.0))
    ]
    readme = tmp_path / "README.md"
    readme.write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")
    write([*lines, *both], readme=readme, pictures=tmp_path)
    assert "| accuracy/some | 0.500 | 2 s | 3 s | 1.50 | 20 s, 30 s | 0.600, 0.600 |" in readme.read_text(
        encoding="utf-8"
    )


def test_time_to_accuracy_takes_the_best_setting_of_each() -> None:
    ours = [[(1.0, 0.5), (2.0, 0.8)], [(0.5, 0.6), (1.2, 0.7)]]
    theirs = [[(3.0, 0.66), (6.0, 0.7)], [(2.0, 0.5), (4.0, 0.6)]]
    found = judge({"hybrid": ours, "distdgl_sampled": theirs})
    # Both reach 0.7; that less the margin is first reached after 1.2 s and 6 s.
    assert found["hybrid"]["target"] == pytest.approx(0.7 - MARGIN)
    assert (found["hybrid"]["p50"], found["hybrid"]["setting"], found["hybrid"]["best_accuracy"]) == (1.2, 1, 0.8)
    assert (found["distdgl_sampled"]["p50"], found["distdgl_sampled"]["setting"]) == (6.0, 0)
    assert time_to([(1.0, 0.2)], 0.3) is None


def test_time_to_accuracy_goes_on_where_it_was_broken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells, measured = [Cell(graph="products"), Cell(graph="reddit")], list[str]()
    about = {"machine": MACHINE, "code": "c"}
    bench = SimpleNamespace(about=about, settings=SimpleNamespace(to_json=lambda: SETTINGS), cache=tmp_path, peers=None)

    def measure_one(_: Any, cell: Cell, *__: Any) -> list[dict[str, Any]]:
        measured.append(cell.graph)
        line = {"metric": accuracy.METRIC, "cell": f"accuracy/{cell.key}", "run": cell.key, "status": "ok"}
        line |= about | {"settings": SETTINGS}
        return [line | {"variant": name} for name in ("hybrid", "distdgl_sampled")]

    monkeypatch.setattr(accuracy, "measure", measure_one)
    monkeypatch.setattr(accuracy, "prepare", lambda *_: SimpleNamespace(num_train=9))
    monkeypatch.setattr(accuracy, "replace", lambda bench, **_: bench)
    monkeypatch.setattr(accuracy, "describe_run", lambda _: about)
    monkeypatch.setattr(accuracy, "mark_changed", lambda found, _: found)
    bar = SimpleNamespace(set_description=lambda _: None, update=lambda: None)
    file = tmp_path / "results.jsonl"
    for some in (cells[:1], cells, cells):
        lines, skipped = accuracy.measure_cells(cast(Any, bench), some, parse(["--accuracy"]), file, bar)
        assert not skipped
        assert len(lines) == 2 * len(some)
    assert measured == ["products", "reddit"]
    # What has been measured is shown, however late it is.
    later = [*cells, Cell(graph="powerlaw")]
    lines, skipped = accuracy.measure_cells(cast(Any, bench), later, parse(["--accuracy", "--hours", "0"]), file, bar)
    assert len(lines) == 4
    assert list(skipped) == [f"accuracy/{later[-1].key}"]


def test_curves_are_as_slow_as_the_slowest_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def curve(*elapsed_s: float) -> list[dict[str, Any]]:
        return [{"epoch": epoch, "elapsed_s": one} for epoch, one in enumerate(elapsed_s)]

    asked: list[str] = []

    def ask(order: str, **_: Any) -> list[Any]:
        asked.append(order)
        return [curve(1.0, 5.0, 6.0), curve(2.0, 4.0, 7.0)] if order == "curve" else [None, None]

    team = SimpleNamespace(start=lambda: None, ask=ask, end=lambda: asked.append("end"))
    monkeypatch.setattr(accuracy, "Team", lambda **_: team)
    bench = SimpleNamespace(job=lambda *_, **__: None, settings=Settings())
    trial = SimpleNamespace(system="hybrid", lr=0.1, options={}, epochs=3, every=1)
    graph = cast(Any, None)
    _, carried, points = accuracy._train(cast(Any, bench), TWO, graph, cast(Any, trial), tmp_path)
    assert points == curve(2.0, 5.0, 7.0)
    assert carried is None, "on loopback"
    assert asked == ["prepare", "curve", "end"]


def tiny_job(system: str) -> Job:
    return Job(
        system=system,
        part_config="none.json",
        graph_name="none",
        data={},
        num_nodes=9,
        feat_dim=4,
        num_classes=2,
        num_train=3,
        model="gat",
        num_layers=2,
        hidden=8,
        world_size=2,
        threads=1,
    )


def test_distdgl_runs_without_the_plugin_whatever_the_caller_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DGL_HYBRID_ENABLE", "1")
    jobs = list[Any]()
    monkeypatch.setattr(team_of_ranks, "run_cluster", lambda job, on_line: jobs.append(job))
    team = Team(job=tiny_job("distdgl_full"), folder=tmp_path, is_cluster=True)
    team._start_cluster(10.0)
    assert team._cluster is not None
    team._cluster.join()
    assert [job.environment["DGL_HYBRID_ENABLE"] for job in jobs] == ["0"]


@pytest.mark.parametrize(
    ("shares", "options", "tried"),
    [
        ((1025, 1024), {}, [1025]),
        ((9000, 8999), {}, [9000, 8192, 1024]),
        ((9000, 8999), {"skips_largest": True}, [8192, 1024]),
    ],
)
def test_distdgl_is_tried_by_batches_of_which_every_rank_has_as_many(
    shares: tuple[int, int], options: dict[str, bool], tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one rank would wait for the others in its last batch."""
    monkeypatch.setattr(distdgl, "_max_over_ranks", lambda value: max(value, shares[0] if value > 0 else -shares[1]))
    monkeypatch.setattr(distdgl.dist, "barrier", lambda: None)
    system, sizes = object.__new__(distdgl.DistDGLFull), list[int]()
    system.job = replace(tiny_job("distdgl_full"), options=options)
    system.nids, system.model, system.optimizer = torch.arange(shares[1]), torch.nn.Linear(1, 1), None
    system.make_optimizer = lambda _: None  # type: ignore[assignment, method-assign, return-value]
    system._make_loader = lambda size, **_: sizes.append(size) or size  # type: ignore[func-returns-value, method-assign]
    system._train = lambda loader, limit_s=math.inf: 1.0  # type: ignore[method-assign]
    found = system._choose()
    assert sizes == [*tried, tried[0]]
    names = ["all" if size == shares[0] else str(size) for size in tried]
    assert str(found["batch_size"]) == names[0]
    assert list(found["seconds_by_batch_size"]) == names
    assert found["skips_largest"] == bool(options), "lines say so"


def test_ranks_of_sampled_distdgl_make_as_many_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distdgl, "_max_over_ranks", lambda value: max(value, 1025 if value > 0 else -1024))
    system = object.__new__(distdgl.DistDGLSampled)
    system.job = replace(tiny_job("distdgl_sampled"), options={"batch_size": 1024, "fanouts": [5, 5]})
    system.rank, system.nids = 0, torch.arange(1025)
    system._make_loader = lambda *_, **__: None  # type: ignore[method-assign]
    system._choose()
    assert len(system.nids) == 1024


def test_a_system_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--system", "hybird"])
    assert "hybird" in capsys.readouterr().err
    assert parse(["--system", "sar_mfg"]).system == ["sar_mfg"]


@pytest.mark.parametrize("arguments", ["--quick --accuracy", "--memory --accuracy", "--accuracy --write"])
def test_two_measurements_at_once_are_refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`make bench ARGS=--accuracy` trained for hours, with the time limit of a few minutes, and kept nothing."""
    with pytest.raises(SystemExit):
        parse(arguments.split())
    told = capsys.readouterr().err.splitlines()[-1]
    assert "--accuracy" in told
    assert "different measurements" in told


@pytest.mark.parametrize("arguments", ["--quick --graph products", "--quick --scale 0.1", "--accuracy --ranks 3"])
def test_options_that_would_change_nothing_are_refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments.split())
    told = capsys.readouterr().err.splitlines()[-1]  # the lines before show all options there are
    mode, option, _ = arguments.split()
    assert told.endswith(f"{mode} has cells of its own: leave out {option}")


def test_a_few_minutes_are_for_one_start_of_each_system() -> None:
    assert settings_of(parse(["--quick"])) == Settings(starts=1, timeout_s=300.0)
    assert settings_of(parse(["--quick", "--starts", "2", "--rounds", "7"])) == Settings(
        starts=2, rounds=7, timeout_s=300.0
    )
    assert settings_of(parse([])) == Settings()


def test_what_failed_is_told_without_paths_of_this_machine(tmp_path: Path) -> None:
    """Lines are part of the repository."""
    peers, temporary = tmp_path / "peers", Path(tempfile.gettempdir(), "x")
    bench = measure.Bench(
        settings=Settings(), cache=measure.ROOT / "cache", peers=peers, rates=cast(Any, None), about={}
    )
    team = SimpleNamespace()
    failure = SystemFailure(
        "no module in /a/b", f"{measure.ROOT}/x.py {bench.cache}/g.npz {peers}/SAR {temporary} /usr/lib"
    )
    entry = measure._Entry(system="hybrid", unit=("hybrid",), team=cast(Any, team), failure=failure)
    line = bench._result(Cell(graph="products"), cast(Any, None), [entry])
    assert line["status"] == "failed"
    assert line["error"] == "no module in /a/b"
    assert line["details"] == "CHECKOUT/x.py CACHE/g.npz PEERS/SAR TEMP/x /usr/lib"


def a_start(*seconds: float, sent: int | None = None, wire: int = 0, **changes: Any) -> measure._Entry:
    """Of hybrid on two ranks, an epoch for each of the seconds; on an emulated network if anything was on the wire."""
    parts = dict.fromkeys(("cpu_s", "compute_s", "exchange_s", "wait_s"))
    epochs = [[{"elapsed_s": one, "sent_bytes": sent, "wire_bytes": wire, **parts}] * 2 for one in seconds]
    team = SimpleNamespace(network=object() if wire else None)
    return measure._Entry(
        **{"system": "hybrid", "unit": ("hybrid",), "team": cast(Any, team), "epochs": epochs, "peak_bytes": [1, 2]}
        | changes
    )


@pytest.fixture
def bench_of_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(measure, "epoch_floor_s", lambda *_, **__: 0.5)
    return Bench(settings=Settings(), cache=tmp_path, peers=None, rates=cast(Any, None), about={"machine": MACHINE})


def test_a_system_counts_by_all_its_starts(bench_of_lines: Bench) -> None:
    def result(*starts: measure._Entry) -> dict[str, Any]:
        return bench_of_lines._result(TWO, cast(Any, None), starts)

    first, second = a_start(1.0, 2.0, 3.0), a_start(4.0, 5.0, peak_bytes=[3, 1], warmup=7, prepare_s=8.0)
    both = result(first, second)
    assert (both["status"], both["p50"], both["iters"]) == ("ok", 3.0, 5)
    assert [start["p50"] for start in both["starts"]] == [2.0, 4.5]
    assert (both["peak_rss_bytes"], both["warmup"], both["prepare_s"]) == ([3, 2], 7, 4.0)
    dead = a_start(1.0, failure=SystemFailure("rank 1 of 2 died"))
    for starts in ((first, dead), (dead, first), (first, second, dead)):
        assert result(*starts) == {"status": "failed", "error": "rank 1 of 2 died", "details": ""}


def test_rows_that_did_not_go_over_the_links_are_no_measurement(bench_of_lines: Bench) -> None:
    """Each of two ranks sent 1000 bytes of rows; frames around them make it more on the wire, never less."""
    for wire, status in ((1100, "ok"), (951, "ok"), (949, "failed"), (1, "failed")):
        line = bench_of_lines._result(SHAPED, cast(Any, None), [a_start(1.0, sent=1000, wire=wire)])
        assert line["status"] == status
    assert line["error"] == "the links were bypassed: 2000 bytes of rows were sent, 2 left the hosts"
    others = (a_start(1.0, wire=1), a_start(1.0, sent=1000, wire=1, system="distdgl_full"), a_start(1.0, sent=1000))
    for start in others:  # what was sent is not known, or not all of it goes over the links
        assert bench_of_lines._result(SHAPED, cast(Any, None), [start])["status"] == "ok"


@pytest.mark.parametrize(("measured", "is_refused"), [(0.5e9, False), (1.04e9, False), (1.06e9, True)])
def test_links_that_carry_more_than_they_are_to_are_refused(
    measured: float, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shaped: list[float] = []
    network = SimpleNamespace(shape=shaped.append, measure_bits_per_s=lambda expected_bits_per_s: measured)
    monkeypatch.setattr(measure, "EmulatedNetwork", lambda num_hosts: contextlib.nullcontext(network))
    expected = (
        pytest.raises(measure.NetworkError, match=r"links carry 1.06e\+09 bit/s, limited to 1e\+09")
        if is_refused
        else contextlib.nullcontext()
    )
    with expected, measure.network_of(SHAPED) as found:
        assert found == (network, measured)
    assert shaped == [1e9]
    with measure.network_of(TWO) as found:
        assert found == (None, None)


# -------------------------------------------------------------------- processes


def test_a_system_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    team = Team(job=tiny_job("pipegcn"), folder=tmp_path / "team")
    before = set(psutil.Process().children(recursive=True))
    try:
        team.start()
        with pytest.raises(SystemFailure, match="prepare: NotImplementedError: PipeGCN has GraphSAGE only"):
            team.ask("prepare", timeout_s=100)
    finally:
        team.end()
    assert set(psutil.Process().children(recursive=True)) <= before


def test_code_is_known_by_all_that_decides_what_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for pattern in results.MEASURING_SOURCES:
        assert list(results.ROOT.glob(pattern)), f"{pattern} is no source any more"
    packages = {"torch": "1"}
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "package_versions", lambda: packages)
    names = ("dgl_hybrid/graph/a.py", "dgl_hybrid/a.cu", "patches/a.patch", "benchmarks/systems/gate.py")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    versions = [results.code_version()]
    assert results.code_version() == versions[0]
    for name in names:
        (tmp_path / name).write_text("2")
        versions.append(results.code_version())
    (tmp_path / names[0]).rename(tmp_path / "dgl_hybrid/graph/b.py")
    versions.append(results.code_version())
    packages["torch"] = "2"
    versions.append(results.code_version())
    assert len(set(versions)) == len(versions)
    # What reads, draws and tells figures does not change them.
    (tmp_path / "benchmarks/systems/write.py").write_text("1")
    assert results.code_version() == versions[-1]


def test_lines_of_sources_that_changed_are_of_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "code_version", lambda: "b")
    assert results.mark_changed([{"code": "b"}], {"code": "b"}) == [{"code": "b"}]
    (line,) = results.mark_changed([{"code": "a"}], {"code": "a"})
    assert "changed" in line["code"]


@pytest.mark.parametrize(("warmup", "num_epochs", "turn"), [(2, 5, 5), (0, 4, 1)])
def test_turns_are_as_long_as_epochs_of_the_plan_that_stays_allow(
    warmup: int, num_epochs: int, turn: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settled once the fourth epoch has begun, the first of the plan that stays, which makes what is kept."""
    seconds = iter((0.01, 0.01, 0.01, 0.4, 0.1, 0.1))
    done: list[float] = []

    class FakeTeam:
        def start(self) -> None: ...

        def ask(self, order: str, **arguments: Any) -> list[Any]:
            if order == "epochs":
                done.append(next(seconds))
                return [[{"elapsed_s": done[-1]}], [{"elapsed_s": 0.001}]]
            return [{}, {}] if order != "is_settled" else [len(done) >= 4, True]

    monkeypatch.setattr(measure.gate, "merge", lambda samples: {})
    monkeypatch.setattr(measure.gate, "compare", lambda *samples: {})
    reference = tmp_path / "reference.json"
    reference.write_text("{}")
    bench = SimpleNamespace(settings=Settings(warmup=warmup))
    entry = measure._Entry(system="hybrid", unit=("hybrid",), team=FakeTeam())  # type: ignore[arg-type]
    measure.Bench._prepare(bench, entry, reference)  # type: ignore[arg-type]
    assert len(done) == entry.warmup == num_epochs
    assert entry.turn == turn


@pytest.mark.parametrize("starts", [1, pytest.param(2, marks=pytest.mark.slow)])  # figures of several: above
def test_tiny_grid_end_to_end_and_again(
    starts: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "code_version", lambda: "of this test")  # whoever edits sources meanwhile
    words = "--json --graph powerlaw --scale 0.01 --model sage --layers 2 --hidden 128 --ranks 2 --network loopback"
    file = tmp_path / "results.jsonl"
    systems = ("--system", "hybrid", "--system", "depcomm", "--system", "sar")
    places = (
        "--results",
        str(file),
        "--cache",
        str(tmp_path / "cache"),
        "--rounds",
        "1",
        "--starts",
        str(starts),
        "--peers",
        str(tmp_path),
    )
    arguments = [*words.split(), *systems, *places]
    main(arguments)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    (cell,) = result["cells"]
    assert cell["cell"] == "powerlaw@0.01/sage-2x128/2/loopback"
    assert cell["failed"] == {}
    assert cell["unavailable"] == ["sar"]
    assert cell["seconds"]["hybrid"] > 0
    assert result["vs_sar_median"] is None
    own, other = (next(line for line in read_lines(file) if line["variant"] == name) for name in ("hybrid", "depcomm"))
    assert own["starts"][0]["in_processes_of"] == ["hybrid", "depcomm"]
    assert other["gate"] == pytest.approx(own["gate"], abs=1e-4)
    assert other["starts"][0]["plan"] == "depcomm"
    assert other["sent_bytes"] > 0
    assert own["gate"]["is_comparable"]
    assert own["gate"]["losses"] == 3
    assert own["gate"]["vertices"] > 50
    assert own["gate"]["gradient_error"] < gate.GRADIENT_TOLERANCE
    assert own["iters"] >= 2
    assert len(own["starts"]) == starts
    assert min(s["p50"] for s in own["starts"]) <= own["p50"] <= max(s["p50"] for s in own["starts"])
    assert own["wire_bytes"] is not None
    assert len(own["peak_rss_bytes"]) == 2
    content = file.read_bytes()
    main(arguments)  # knows it again, and measures nothing
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["cells"] == result["cells"]
    assert file.read_bytes() == content


def test_plain_dgl_counts_by_its_faster_way(lines: list[dict[str, Any]]) -> None:
    lines.append(make_line(ONE_GAT, "dgl_blocks", 2.5))
    result = summarise(lines, {})
    assert result["vs_dgl_one_rank_gat_median"] == pytest.approx(2.5)


def test_a_run_shows_what_was_measured_on_its_own_machine(lines: list[dict[str, Any]], tmp_path: Path) -> None:
    """Cells of the file that came with the sources were shown as the user's, also those that were skipped."""
    of_another = [line | {"machine": MACHINE | {"processor": "another"}} for line in lines]
    own = [make_line(TWO, system, 1.0, run="own") for system in systems_of(TWO)]
    file = tmp_path / "results.jsonl"
    append_lines(file, of_another + own)
    about = {"code": "code1", "machine": MACHINE}
    bench = Bench(settings=Settings(rounds=5), cache=tmp_path, peers=None, rates={}, about=about)  # type: ignore[arg-type]
    args = run.parse(["--hours", "0"])
    with tqdm(disable=True) as bar:
        found, skipped = run.measure_cells(bench, [TWO, ONE_GAT], args, file, bar)
    assert {(line["cell"], line["run"]) for line in found} == {(TWO.key, "own")}
    assert list(skipped) == [ONE_GAT.key]


def test_what_is_shown_is_the_run_of_what_was_asked_for(lines: list[dict[str, Any]], tmp_path: Path) -> None:
    """A later run of one system emptied the cell, though it was not measured again."""
    file = tmp_path / "results.jsonl"
    whole = [make_line(TWO, system, 1.0, run="whole") for system in systems_of(TWO)]
    append_lines(file, [*whole, make_line(TWO, "hybrid", 2.0, run="a part")])
    about = {"code": "code1", "machine": MACHINE}
    bench = Bench(settings=Settings(rounds=5), cache=tmp_path, peers=None, rates={}, about=about)  # type: ignore[arg-type]
    before = file.read_bytes()
    with tqdm(disable=True) as bar:
        found, skipped = run.measure_cells(bench, [TWO], run.parse([]), file, bar)
        assert ({line["run"] for line in found}, skipped) == ({"whole"}, {})
        # A system that is not there is no measurement.
        found, skipped = run.measure_cells(bench, [TWO], run.parse(["--system", "sar"]), file, bar)
    assert found == []
    assert "SAR" in skipped[TWO.key]
    assert file.read_bytes() == before


def test_ratios_to_systems_that_had_their_turns_elsewhere_are_marked(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        beside = ["hybrid", "depcache"] if line["variant"] == "distdgl_full" else ["sar", "sar_mfg"]
        line["starts"] = [{"p50": line["p50"], "in_turns_with": beside}]
    cell = cell_summary(newest(lines)[TWO.key])
    assert cell["not_in_turns"] == ["vs_sar", "vs_pipegcn"]
    (row,) = cell_rows([cell])
    told = dict(zip(CELL_HEAD, row, strict=True))
    assert (told["sar"], told["pipegcn"], told["distdgl_full"]) == ("4.00†", "3.00†", "20.00")


def test_tables_say_all_allocator_settings_there_were(lines: list[dict[str, Any]]) -> None:
    pages = [line | {"allocator_variables": {"MALLOC_MMAP_MAX_": "0", "PAGES": "1"}} for line in lines[-1:]]
    told = report(lines[:-1] + pages)
    assert "`MALLOC_MMAP_MAX_=0` or `MALLOC_MMAP_MAX_=0 PAGES=1`" in told


def test_pictures_are_of_what_was_measured(lines: list[dict[str, Any]], tmp_path: Path) -> None:
    """A graph of which there are failures alone has none, and the others have theirs."""
    failed = make_line(replace(TWO, graph="reddit"), "sar", None, status="unavailable", error="no checkout")
    names = {file.name for file in draw_all([*lines, failed], tmp_path)}
    assert any(name.startswith("epoch_products") for name in names)
    assert not any(name.startswith("epoch_reddit") for name in names)


def test_commits_of_the_peers_are_told(tmp_path: Path) -> None:
    assert peer_versions(None) == {}
    assert peer_versions(tmp_path / "none") == {}
    (tmp_path / "SAR").mkdir()
    subprocess.run(["git", "init", "-q", str(tmp_path / "SAR")], check=True)
    name = ("-c", "user.name=n", "-c", "user.email=e")
    words = ["git", "-C", str(tmp_path / "SAR"), *name, "commit", "-q", "--allow-empty", "-m", "m"]
    subprocess.run(words, check=True)
    assert re.fullmatch("[0-9a-f]{7,}", peer_versions(tmp_path)["SAR"])


def test_every_system_gives_back_what_loading_has_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours alone did, so peaks of the others held what they had freed."""
    trimmed: list[int] = []

    class Library:
        def __init__(self, name: None) -> None:
            pass

        def malloc_trim(self, pad: int) -> None:
            trimmed.append(pad)

    monkeypatch.setattr(base.ctypes, "CDLL", Library)
    base.System.give_back_memory(object())  # type: ignore[arg-type]
    assert trimmed == [0]
    own = {cls for module in (distdgl, ours, plain_dgl) for cls in vars(module).values() if isinstance(cls, type)}
    assert [cls.__name__ for cls in own - {base.System} if "give_back_memory" in vars(cls)] == ["Ours"]


# -------------------------------------------------------------------- strategies in the same processes


class FakeTeam:
    """Answers for two ranks; dies when its strategy `dying` comes."""

    made: ClassVar[list[FakeTeam]] = []
    working: ClassVar[int] = 12
    dying: ClassVar[dict[str, int]] = {}
    """Systems whose processes end when they first train -> how many of their teams."""

    def __init__(self, *, job: Any, **options: Any) -> None:
        self.job, self.system, self.orders, self.current = job, job.system, [], ""
        self.has_ended = False
        FakeTeam.made.append(self)

    @staticmethod
    def memory() -> Any:
        """Of 100 bytes a team takes `working` while it trains, and 5 once it has given back what is free."""
        teams = [team for team in FakeTeam.made if not team.has_ended and "check" in team.orders]
        taken = sum(
            FakeTeam.working if team.orders[-1] in ("check", "epochs", "is_settled", "facts") else 5 for team in teams
        )
        return SimpleNamespace(total=100, available=100 - taken)

    def start(self) -> None:
        self.orders.append("start")

    def end(self) -> None:
        self.has_ended = True

    def ask(self, order: str, *, timeout_s: float, **arguments: Any) -> list[Any]:
        assert not self.has_ended
        self.orders.append(arguments.get("name", order))
        if order == "epochs" and FakeTeam.dying.get(self.system, 0) > 0:
            FakeTeam.dying[self.system] -= 1
            raise SystemFailure("rank 1 of 2 died", has_died=True)
        if order == "become":
            if arguments["name"] == "depcache":
                raise SystemFailure("rank 1 of 2 died")
            was, self.current = self.current, arguments["name"]
            return [was != self.current] * 2
        answers: dict[str, list[Any]] = {
            "is_settled": [True, True],
            "epochs": [[{"elapsed_s": 1.0}] * arguments.get("count", 1)] * 2,
            "peak": [1000 - len(self.orders), 7],
        }
        return answers.get(order, [{}, {}])


@pytest.fixture
def fake_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    FakeTeam.made = []
    monkeypatch.setattr(measure, "Team", FakeTeam)
    monkeypatch.setattr(measure.psutil, "virtual_memory", FakeTeam.memory)
    monkeypatch.setattr(measure.gate, "merge", lambda samples: {})
    monkeypatch.setattr(measure.gate, "compare", lambda *samples: {})
    monkeypatch.setattr(Bench, "_reference_file", lambda *of: tmp_path / "reference.json")
    monkeypatch.setattr(Bench, "_line", lambda self, cell, graph, run, system: {"variant": system})
    monkeypatch.setattr(
        Bench, "_result", lambda self, cell, graph, starts: {"starts": starts, "failed": starts[0].failure is not None}
    )
    (tmp_path / "reference.json").write_text("{}")
    monkeypatch.setattr(Bench, "job", lambda self, cell, graph, system, **of: SimpleNamespace(system=system, **of))
    settings = Settings(rounds=2, starts=2, warmup=0)
    return Bench(
        settings=settings, cache=tmp_path, peers=None, rates=cast(Any, None), about={}, on_phase=lambda phase: None
    )


def test_every_strategy_comes_after_a_system_of_others_once() -> None:
    unit = ("hybrid", "depcache", "depcomm", "neutronstar")
    team = cast(Any, None)
    entries = [measure._Entry(system=name, team=team, unit=unit) for name in unit]
    entries += [measure._Entry(system=name, team=team, unit=(name,)) for name in ("dgl", "sar")]
    orders = [[entry.system for entry in measure.order_of_turns(entries, number)] for number in range(-1, 5)]
    assert all(sorted(order) == sorted([*unit, "dgl", "sar"]) for order in orders)
    assert all(set(order[:4]) == set(unit) for order in orders)
    assert [order[0] for order in orders[1:]] == ["hybrid", "depcache", "depcomm", "neutronstar", "hybrid"]
    after = {(order[place], order[place + 1]) for order in orders for place in range(5)}
    assert {("hybrid", "depcache"), ("depcache", "hybrid"), ("dgl", "sar"), ("sar", "dgl")} <= after


def test_as_many_wait_as_there_is_room_for_while_they_train(fake_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asleep three take 15 of 100 bytes, 40 of which are to stay free; at work each takes 20."""
    monkeypatch.setattr(FakeTeam, "working", 20)
    lines = fake_bench.measure(TWO, cast(Any, None), ("dgl", "dgl_blocks", "dgl_one_thread"))
    assert [line["failed"] for line in lines] == [False] * 3
    together = [line["starts"][0].together for line in lines]
    assert together == [["dgl", "dgl_blocks"], ["dgl", "dgl_blocks"], ["dgl_one_thread"]]


def test_ours_are_started_together() -> None:
    assert measure.units_of(["hybrid", "depcomm", "dgl", "sar"]) == [("hybrid", "depcomm"), ("dgl",), ("sar",)]
    assert measure.units_of(["dgl"]) == [("dgl",)]
    assert measure.units_of(["dgl", "hybrid"]) == [("hybrid",), ("dgl",)]


def test_strategies_take_turns_in_the_same_processes(fake_bench: Bench) -> None:
    lines = fake_bench.measure(TWO, cast(Any, None), ("hybrid", "depcomm", "dgl"))
    assert [line["failed"] for line in lines] == [False] * 3
    assert [team.system for team in FakeTeam.made] == ["ours_in_turns", "dgl", "ours_in_turns"]
    hybrid = lines[0]["starts"][0]
    assert hybrid.together == ["hybrid", "depcomm", "dgl"]
    assert len(hybrid.epochs) == 2  # the turn before the first is not counted
    asked = FakeTeam.made[0].orders
    assert asked[:3] == ["start", "prepare", "hybrid"]
    assert asked.count("prepare") == asked.count("start") == 1
    # Prepared one after another; each turn of another one begins with what is not timed.
    turns = asked[asked.index("depcomm") + 1 :]
    (first, *_) = (number for number, order in enumerate(turns) if order == "hybrid")
    # Its first stay is checked again: trials may have chosen another plan since.
    assert turns[first : first + 6] == ["hybrid", "check", "forget_peak", "epochs", "epochs", "peak"]
    stays = " ".join(turns[first + 1 :])
    assert "hybrid epochs forget_peak epochs epochs peak" in stays
    assert "hybrid epochs epochs peak" in stays, "where it was the last one, too, it goes on"
    # All have one epoch in each turn that is not counted, beside those of the turn.
    assert FakeTeam.made[1].orders[-3:] == ["epochs", "epochs", "peak"]
    # The most that either rank held in any turn, which here is the first.
    number_of_peaks = [number for number, order in enumerate(asked, 1) if order == "peak"]
    assert hybrid.peak_bytes[1] == 7
    assert 1000 - hybrid.peak_bytes[0] in number_of_peaks[:2]


def test_what_a_strategy_breaks_is_started_again_without_it(fake_bench: Bench) -> None:
    """Where everything cached does not fit, the others are measured nevertheless."""
    lines = fake_bench.measure(TWO, cast(Any, None), ("hybrid", "depcache", "depcomm", "neutronstar"))
    assert {line["variant"]: line["failed"] for line in lines} == {
        "hybrid": False,
        "depcache": True,
        "depcomm": False,
        "neutronstar": False,
    }
    assert all(len(start.epochs) == 2 for line in lines if not line["failed"] for start in line["starts"])
    # Who has failed is not tried again.
    assert [len(line["starts"]) for line in lines] == [2, 1, 2, 2]
    assert sum("depcache" in team.orders for team in FakeTeam.made) == 1
    assert all(team.has_ended for team in FakeTeam.made)
    again = lines[0]["starts"][0]
    assert again.unit == ("hybrid", "depcomm", "neutronstar")


@pytest.mark.parametrize("deaths", [1, 2, 3])
def test_what_died_beside_others_is_tried_alone(fake_bench: Bench, deaths: int) -> None:
    """Those may have taken the memory that it was ended for; then DistDGL is tried by smaller batches alone."""
    FakeTeam.dying = {"distdgl_full": deaths}
    try:
        lines = fake_bench.measure(ONE_SAGE, cast(Any, None), ("hybrid", "dgl", "distdgl_full"))
    finally:
        FakeTeam.dying = {}
    assert {line["variant"]: line["failed"] for line in lines} == {
        "hybrid": False,
        "dgl": False,
        "distdgl_full": deaths == 3,
    }
    tries = ["distdgl_full"] * min(1 + deaths, 3)
    teams = [team.system for team in FakeTeam.made]
    assert teams == ["hybrid", "dgl", *tries, "hybrid"]
    options = [team.job.options for team in FakeTeam.made if team.system == "distdgl_full"]
    assert options == [{}, {}, {"skips_largest": True}][: len(tries)]
    assert all(team.has_ended for team in FakeTeam.made)
    (last,) = lines[2]["starts"]
    assert last.together == ([] if deaths == 3 else ["distdgl_full"])


def test_other_systems_that_die_alone_have_no_smaller_batches(fake_bench: Bench) -> None:
    FakeTeam.dying = {"dgl_blocks": 3}
    try:
        lines = fake_bench.measure(TWO, cast(Any, None), ("dgl", "dgl_blocks"))
    finally:
        FakeTeam.dying = {}
    assert [line["failed"] for line in lines] == [False, True]
    assert [team.system for team in FakeTeam.made] == ["dgl", "dgl_blocks", "dgl_blocks"]


def test_results_of_a_plan_that_trials_have_chosen_are_checked(
    fake_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[int] = []

    def compare(*samples: Any) -> dict[str, Any]:
        checks.append(1)
        if len(checks) == 4:  # after one of each system
            raise gate.GateError("losses differ")
        return {}

    monkeypatch.setattr(measure.gate, "compare", compare)
    lines = fake_bench.measure(TWO, cast(Any, None), ("hybrid", "depcomm", "dgl"))
    assert [line["failed"] for line in lines].count(True) == 1


def test_plain_dgl_has_as_many_threads_as_there_are_ranks(tmp_path: Path) -> None:
    bench = measure.Bench(settings=Settings(), cache=tmp_path, peers=None, rates=cast(Any, None), about={})
    graph = SimpleNamespace(part_config="g.json", data={}, num_nodes=9, feat_dim=4, num_classes=2, num_train=3)
    threads = {system: bench.job(TWO, cast(Any, graph), system).threads for system in systems_of(TWO)}
    assert {name: count for name, count in threads.items() if count > 1} == {"dgl": 2, "dgl_blocks": 2}
    assert threads["dgl_one_thread"] == threads["hybrid"] == 1


# -------------------------------------------------------------------- memory


def test_memory_counts_where_all_systems_gave_back_theirs(lines: list[dict[str, Any]]) -> None:
    trimmed = [line | {"memory": "trimmed", "run": "run2"} for line in lines]
    result = summarise(lines + trimmed, {})
    assert [(one["cell"], one["ratio"]) for one in result["more"]["memory"]] == [(TWO.key, 1.5)]
    assert result["more"]["memory_vs_sar_max"] == result["more"]["memory_vs_sar_median"] == 1.5


def test_a_run_of_memory_alone_says_nothing_of_epochs(lines: list[dict[str, Any]]) -> None:
    of_memory = [
        make_line(TWO, system, 100.0, metric="peak_memory", run="run2", peak_rss_bytes=[size, 1])
        for system, size in (("hybrid", 30), ("sar", 60))
    ]
    before, result = summarise(lines, {}), summarise(lines + of_memory, {})
    assert result["cells"] == before["cells"]
    (memory,) = result["more"]["memory"]
    assert (memory["hybrid_bytes"], memory["sar_bytes"], memory["ratio"]) == (30, 60, 0.5)
    # Even if epochs were measured later, by systems that had given back their memory.
    trimmed = [line | {"memory": "trimmed", "run": "run3"} for line in lines]
    more = summarise(lines + of_memory + trimmed, {})["more"]
    (memory, *_) = more["memory"]
    assert (memory["cell"], memory["hybrid_bytes"], memory["sar_bytes"]) == (TWO.key, 30, 60)
    # The other figure stands beside it.
    assert (memory["measured"], memory["ratio_with_epochs"]) == ("alone", 1.5)
    assert (more["memory_vs_sar_max"], more["memory_vs_sar_with_epochs_max"]) == (0.5, 1.5)
    assert "| 0.50 | alone | *1.50* |" in report(lines + of_memory + trimmed)
    (memory, *_) = summarise(lines + trimmed, {})["more"]["memory"]
    assert (memory["measured"], memory["ratio"], memory["ratio_with_epochs"]) == ("with epochs", 1.5, 1.5)
    words = report(lines + of_memory)
    assert "Peak memory beside SAR" in words
    assert "Nothing has been measured" not in report(of_memory)
    assert "| 0.50 | alone |" in report(of_memory)
    assert "Peak memory beside SAR" not in report(lines)
    done = {"metric": "peak_memory", "machine": MACHINE}
    assert measured_run(of_memory, TWO.key, ("hybrid", "sar"), "code1", SETTINGS, **done)
    assert not measured_run(of_memory, TWO.key, ("hybrid", "sar"), "code1", SETTINGS, machine=MACHINE)
    assert not measured_run(lines, TWO.key, ("hybrid",), "code1", SETTINGS, **done)


def test_memory_is_asked_for_of_hybrid_and_sar_in_one_turn() -> None:
    args = parse(["--memory", "--graph", "products"])
    assert settings_of(args) == Settings(starts=1, rounds=1)
    assert settings_of(parse(["--memory", "--rounds", "3"])) == Settings(starts=1, rounds=3)


def test_memory_is_held_against_the_leanest_mode(lines: list[dict[str, Any]]) -> None:
    """Which mode is the fastest, one turn does not tell."""
    of_memory = [
        make_line(TWO, system, seconds, metric="peak_memory", run="run2", peak_rss_bytes=[size, 1])
        for system, seconds, size in (("hybrid", 1.0, 30), ("sar", 2.0, 60), ("sar_mfg", 3.0, 40))
    ]
    (memory,) = summarise(lines + of_memory, {})["more"]["memory"]
    assert (memory["sar_bytes"], memory["ratio"]) == (40, 0.75)


def test_one_pure_plan_is_not_known_to_be_the_better(lines: list[dict[str, Any]]) -> None:
    systems = newest(lines)[TWO.key]
    assert cell_summary(systems)["vs_best_pure"] is not None
    assert cell_summary({k: v for k, v in systems.items() if k != "depcomm"})["vs_best_pure"] is None


def test_a_strategy_goes_on_with_the_plan_that_it_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned and tried anew in every turn, hybrid would be timed amid its trials."""
    monkeypatch.setattr(ours, "create_communicator", lambda transport: "communicator")
    monkeypatch.setattr(ours, "_digest", lambda plan: f"digest of {plan}")
    system = ours.OursInTurns(cast(Any, SimpleNamespace(options={})))
    begun: list[tuple[str, str | None]] = []
    sizes = [3, 2]

    def begin(communicator: str, plan: str | None = None) -> dict[str, Any]:
        begun.append((system._strategy, plan))
        found = SimpleNamespace(
            plan=SimpleNamespace(strategy=f"plan of {system._strategy}"), predicted_epoch_s=float(len(begun))
        )
        system.loader = cast(
            Any, SimpleNamespace(outcome=found if plan is None else None, sets=SimpleNamespace(sizes=sizes))
        )
        system.g = system.model = system.wrapped = system.optimizer = system.clock = cast(Any, None)
        return system.facts()

    monkeypatch.setattr(system, "_begin", begin)
    system.prepare()
    assert [system.become(name) for name in ("hybrid", "hybrid", "depcomm", "hybrid")] == [True, False, True, True]
    first, second, third = begun
    assert (first, second) == (("hybrid", None), ("depcomm", None))
    assert third[0] == "hybrid"
    assert third[1].strategy == "plan of hybrid"  # type: ignore[union-attr]
    assert (system.facts()["plan"], system.facts()["predicted"]) == ("plan of hybrid", 1.0)
    system.become("depcomm")
    assert (system.facts()["plan"], system.facts()["predicted"]) == ("plan of depcomm", 2.0)
    sizes[0] = 4
    with pytest.raises(RuntimeError, match="hybrid held"):
        system.become("hybrid")
