# SPDX-License-Identifier: Apache-2.0
"""Plans are checked, saved whole or not at all, and refused when damaged or made for something else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dgl_hybrid.errors import PlanError
from dgl_hybrid.planner import (
    DependencyPlan,
    PlannerConfig,
    check_plan,
    load_plan,
    make_plan,
    plan_objective,
    random_plan,
    save_plan,
    synthetic_trace,
    uniform_topology,
)
from dgl_hybrid.planner.plan import choice_from_plan
from dgl_hybrid.planner.plan_files import _record_digest

from .problems import make_problem, random_costs, random_problem

PROBLEM = random_problem(0, num_layers=3, num_halo=40, world_size=3)
COSTS = random_costs(0, num_layers=3, world_size=3, whole=False)


def saved_plan(directory: Path) -> DependencyPlan:
    plan = dataclasses.replace(
        make_plan(PROBLEM, COSTS, PlannerConfig()),
        trace=synthetic_trace([8, 16, 16, 4]),
        topology=uniform_topology(3),
        partition_fingerprint="abc",
    )
    save_plan(plan, directory)
    return plan


def test_saved_plan_loads_equal(tmp_path: Path) -> None:
    plan = saved_plan(tmp_path)
    again = load_plan(tmp_path, PROBLEM.rank, world_size=3, num_layers=3, partition_fingerprint="abc")
    for field in dataclasses.fields(plan):
        if field.name != "cached":
            assert getattr(plan, field.name) == getattr(again, field.name), field.name
    assert all(torch.equal(a, b) for a, b in zip(plan.cached, again.cached, strict=True))
    assert sum(again.num_cached) > 0
    check_plan(PROBLEM, again)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"plan_rank{plan.rank}.json",
        f"plan_rank{plan.rank}.safetensors",
    ]


def test_files_of_before_load(tmp_path: Path) -> None:
    """They held, for each rank, how long every owner's link is taken."""
    plan = saved_plan(tmp_path)
    json_path = tmp_path / f"plan_rank{plan.rank}.json"
    record = json.loads(json_path.read_bytes())
    record["estimate"]["ranks"][0]["wire_s"] = [[[0.5, 0.5]] * 3] * 3
    del record["record_sha256"]
    record["record_sha256"] = _record_digest(record)
    json_path.write_text(json.dumps(record))
    assert load_plan(tmp_path, plan.rank).estimate == plan.estimate


OTHER_VALUES: list[object] = [
    None,
    True,
    -1,
    0,
    10**30,
    0.5,
    "",
    "hybris",
    [],
    [1, "a"],
    [-1],
    {},
    {"ranks": [[]]},
    {"ranks": 3},
]


def test_a_record_that_was_made_by_hand_loads_or_is_refused(tmp_path: Path) -> None:
    """Its checksum is right: who can write files can make one."""
    plan = saved_plan(tmp_path)
    json_path = tmp_path / f"plan_rank{plan.rank}.json"
    record = json.loads(json_path.read_bytes())
    del record["record_sha256"]
    needed = set(record) - {"chunk_rows", "made_for", "trace_digest", "topology_digest", "num_cached"}
    refused = []
    for key in record:
        for forged in [{name: value for name, value in record.items() if name != key}] + [
            {**record, key: value} for value in OTHER_VALUES
        ]:
            json_path.write_text(json.dumps({**forged, "record_sha256": _record_digest(forged)}))
            if is_refused(tmp_path, plan.rank) and key not in forged:
                refused.append(key)
    assert set(refused) == needed
    assert record["trace"] is not None
    forged = {**record, "trace": {**record["trace"], "num_parameters": float("inf")}}
    json_path.write_text(json.dumps({**forged, "record_sha256": _record_digest(forged)}))
    assert is_refused(tmp_path, plan.rank)


def is_refused(directory: Path, rank: int) -> bool:
    try:
        load_plan(directory, rank)
    except PlanError:
        return True
    return False


