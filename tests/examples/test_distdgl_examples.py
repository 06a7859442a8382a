# SPDX-License-Identifier: Apache-2.0
"""The DistDGL examples, each in two partitions: plain, and with the plugin that they know nothing of.

By default each script runs once, but for link prediction and the full-graph twin, which differs in the loader alone
from a script that runs. Those, and that all run on DistDGL as it is, are left to the slow run.
"""

from __future__ import annotations

import difflib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dgl_hybrid
from dgl_hybrid.datasets import load_dataset
from dgl_hybrid.sampling.config import HaloConfig
from tests.cli.commands import TIMEOUT_S, environment
from tests.helpers.distdgl import run_job

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
COUNTING = Path(__file__).with_name("counting.py")
EVERYTHING = HaloConfig(strategy="depcache")


@pytest.fixture(scope="module")
def powerlaw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    dgl_hybrid.partition_graph(load_dataset("powerlaw:nodes=2000").graph, "powerlaw", 2, folder)
    return folder / "powerlaw.json"


@pytest.fixture(scope="module")
def scholar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the example's own script writes it."""
    folder = tmp_path_factory.mktemp("parts")
    words = (EXAMPLES / "partition_scholar.py", "--num-parts", 2, "--papers", 1500, "--out", folder)
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / "scholar.json"


def losses_of(lines: list[str], num_epochs: int) -> list[float]:
    """Rank 0's losses."""
    found = [re.match(r"rank 0: epoch (\d+), loss ([\d.]+), ", line) for line in lines]
    losses = [float(match[2]) for match in found if match]
    assert len(losses) == num_epochs, lines
    return losses


def last_figure(lines: list[str], words: str) -> float:
    """The number behind these words in the last line that has them; only rank 0 prints it."""
    matches = [match for line in lines if (match := re.search(rf"{words} ([\d.]+)", line))]
    assert matches, lines
    return float(matches[-1][1])


def counts_of(lines: list[str]) -> list[dict[str, int]]:
    counts = [json.loads(line.removeprefix("read counts ")) for line in lines if line.startswith("read counts ")]
    assert len(counts) == 2
    return counts


UNDER_RUN = ("-m", "dgl_hybrid.cli", "run")
SAGE = ("--graph-name", "powerlaw", "--num-epochs", 8, "--batch-size", 40, "--lr", 0.01, "--fan-out", "5,10")


@pytest.mark.parametrize(
    "start",
    [pytest.param((), id="plain", marks=pytest.mark.slow), pytest.param(UNDER_RUN, id="dgl-hybrid run")],
)
def test_sampled_sage(powerlaw: Path, start: tuple[str, ...]) -> None:
    """The very same script runs on DistDGL as it is and under `dgl-hybrid run`."""
    _, lines = run_job(powerlaw, *start, EXAMPLES / "distdgl_sage.py", *SAGE, "--part-config", powerlaw)
    losses = losses_of(lines, 8)
    assert losses[-1] < 0.6 * losses[0]
    assert last_figure(lines, "validation accuracy") > 0.4
    assert last_figure(lines, "test accuracy") > 0.4


@pytest.mark.slow  # its script but for one object runs above; that loader on servers: training/test_distdgl_full_graph
def test_full_graph_sage(powerlaw: Path) -> None:
    words = ("--graph-name", "powerlaw", "--num-epochs", 40, "--lr", 0.01, "--eval-every", 40)
    _, lines = run_job(powerlaw, EXAMPLES / "distdgl_full_graph_sage.py", *words, "--part-config", powerlaw)
    losses = losses_of(lines, 40)
    assert losses[-1] < 0.4 * losses[0]
    assert last_figure(lines, "test accuracy") > 0.5


def test_the_twin_differs_in_one_object() -> None:
    """Its docstring aside: the import, and the class of the training loader."""
    texts = [
        (EXAMPLES / name).read_text().split('"""', 2) for name in ("distdgl_sage.py", "distdgl_full_graph_sage.py")
    ]
    sampled, full_graph = (text[2].splitlines() for text in texts)
    changes = [line for line in difflib.ndiff(sampled, full_graph) if line[0] in "+-" and line[1:].strip()]
    assert changes == [
        "+ import dgl_hybrid",
        "-     loader = dgl.dataloading.DistNodeDataLoader(",
        "+     loader = dgl_hybrid.FullGraphLoader(",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
def test_link_prediction(powerlaw: Path, on: bool) -> None:
    start, plugin = ((COUNTING,), EVERYTHING) if on else ((), None)
    words = ("--graph-name", "powerlaw", "--part-config", powerlaw, "--num-epochs", 4)
    _, lines = run_job(powerlaw, *start, EXAMPLES / "distdgl_link_prediction.py", *words, plugin=plugin)
    losses = losses_of(lines, 4)
    assert losses[-1] < losses[0]
    assert last_figure(lines, "test edges scored above a random pair:") > 0.58
    if on:
        for counts in counts_of(lines):
            assert counts["held_rows"] > 10 * counts["remote_rows"]


@pytest.mark.parametrize("on", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["on", "off"])
def test_rgcn(scholar: Path, on: bool) -> None:
    """Heterograph; authors and venues are embeddings in the KVStore, which are written in every step."""
    start, plugin = ((COUNTING,), EVERYTHING) if on else ((), None)
    words = ("--graph-name", "scholar", "--part-config", scholar, "--num-epochs", 4)
    _, lines = run_job(scholar, *start, EXAMPLES / "distdgl_rgcn.py", *words, plugin=plugin)
    losses = losses_of(lines, 4)
    assert losses[-1] < 0.6 * losses[0]
    assert last_figure(lines, "test accuracy") > 0.8
    if on:
        for counts in counts_of(lines):
            assert counts["held_rows"] > 0
            assert counts["held_seeds"] > 0


def test_examples_do_not_import_dgl_hybrid() -> None:
    """They are what DistDGL users have; only those for the full graph name us."""
    names = {path.name for path in EXAMPLES.glob("*.py") if "import dgl_hybrid" in path.read_text()}
    assert names == {"full_graph_sage.py", "distdgl_full_graph_sage.py", "lightning_full_graph_sage.py"}
