# SPDX-License-Identifier: Apache-2.0
"""What every test shares: DGL is mended before anything imports it; a skipped test names what it lacks."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import dgl_hybrid  # noqa: F401  before anything imports DGL
from tests.helpers.order import longest_files_first

# Before PyTorch is loaded, and for processes that tests start: several share the cores, and OpenMP's threads would spin
# while they wait for one that does not run (tests/ops took twice as long).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

DATA_VARIABLE = "DGL_HYBRID_DATA"
CODE_VARIABLE = "DGL_HYBRID_CODE_CACHE"
INDUCTOR_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a shell's background: processes that tests start would ignore it too, and some are sent it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def data_folder() -> Path | None:
    """Returns the folder of the real graphs: the one the variable names, else `../shared/data` of the checkout."""
    named = os.environ.get(DATA_VARIABLE)
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    return folder if folder.is_dir() else None


def why_no_data() -> str | None:
    return None if data_folder() else f"no real graphs here: set {DATA_VARIABLE} to a folder of .npz graphs"


def why_no_cuda() -> str | None:
    import torch

    if torch.version.cuda is None:
        return f"no CUDA in this PyTorch ({torch.__version__})"
    return None if torch.cuda.is_available() else "no CUDA GPU here"


def why_no_netns() -> str | None:
    if os.geteuid() != 0:
        return "network namespaces need root"
    return None if shutil.which("ip") else "network namespaces need the program ip (package iproute2)"


WHY_NOT = {"data": why_no_data, "cuda": why_no_cuda, "netns": why_no_netns}


def folder_in_memory() -> Path | None:
    """Where there is room for thousands of small files: a test would wait until a disk has each of them."""
    folder = Path("/dev/shm")
    is_there = os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > 1 << 30
    return folder if is_there else None


def pytest_configure(config: pytest.Config) -> None:
    """Kernels that a test compiles serve the others, in this run and not in the next: nothing in the user's folders."""
    for variable in (CODE_VARIABLE, INDUCTOR_VARIABLE):
        if variable not in os.environ:  # workers and the processes of tests have it from here
            folder = tempfile.mkdtemp(prefix="dgl_hybrid_code_", dir=folder_in_memory())
            os.environ[variable] = folder
            config.add_cleanup(partial(shutil.rmtree, folder, ignore_errors=True))


@pytest.hookimpl(trylast=True)  # after tests were deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_what_lacks_something(items)
    if hasattr(config, "workerinput"):  # one of several processes, which get file after file
        items[:] = longest_files_first(items)


def skip_what_lacks_something(items: list[pytest.Item]) -> None:
    """Skips the tests whose marker names something that is not here, and says what."""
    wanted = [marker for marker in WHY_NOT if any(item.get_closest_marker(marker) for item in items)]
    reasons = {marker: WHY_NOT[marker]() for marker in wanted}
    for item in items:
        for marker, reason in reasons.items():
            if reason is not None and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """What thousands of collected tests consist of stays for good: collections of garbage need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    """Fails the test that leaves the process other than it found it, not one that runs there after it.

    Which files share a process, and in which order, differs from run to run.
    """
    from tests.helpers.leaks import changes, process_state

    before = process_state()
    yield
    left = changes(before, process_state())
    assert not left, f"this test leaves to others what it changed: {'; '.join(left)}"


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of the real graphs; the test is marked `data` (skipped by name without it)."""
    folder = data_folder()
    if folder is None:
        pytest.skip(why_no_data() or "")
    return folder
