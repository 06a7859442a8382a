# SPDX-License-Identifier: Apache-2.0
"""The halo store on running servers: what is still read from other machines, within which budget, and after writes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from dgl_hybrid.sampling.config import HaloConfig
from tests.helpers.distdgl import Topology, heterograph, homogeneous_graph, run_job, write_case

JOB = Path(__file__).with_name("store_job.py")
SERVED = HaloConfig(strategy="depcomm")
ONE_OF_EACH = Topology()


def run_phases(
    folder: Path,
    graph: Any,
    num_parts: int,
    *phases: str,
    plugin: HaloConfig | None = SERVED,
    topology: Topology = ONE_OF_EACH,
) -> list[dict[str, Any]]:
    """Returns every trainer's results."""
    case = write_case(graph, folder, num_parts)
    out = folder / "out"
    out.mkdir()
    run_job(
        case.part_config,
        JOB,
        "--truth",
        case.truth,
        "--out",
        out,
        "--phases",
        ",".join(phases),
        plugin=plugin,
        topology=topology,
    )
    results = [json.loads(path.read_text()) for path in sorted(out.glob("trainer_*.json"))]
    assert len(results) == num_parts * topology.num_trainers
    return results


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    phases = (
        "count_only",
        "unlimited",
        "budgets",
        "link_prediction",
        "seeds_first",
        "old_style",
        "says_nothing",
        "inference",
        "seeds_of_32_bits",
        "seeds_that_are_none",
        "switched_off",
        "writes",
    )
    return run_phases(tmp_path_factory.mktemp("store"), homogeneous_graph(400, 6), 3, *phases)


def test_counting_alone_holds_nothing(trainers: list[dict[str, Any]]) -> None:
    for results in trainers:
        for epoch in results["count_only"]:
            assert epoch["remote_rows"] > 200
            assert epoch["remote_sampling_requests"] > 0
            assert epoch["held_rows"] == epoch["held_seeds"] == epoch["fill_rows"] == epoch["held_bytes"] == 0


@pytest.mark.parametrize("phase", ["unlimited", "link_prediction", "seeds_first", "old_style", "inference"])
def test_without_a_limit_nothing_is_read_twice(trainers: list[dict[str, Any]], phase: str) -> None:
    """Node and edge loaders, samplers of scripts, inference: after the first epoch, nothing at all."""
    for results in trainers:
        first, *later = results[phase]
        assert first["fill_rows"] > 0
        for epoch in later:
            assert epoch["remote_rows"] == epoch["remote_sampling_requests"] == epoch["fill_rows"] == 0
            assert epoch["held_rows"] > 0
            assert phase == "inference" or epoch["held_seeds"] > 0, "inference draws from owned vertices alone"


def test_the_fill_itself_is_all_that_the_first_epoch_reads(trainers: list[dict[str, Any]]) -> None:
    for results in trainers:
        assert results["unlimited"][0]["remote_rows"] == 0
        assert results["unlimited"][0]["remote_sampling_requests"] == 0


def test_a_budget_holds(trainers: list[dict[str, Any]]) -> None:
    node_bytes = 400 * (12 * 4 + 3 * 8 + 8 + 4 * 4 + 2)
    limits = {"0": 0.0, "2KB": 2000.0, "10%": 0.1 * node_bytes, "40%": 0.4 * node_bytes}
    for results in trainers:
        everything = results["count_only"][-1]["remote_rows"]
        left = []
        for budget, limit in limits.items():
            last = results["budgets"][budget][-1]
            assert last["held_bytes"] <= limit, budget
            assert last["held_bytes"] >= 0.6 * limit, budget
            left.append(last["remote_rows"])
        assert left[0] > 0.75 * everything
        for more, less in itertools.pairwise(left):
            # Each budget's epoch draws neighbours of its own: differences of two counts deviate by sqrt(2 more).
            assert less <= more + 6 * more**0.5, left
        assert left[-1] < 0.75 * everything, "features and edge data are too much for two fifths of the features"


def test_a_script_that_says_nothing_is_learnt_from(trainers: list[dict[str, Any]]) -> None:
    for results in trainers:
        first, last = results["says_nothing"][0], results["says_nothing"][-1]
        assert first["remote_rows"] > 0
        assert last["remote_rows"] < 0.1 * first["remote_rows"]
        assert last["remote_seeds"] < 0.1 * first["remote_seeds"]


def test_what_was_read_is_what_the_graph_has(trainers: list[dict[str, Any]]) -> None:
    for results in trainers:
        assert results["says_nothing"][-1]["wrong"] == 0
        assert results["inference"][-1]["wrong"] == 0
        assert results["writes"]["wrong"] == 0


def test_writes_are_seen_on_every_machine(trainers: list[dict[str, Any]]) -> None:
    for results in trainers:
        assert results["writes"]["remote_rows_before"] == 0, "they were held before"
        assert results["writes"]["stale_after_push"] == 0
        assert results["writes"]["stale_after_direct_write"] == 0
        assert results["writes"]["remote_rows_of_the_unwritten"] == 0, "other fields stay held"


