# SPDX-License-Identifier: Apache-2.0
"""From measurements to ratios and to the final object."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from benchmarks.systems import results
from benchmarks.systems.results import (
    measured_run,
    newest,
)
from benchmarks.systems.summary import cell_summary, ratio_error, summarise
from benchmarks.systems.tables import CELL_HEAD, cell_rows
from benchmarks.systems.write import report
from tests.benchmarks.systems.measurements import (
    HEADLINE,
    MACHINE,
    ONE_GAT,
    ONE_SAGE,
    SETTINGS,
    SHAPED,
    TWO,
    make_line,
)


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


def test_plain_dgl_counts_by_its_faster_way(lines: list[dict[str, Any]]) -> None:
    lines.append(make_line(ONE_GAT, "dgl_blocks", 2.5))
    result = summarise(lines, {})
    assert result["vs_dgl_one_rank_gat_median"] == pytest.approx(2.5)


def test_ratios_to_systems_that_had_their_turns_elsewhere_are_marked(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        beside = ["hybrid", "depcache"] if line["variant"] == "distdgl_full" else ["sar", "sar_mfg"]
        line["starts"] = [{"p50": line["p50"], "in_turns_with": beside}]
    cell = cell_summary(newest(lines)[TWO.key])
    assert cell["not_in_turns"] == ["vs_sar", "vs_pipegcn"]
    (row,) = cell_rows([cell])
    told = dict(zip(CELL_HEAD, row, strict=True))
    assert (told["sar"], told["pipegcn"], told["distdgl_full"]) == ("4.00†", "3.00†", "20.00")


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
