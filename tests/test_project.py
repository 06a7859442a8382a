# SPDX-License-Identifier: Apache-2.0
"""What holds the project together: pinned versions, commands, settings."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]


def test_every_dependency_is_pinned_within_its_range() -> None:
    lines = (ROOT / ".constraints.txt").read_text().splitlines()
    pins = dict(line.lower().split("==") for line in lines if line and not line.startswith("#"))
    setup = (ROOT / "setup.py").read_text()
    runtime = re.search(r"install_requires=\[(.*?)\]", setup, re.DOTALL)
    develop = re.search(r'"dev": \[(.*?)\]', setup, re.DOTALL)
    assert runtime is not None
    assert develop is not None
    for text in [*re.findall(r'"([^"]+)"', runtime[1] + develop[1]), "setuptools"]:
        requirement = Requirement(text)
        assert requirement.name in pins, f"{requirement.name} is not in .constraints.txt"
        assert requirement.specifier.contains(pins[requirement.name]), text


def test_ci_script_is_executable_and_parses() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)


def test_readme_commands_are_make_targets() -> None:
    """The commands that the README gives exist, and CI runs the README's test command."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    readme = (ROOT / "README.md").read_text()
    named = set(
        re.findall(r"\bmake ([a-z]+)\b", "\n".join(re.findall(r"^(?: {4}|\$ |make ).*$", readme, re.MULTILINE)))
    )
    assert {"demo", "test"} <= named
    assert named <= targets
    assert "make test" in (ROOT / ".ci" / "run").read_text()


ONLY_LOGS = """#!/bin/sh
echo "$*" >> calls
case "$*" in
    "-m pip --version") [ -e .venv/bin/pip ] ;;
    "-m venv .venv") mkdir -p .venv/bin && cp python .venv/bin/python && touch .venv/bin/pip ;;
esac
"""


@pytest.mark.parametrize("left", ["nothing", "Python without pip", "all of it"])
def test_an_environment_without_pip_is_made_anew(left: str, tmp_path: Path) -> None:
    """As it is left where Debian's python3.11-venv was missing at first, or the user broke off."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("setup.py", ".constraints.txt", "dgl_hybrid/compat/dgl_hybrid_startup.pth"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    python = tmp_path / "python"
    python.write_text(ONLY_LOGS)
    python.chmod(0o755)
    if left != "nothing":
        (tmp_path / ".venv" / "bin").mkdir(parents=True)
        shutil.copy(python, tmp_path / ".venv" / "bin")
    if left == "all of it":
        (tmp_path / ".venv" / "bin" / "pip").touch()
    # Not what a `make test` around this one was told.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "-C", str(tmp_path), "env", "PYTHON=./python"]
    subprocess.run(command, check=True, timeout=60, capture_output=True, env=environment)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert ("-m venv .venv" in calls) is (left != "all of it")
    assert len([call for call in calls if call.startswith("-m pip install")]) == 2


def test_version_is_in_the_changelog() -> None:
    import dgl_hybrid

    assert f"## [{dgl_hybrid.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