def test_who_is_switched_off_writes_into_nobodys_held_rows(trainers: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(trainers):
        seen = results["switched_off"]
        assert seen["first"][0] > 0, "rows were held"
        assert [stale for _, stale in seen.values()] == [0, 0, 0, 0, 0]
        assert [held for held, _ in (seen["off, 5.0"], seen["off, 0.0"])] == [0, 0], "by nobody"
        assert rank == 0 or seen["on again"][0] > 0, "rank 0 began anew, with nothing planned"


def test_seeds_of_32_bits_are_drawn_for(trainers: list[dict[str, Any]]) -> None:
    for results in trainers:
        first, *others = results["seeds_of_32_bits"]["drawn"].values()
        assert len(first) > 0
        assert all(drawn == first for drawn in others)
        assert results["seeds_of_32_bits"]["held_seeds"] >= 20


def test_ids_that_are_no_vertices_are_left_to_dgl(trainers: list[dict[str, Any]]) -> None:
    """Not taken for vertices from the end, as an index of a tensor would be, and no error of ours."""
    for results in trainers:
        told = results["seeds_that_are_none"]
        assert told["held_bytes"] > 0
        assert len(told["of_own"]) > 0
        assert len(told["drawn"]) >= 4
        assert all(drawn == told["of_own"] for drawn in told["drawn"].values())


def test_a_field_that_takes_the_name_of_a_deleted_one_is_read_from_its_owners(trainers: list[dict[str, Any]]) -> None:
    for results in trainers:
        assert results["writes"]["held_before_it_was_deleted"] > 0
        assert results["writes"]["stale_after_deletion"] == 0


@pytest.mark.slow  # the conformance suite has one by default
def test_a_heterograph(tmp_path: Path) -> None:
    for results in run_phases(tmp_path, heterograph(), 2, "heterograph"):
        first, *later = results["heterograph"]
        assert first["fill_rows"] > 0
        for epoch in later:
            assert epoch["remote_rows"] == epoch["remote_sampling_requests"] == epoch["fill_rows"] == 0
            assert epoch["held_rows"] > 0
            assert epoch["held_seeds"] > 0
            assert epoch["wrong"] == 0


@pytest.mark.slow  # sampler processes of two loaders, below, show by default that they draw from what is held
def test_sampler_processes_draw_from_what_their_trainer_holds(tmp_path: Path) -> None:
    topology = Topology(num_samplers=1)
    for results in run_phases(tmp_path, homogeneous_graph(400, 6), 2, "sampler_processes", topology=topology):
        *_, last = results["sampler_processes"]["trainer"]
        assert last["remote_rows"] == 0
        assert last["held_rows"] > 0
        assert last["wrong"] == 0
        sampler = results["sampler_processes"]["sampler"]
        assert sampler["held_seeds"] > 0
        assert sampler["remote_sampling_requests"] == sampler["fill_seeds"] == 0


@pytest.fixture(scope="module")
def with_samplers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    phases = ("sampler_processes_of_two_loaders", "sampler_processes_say_nothing")
    folder = tmp_path_factory.mktemp("samplers")
    return run_phases(folder, homogeneous_graph(400, 6), 2, *phases, topology=Topology(num_samplers=1))


def test_sampler_processes_get_the_lists_of_later_loaders(with_samplers: list[dict[str, Any]]) -> None:
    for results in with_samplers:
        sampler = results["sampler_processes_of_two_loaders"]
        assert sampler["held_seeds"] > 0
        assert sampler["remote_sampling_requests"] == sampler["fill_seeds"] == 0


def test_a_trainer_whose_samplers_say_nothing_learns_from_its_reads(with_samplers: list[dict[str, Any]]) -> None:
    for results in with_samplers:
        first, *_, last = results["sampler_processes_say_nothing"]
        assert first["remote_rows"] > 0
        assert last["remote_rows"] < 0.1 * first["remote_rows"]
        assert last["held_rows"] > 0
        assert last["wrong"] == 0


@pytest.mark.slow  # one machine of two without it is the harder case, below
def test_servers_without_the_plugin_cannot_tell_of_writes(tmp_path: Path) -> None:
    for results in run_phases(tmp_path, homogeneous_graph(400, 6), 2, "unserved", plugin=None):
        first, *_, last = results["unserved"]["epochs"]
        assert first["fill_rows"] == last["held_rows"] == 0, "rows are not held"
        assert last["remote_rows"] > 0
        assert last["held_seeds"] > 0, "the structure does not change, so lists are"
        assert last["wrong"] == 0
        assert "dgl_hybrid.enable() must come before dgl.distributed.initialize()" in results["unserved"]["error"]


def test_where_one_machine_has_no_plugin_nobody_holds_rows(tmp_path: Path) -> None:
    """Its trainer announces nothing, and its server would end at what ours announce."""
    on, off = run_phases(tmp_path, homogeneous_graph(400, 6), 2, "partly_served", plugin=None)
    on, off = on["partly_served"], off["partly_served"]
    assert (on["is_on"], on["machine"], off["is_on"], off["machine"]) == (True, 0, False, 1)
    assert on["counts"]["held_rows"] == on["counts"]["fill_rows"] == 0
    assert on["counts"]["held_seeds"] > 0, "the structure does not change, so lists are held"
    for trainer in (on, off):
        assert trainer["stale after 0"] == trainer["stale after 1"] == 0
    (warning,) = on["warnings"]
    assert "the server of machine 1 (" in warning
    assert "rows will not" in warning
