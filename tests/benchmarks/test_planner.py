# SPDX-License-Identifier: Apache-2.0
"""The generated part is a planning problem; what the benchmark says of its plan holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.planner import parts, run
from benchmarks.planner.parts import GeneratedGraph, build_problem


def test_in_edges_do_not_depend_on_who_else_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = GeneratedGraph(2000, 20_000, 4)
    everybody = np.arange(2000)
    counts, sources = graph.in_edges(everybody)
    assert counts.sum() == len(sources)
    assert 0 <= sources.min() <= sources.max() < 2000
    ends = np.cumsum(counts)
    some = np.array([3, 700, 1999])
    alone = graph.in_edges(some)[1]
    assert np.array_equal(alone, np.concatenate([sources[ends[v] - counts[v] : ends[v]] for v in some]))
    monkeypatch.setattr(parts, "_CHUNK", 100)
    assert np.array_equal(graph.in_edges(everybody)[1], sources)
    local = graph.owner(np.repeat(everybody, counts)) == graph.owner(sources.astype(np.int64))
    assert 0.75 < local.mean() < 0.95


def test_a_part_is_planned_within_its_bound(tmp_path: Path) -> None:
    problem = build_problem(GeneratedGraph(3000, 24_000, 4), 1, 3)
    problem.validate()
    run.save_problem(problem, tmp_path / "problem.safetensors")
    loaded = run.load_problem(tmp_path / "problem.safetensors")
    assert (loaded.rank, loaded.world_size, loaded.num_layers) == (1, 4, 3)
    assert all(
        torch.equal(getattr(loaded, name), getattr(problem, name))
        for name in ("halo_global", "owner", "in_halo", "demand", "reach", "owned_edges")
    )
    result = run.plan_once(loaded, 125e6)
    assert result["over_lower_bound"] >= 1 - 1e-12
    assert result["best_pure_over_hybrid"] >= 1 - 1e-12
    assert result["elapsed_s"] > 0
