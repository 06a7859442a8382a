# SPDX-License-Identifier: Apache-2.0
"""DistDGL measured on this host, by its own servers and trainers; and what is left where it fails or is broken off."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from dgl_hybrid.cli.train import make_job
from dgl_hybrid.errors import LaunchError
from dgl_hybrid.launch import distdgl
from dgl_hybrid.launch.cluster import ClusterFailure, ClusterJob
from dgl_hybrid.launch.job import FOLDER_PREFIX
from dgl_hybrid.launch.workspace import DataConfig, PartitionConfig, prepare_partition
from dgl_hybrid.training.config import ModelConfig, StrategyConfig, TrainConfig, TrainJob
from dgl_hybrid.training.distdgl import FEWEST, DistDGLReport, batch_sizes
from dgl_hybrid.training.reference import ReferenceRun
from tests.cli.commands import SMALL, TIMEOUT_S, environment, wait_for


def make(folder: Path, model: str, ranks: int) -> tuple[TrainJob, DataConfig]:
    data = DataConfig(data=SMALL).for_model(model)
    prepared = prepare_partition(data, PartitionConfig(ranks=ranks, workspace=str(folder)))
    config = ModelConfig(model=model, num_layers=2, hidden=8, dropout=0.0)
    return make_job(prepared, config, StrategyConfig(), TrainConfig()), data


@pytest.mark.parametrize(("model", "ranks"), [("gat", 2), pytest.param("sage", 1, marks=pytest.mark.slow)])
def test_its_loss_is_that_of_plain_dgl(
    model: str,
    ranks: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    caplog.set_level(logging.INFO, logger=distdgl.logger.name)
    job, data = make(tmp_path / "parts", model, ranks)
    found = distdgl.run_distdgl(job, threads=1)
    assert found.ranks == ranks
    assert found.has_warmed_up
    assert len(found.times_s) >= FEWEST
    assert found.batch_size is None
    assert found.stopped is None
    assert len(found.peak_rss_bytes) == ranks
    assert all(p > b for p, b in zip(found.peak_rss_bytes, found.base_rss_bytes, strict=True))
    in_float64 = replace(job, training=replace(job.training, dtype="float64"))
    assert found.initial_loss == pytest.approx(ReferenceRun(in_float64, data.load()).run_epoch().loss, rel=1e-12)
    waits = [record.getMessage().rpartition(" ")[2] for record in caplog.records if "waits on" in record.getMessage()]
    assert len(waits) == ranks
    assert all(address.startswith("127.0.0.1:") for address in waits), "nobody else may reach them"
    assert not list(tmp_path.glob("dgl_hybrid_*")), "a folder was left behind"
    assert DistDGLReport.from_json(json.loads(json.dumps(found.to_json()))) == found


def known_report(**changes: Any) -> DistDGLReport:
    """What a trainer might have left, all of it."""
    report = DistDGLReport(
        ranks=1,
        times_s=(0.3,) * FEWEST,
        has_warmed_up=True,
        batch_size=None,
        seconds_by_batch_size={"all": 0.3},
        given_up=(),
        peak_rss_bytes=(2,),
        base_rss_bytes=(1,),
        is_complete=True,
    )
    return replace(report, **changes)


def test_a_failure_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, _ = make(tmp_path, "sage", 1)
    monkeypatch.setattr(distdgl, "COMMAND", ("-c", "import sys; sys.exit('no luck\\ntoday')"))
    with pytest.raises(LaunchError, match=r"^(server|trainer) 0 on machine 0 \(127.0.0.1\) exited with code 1: today$"):
        distdgl.run_distdgl(job, threads=1)


def test_what_was_measured_before_a_failure_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = known_report(times_s=(90.0,), has_warmed_up=False, seconds_by_batch_size={"all": 90.0}, is_complete=False)
    job, _ = make(tmp_path, "sage", 1)
    code = f"import pathlib, sys; pathlib.Path(sys.argv[1], 'report.json').write_text({json.dumps(known.to_json())!r})"
    monkeypatch.setattr(distdgl, "COMMAND", ("-c", f"{code}; import time; time.sleep(600)"))
    monkeypatch.setattr(distdgl, "TIMEOUT_S", 15.0)
    found = distdgl.run_distdgl(job, threads=1)
    assert found.stopped is not None
    assert found.stopped.startswith("the job did not end within 15 s; still running: server 0")
    assert replace(found, stopped=None) == known


KILLED = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
if json.loads((folder / "job.json").read_text())["skips_largest"]:
    (folder / "report.json").write_text(sys.argv[2])
else:
    os.kill(os.getpid(), signal.SIGKILL)
"""
SLOW = KILLED.replace("os.kill(os.getpid(), signal.SIGKILL)", "time.sleep(600)")


