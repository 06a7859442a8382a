# SPDX-License-Identifier: Apache-2.0
"""Conformance jobs, each run once a session, when a test first asks for its results."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dgl_hybrid.sampling.config import HaloConfig
from tests.helpers.distdgl import PartitionedCase, Topology, heterograph, homogeneous_graph, run_job, write_case

SCRIPT = Path(__file__).with_name("conformance.py")
TOPOLOGIES = {
    "1 server, 1 trainer": Topology(),
    "2 servers, 2 trainers": Topology(num_servers=2, num_trainers=2, num_samplers=1),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One job."""

    suite: str
    num_parts: int
    plugin: HaloConfig | None = None
    topology: str = "1 server, 1 trainer"

    def __str__(self) -> str:
        held = f"{self.plugin.strategy} {self.plugin.budget}" if self.plugin else "off"
        return f"{self.suite}, {self.num_parts} parts, {held}, {self.topology}"


class ConformanceJobs:
    """Runs an arm when its results are first asked for; one that failed is not run again."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._cases: dict[tuple[str, int], PartitionedCase] = {}
        self._results: dict[Arm, list[dict[str, Any]] | Exception] = {}

    def case(self, suite: str, num_parts: int) -> PartitionedCase:
        """Two parts with a halo of one hop, three with two hops; not by METIS, whose parts differ from run to run."""
        key = (suite, num_parts)
        if key not in self._cases:
            graph = homogeneous_graph() if suite == "homogeneous" else heterograph()
            method = "contiguous" if key == ("homogeneous", 2) else "random"
            folder = self._root / f"{suite}-{num_parts}"
            self._cases[key] = write_case(graph, folder, num_parts, num_hops=num_parts - 1, part_method=method)
        return self._cases[key]

    def results(self, arm: Arm) -> list[dict[str, Any]]:
        """What each trainer wrote, in rank order."""
        if arm not in self._results:
            try:
                self._results[arm] = self._run(arm)
            except Exception as error:
                self._results[arm] = error
        outcome = self._results[arm]
        if isinstance(outcome, Exception):
            raise RuntimeError(f"the job ({arm}) failed") from outcome
        return outcome

    def _run(self, arm: Arm) -> list[dict[str, Any]]:
        case = self.case(arm.suite, arm.num_parts)
        out = self._root / f"results-{len(self._results)}"
        out.mkdir()
        # Seeds differ between plugin off and on, so that comparing their counts says something.
        args: list[object] = [arm.suite, case.part_config, "--truth", case.truth, "--out", out]
        args += ["--seed", 1, "--plugin"] if arm.plugin else ["--seed", 2]
        run_job(case.part_config, SCRIPT, *args, plugin=arm.plugin, topology=TOPOLOGIES[arm.topology])
        num_trainers = arm.num_parts * TOPOLOGIES[arm.topology].num_trainers
        return [json.loads((out / f"trainer-{rank}.json").read_text()) for rank in range(num_trainers)]


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> ConformanceJobs:
    return ConformanceJobs(tmp_path_factory.mktemp("distdgl"))