@pytest.mark.parametrize(
    ("expected", "match"),
    [
        ({"world_size": 4}, r"made for world_size 3 \(expected 4\)"),
        ({"num_layers": 2}, r"made for num_layers 3 \(expected 2\)"),
        ({"partition_fingerprint": "xyz"}, r"made for partition_fingerprint abc \(expected xyz\)"),
    ],
)
def test_plan_for_something_else_is_refused(tmp_path: Path, expected: dict[str, object], match: str) -> None:
    saved_plan(tmp_path)
    with pytest.raises(PlanError, match=match):
        load_plan(tmp_path, PROBLEM.rank, **expected)  # type: ignore[arg-type]


def test_missing_plan_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no plan for rank 0: .*plan_rank0.json is missing; make one with"):
        load_plan(tmp_path, 0)


def test_damage_is_seen(tmp_path: Path) -> None:
    plan = saved_plan(tmp_path)
    json_path = tmp_path / f"plan_rank{plan.rank}.json"
    ids_path = tmp_path / f"plan_rank{plan.rank}.safetensors"
    record, blob = json_path.read_bytes(), ids_path.read_bytes()

    def load() -> None:
        load_plan(tmp_path, plan.rank)

    ids_path.write_bytes(blob[:-8])
    with pytest.raises(PlanError, match=r"safetensors is damaged: it does not match the checksum"):
        load()
    ids_path.write_bytes(blob[:-1] + bytes([blob[-1] ^ 1]))
    with pytest.raises(PlanError, match=r"safetensors is damaged: it does not match the checksum"):
        load()
    ids_path.write_bytes(blob)
    json_path.write_bytes(record[: len(record) // 2])
    with pytest.raises(PlanError, match=r"json is damaged"):
        load()
    json_path.write_bytes(record.replace(b'"strategy": "hybrid"', b'"strategy": "hybris"'))
    with pytest.raises(PlanError, match=r"json is damaged: its checksum does not match"):
        load()
    json_path.write_text(json.dumps({**json.loads(record), "format_version": 99}))
    with pytest.raises(PlanError, match=r"must have format version 1 \(got 99\)"):
        load()
    json_path.write_bytes(record)
    (tmp_path / "plan_rank7.json").write_bytes(record)
    (tmp_path / "plan_rank7.safetensors").write_bytes(blob)
    with pytest.raises(PlanError, match=r"was made for rank \d \(expected 7\)"):
        load_plan(tmp_path, 7)
    load()


@pytest.mark.parametrize("strategy", ["depcache", "ratio", "neutronstar"])
def test_inputs_that_owners_aggregate_are_cached_by_no_plan(strategy: str) -> None:
    """Plans said that they held them, and tables that nothing of layer 1 is received; they are, once."""
    config = PlannerConfig(strategy=strategy, cache_ratio=0.5)  # type: ignore[arg-type]
    num_held = 0
    for seed in range(10):
        problem = random_problem(seed, num_layers=2, num_halo=30, world_size=3)
        costs = random_costs(seed, num_layers=2, world_size=3)
        for is_free in (False, True):
            plan = make_plan(dataclasses.replace(problem, inputs_are_free=is_free), costs, config)
            if is_free:
                assert torch.equal(plan.cached[0], plan.cached[1])
                received = problem.demand[0] & ~torch.from_numpy(choice_from_plan(problem, plan.cached)[0])
                assert plan.communicated[0] == int(received.sum())
            else:
                num_held += len(plan.cached[0]) - len(plan.cached[1])
    assert num_held > 0, "where they are not handed out"


def test_plans_that_cannot_be_applied() -> None:
    demand = np.ones((2, 3), dtype=bool)
    demand[1, 2] = False
    problem = make_problem(
        in_neighbours=[[1], [2], []],
        demand=demand,
        owner=[1, 1, 1],
        world_size=2,
        expandable=np.array([True, False, True]),
    )
    good = make_plan(problem, random_costs(0, num_layers=2, world_size=2), PlannerConfig(strategy="depcomm"))

    def check(match: str, **changes: object) -> None:
        with pytest.raises(PlanError, match=match):
            check_plan(problem, dataclasses.replace(good, **changes))  # type: ignore[arg-type]

    def ids(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64)

    check(r"the plan is for rank 1 of 2 \(expected rank 0 of 2\)", rank=1)
    check(r"has 1 layers, the model has 2", cached=(ids(),))
    check(r"ascending order, each once \(level 0\)", cached=(ids(103, 100), ids()))
    check(r"caches vertex 101 at level 0, which is no halo vertex", cached=(ids(101), ids()))
    check(r"level 1: 1 cached vertices are not cached at level 0", cached=(ids(), ids(100)))
    check(r"level 1: 1 cached vertices cannot be.* has unknown in-edges", cached=(ids(103), ids(103)))
    check(
        r"level 1: 1 cached vertices cannot be.* read by nothing that this rank computes or could compute",
        cached=(ids(106), ids(106)),
    )
    check(r"counts \(3, 1\) received rows, it implies \(3, 2\)", communicated=(3, 1))


def test_pure_ratio_and_random_plans() -> None:
    def make(strategy: str, ratio: float = 0.5) -> DependencyPlan:
        return make_plan(PROBLEM, COSTS, PlannerConfig(strategy=strategy, cache_ratio=ratio))

    depcomm, depcache = make("depcomm"), make("depcache")
    assert depcomm.num_cached == (0, 0, 0)
    assert depcomm.communicated == tuple(PROBLEM.demand.sum(dim=1).tolist())
    assert all(torch.equal(a, b) for a, b in zip(make("ratio", 0.0).cached, depcomm.cached, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(make("ratio", 1.0).cached, depcache.cached, strict=True))
    tops = [make("ratio", ratio).num_cached[2] for ratio in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert tops == sorted(tops)
    assert tops[0] < tops[2] < tops[4]
    first, again, other = (random_plan(PROBLEM, seed, 0.5) for seed in (1, 1, 2))
    check_plan(PROBLEM, first)
    assert all(torch.equal(a, b) for a, b in zip(first.cached, again.cached, strict=True))
    assert first.num_cached != other.num_cached
    full = random_plan(PROBLEM, 0, 1.0, COSTS)
    assert all(torch.equal(a, b) for a, b in zip(full.cached, depcache.cached, strict=True))
    assert full.objective_s == depcache.objective_s == plan_objective(PROBLEM, COSTS, full.cached)


@pytest.mark.parametrize("strategy", ["hybrid", "greedy", "neutronstar", "depcache", "depcomm", "ratio"])
def test_no_halo_at_all(strategy: str, tmp_path: Path) -> None:
    problem = make_problem(in_neighbours=[], demand=np.zeros((2, 0), dtype=bool), owner=[], world_size=1)
    plan = make_plan(problem, random_costs(0, num_layers=2, world_size=1), PlannerConfig(strategy=strategy))
    assert plan.num_cached == plan.communicated == (0, 0)
    with pytest.raises(PlanError, match=r"there is no plan to save \(got NoneType\): a loader has one from its second"):
        save_plan(None, tmp_path)  # type: ignore[arg-type]
    save_plan(plan, tmp_path)
    check_plan(problem, load_plan(tmp_path, 0))


def test_configuration_errors() -> None:
    with pytest.raises(ValueError, match=r"unknown strategy \(got 'magic'\); choose one of hybrid, greedy, "):
        PlannerConfig(strategy="magic")
    with pytest.raises(ValueError, match=r"cache_ratio must lie in 0..1 \(got 1.5\)"):
        PlannerConfig(cache_ratio=1.5)
    with pytest.raises(TypeError, match=r"memory_budget_bytes must be a number \(got '1MB'\)"):
        PlannerConfig(memory_budget_bytes="1MB")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"cache_ratio must be a number \(got None\)"):
        PlannerConfig(cache_ratio=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"memory_budget_bytes must be finite and not negative, or None"):
        PlannerConfig(memory_budget_bytes=-1)
    with pytest.raises(ValueError, match=r"max_cut_arcs must not be negative"):
        PlannerConfig(max_cut_arcs=-1)
    with pytest.raises(ValueError, match=r"prices must be at least one factor"):
        PlannerConfig(prices=())
    with pytest.raises(PlanError, match=r"traced model has 2 layers, the planning problem of rank \d has 3"):
        make_plan(PROBLEM, random_costs(0, num_layers=2, world_size=3), PlannerConfig())
    with pytest.raises(PlanError, match=r"costs are for 2 ranks, the planning problem of rank \d for 3"):
        make_plan(PROBLEM, random_costs(0, num_layers=3, world_size=2), PlannerConfig())