def run_with_smaller_batches(job: TrainJob, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets parts run a script that comes to nothing by all seeds at once, and leaves a report by smaller batches."""
    known = known_report(batch_size=1024, seconds_by_batch_size={"1024": 0.3})
    run_cluster = distdgl.run_cluster
    seen: list[bool] = []

    def with_report(cluster: ClusterJob, **options: Any) -> Any:
        folder = Path(cluster.command[-1])
        seen.append(json.loads((folder / "job.json").read_text())["skips_largest"])
        return run_cluster(
            replace(cluster, command=("-c", script, str(folder), json.dumps(known.to_json()))), **options
        )

    monkeypatch.setattr(distdgl, "run_cluster", with_report)
    assert distdgl.run_distdgl(job, threads=1) == known
    assert seen == [False, True]
    monkeypatch.setattr(distdgl, "run_cluster", run_cluster)


def test_where_all_seeds_at_once_take_too_long_smaller_batches_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the slowest batch and the first: smaller ones never had their turn, and DistDGL was said to fail."""
    job, _ = make(tmp_path, "sage", 1)
    monkeypatch.setattr(distdgl, "TIMEOUT_S", 15.0)
    run_with_smaller_batches(job, SLOW, monkeypatch)
    tried: list[bool] = []

    def run_once(job: TrainJob, threads: int, *, skips_largest: bool) -> tuple[None, ClusterFailure]:
        tried.append(skips_largest)
        if skips_largest:
            return None, ClusterFailure("trainer 0 exited with code 1", details="no batch smaller", part="trainer 0")
        return None, ClusterFailure("the job did not end within 15 s; still running: trainer 0", exit_code=124)

    monkeypatch.setattr(distdgl, "_run_once", run_once)
    with pytest.raises(
        distdgl.NoEpochInTime, match=r"^DistDGL had done no epoch within 15 s of its start, and was ended$"
    ):
        distdgl.run_distdgl(job, threads=1)
    assert tried == [False, True]


def test_where_all_seeds_at_once_take_the_memory_smaller_batches_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, _ = make(tmp_path, "sage", 1)
    run_with_smaller_batches(job, KILLED, monkeypatch)
    monkeypatch.setattr(distdgl, "COMMAND", ("-c", "import os; os.kill(os.getpid(), 9)"))
    with pytest.raises(LaunchError, match=r"was killed by SIGKILL \(out of memory\?\)$"):
        distdgl.run_distdgl(job, threads=1)


def test_one_who_ends_badly_after_all_was_measured_was_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = known_report()
    job, _ = make(tmp_path, "sage", 1)
    code = f"import pathlib, sys; pathlib.Path(sys.argv[1], 'report.json').write_text({json.dumps(known.to_json())!r})"
    monkeypatch.setattr(distdgl, "COMMAND", ("-c", f"{code}; sys.exit(3)"))
    assert distdgl.run_distdgl(job, threads=1) == known


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_signals_leave_nothing(number: signal.Signals, code: int, tmp_path: Path) -> None:
    job, _ = make(tmp_path / "parts", "sage", 2)
    script = f"""
import json, logging
from dgl_hybrid.launch import distdgl
from dgl_hybrid.training.config import TrainJob
logging.basicConfig(level=logging.INFO)
distdgl.COMMAND = ("-c", "import time; print('here', flush=True); time.sleep(600)")
distdgl.run_distdgl(TrainJob.from_json(json.loads({json.dumps(job.to_json())!r})), threads=1)
"""
    said = tmp_path / "said"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with said.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**environment(), "TMPDIR": str(temporary)},
        )
    wait_for(lambda: said.read_text().count("here") == 2 or process.poll() is not None, "two trainers")
    assert list(temporary.glob(f"{FOLDER_PREFIX}*")), said.read_text()
    parts = psutil.Process(process.pid).children(recursive=True)
    assert len(parts) >= 4
    process.send_signal(number)
    assert process.wait(timeout=TIMEOUT_S) == code, said.read_text()
    _, alive = psutil.wait_procs(parts, timeout=30)
    assert not alive, "a part was left behind"
    assert not list(temporary.iterdir()), "a folder was left behind"


def test_batch_sizes_by_which_a_trainer_would_wait_for_ever_are_left_out() -> None:
    assert batch_sizes(10, 11) == [11]
    assert batch_sizes(3000, 3000) == [3000, 1024]
    assert batch_sizes(20_000, 20_001) == [20_001, 8192, 1024]
    assert batch_sizes(2048, 2049) == [2049], "one of them would have three batches, the other two"


def test_without_all_seeds_at_once_smaller_batches_are_left_or_it_is_said() -> None:
    assert batch_sizes(20_000, 20_001, skips_largest=True) == [8192, 1024]
    with pytest.raises(ValueError, match="no batch smaller than all 11 seeds"):
        batch_sizes(10, 11, skips_largest=True)
