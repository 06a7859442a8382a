# SPDX-License-Identifier: Apache-2.0
"""A part of a DistDGL job that fails ends, and says why; with the fixes off it stays."""

from __future__ import annotations

from pathlib import Path

import dgl
import pytest
import torch

from dgl_hybrid.launch.cluster import ClusterFailure, ClusterJob, run_cluster
from tests.compat.processes import CHECKOUT

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("exits_script.py")


@pytest.fixture(scope="module")
def part_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("parts")
    dgl.distributed.partition_graph(dgl.rand_graph(240, 1800), "repairs", 2, str(folder), part_method="random")
    return folder / "repairs.json"


def run(part_config: Path, how: str, *, on: bool = True, num_samplers: int = 1, timeout_s: float = 200) -> list[str]:
    lines: list[str] = []
    job = ClusterJob(
        part_config=part_config,
        command=(str(SCRIPT), "on" if on else "off", how),
        num_samplers=num_samplers,
        timeout_s=timeout_s,
        environment={"PYTHONPATH": str(CHECKOUT)},
    )
    run_cluster(job, on_line=lambda line: lines.append(f"[{line.part.name}] {line.text}"))
    return lines


def test_a_failed_trainer_ends(part_config: Path) -> None:
    """Without waiting for its peer, which waits for it, and with its samplers; its own error is the last it says."""
    with pytest.raises(ClusterFailure, match=r"trainer 1 on machine 1 .* exited with code 1") as caught:
        run(part_config, "trainer-raises")
    assert caught.value.details.rstrip().endswith("ValueError: the trainer does not like this epoch")


def test_a_failed_trainer_stays_as_released(part_config: Path) -> None:
    with pytest.raises(ClusterFailure, match=r"did not end within") as caught:
        run(part_config, "trainer-raises", on=False, num_samplers=0, timeout_s=60)
    assert "trainer 1" in str(caught.value)


def test_a_trainer_is_told_that_its_sampler_failed(part_config: Path) -> None:
    with pytest.raises(ClusterFailure, match=r"trainer 1 on machine 1 .* exited with code 1") as caught:
        run(part_config, "sampler-raises")
    assert "DGLError: A sampler process failed:" in caught.value.details
    assert "ValueError: the sampler does not like this batch" in caught.value.details


def test_a_trainer_is_told_that_its_sampler_was_killed(part_config: Path) -> None:
    with pytest.raises(ClusterFailure, match=r"trainer 1 on machine 1 .* exited with code 1") as caught:
        run(part_config, "sampler-killed")
    assert "ended with exit code -9" in caught.value.details


def test_a_job_without_failures_ends_well(part_config: Path) -> None:
    lines = run(part_config, "nothing")
    assert sorted(line for line in lines if "ended well" in line) == [
        "[trainer 0] ended well after 20 batches, 240 rows",
        "[trainer 1] ended well after 20 batches, 240 rows",
    ]
