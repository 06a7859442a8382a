# SPDX-License-Identifier: Apache-2.0
"""Whoever starts a job has the last word on what its scripts enable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import dgl_hybrid

# isort: split
import pytest

from dgl_hybrid.sampling import switch
from dgl_hybrid.sampling.config import ENABLE_VARIABLE, HaloConfig
from tests.compat.processes import run_python


@pytest.fixture(autouse=True)
def nothing_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(switch, "_warned", set())
    yield
    dgl_hybrid.disable()


def held() -> HaloConfig | None:
    return None if switch._plugin is None else switch._plugin.config


@pytest.mark.parametrize("off", ["0", "off"])
def test_off_stays_off(off: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Else a comparison of a script with and without the plugin compares it with itself."""
    monkeypatch.setenv(ENABLE_VARIABLE, off)
    switch.enable_from_environment()
    for _ in range(2):
        dgl_hybrid.enable(strategy="depcache")
        dgl_hybrid.disable()
        assert held() is None
    assert os.environ[ENABLE_VARIABLE] == off, "children inherit it"
    assert [record.getMessage() for record in caplog.records] == [
        f"DGL_HYBRID_ENABLE={off} has switched dgl_hybrid off for this job: dgl_hybrid.enable() does nothing. Take the "
        "variable (or --strategy off) away to have it on."
    ]


@pytest.mark.parametrize(
    ("value", "config"),
    [
        ("depcomm", HaloConfig(strategy="depcomm", budget="10%")),
        ("hybrid:1MB", HaloConfig(budget="1MB")),
        ('{"budget": "20%"}', HaloConfig(strategy="depcache", budget="20%")),
        (HaloConfig(strategy="depcomm").to_environment(), HaloConfig(strategy="depcomm")),
    ],
)
@pytest.mark.parametrize("is_on_already", [False, True])
def test_what_the_launcher_says_holds(
    value: str,
    config: HaloConfig,
    is_on_already: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(ENABLE_VARIABLE, value)
    if is_on_already:
        switch.enable_from_environment()
        assert not caplog.records
    for _ in range(2):
        dgl_hybrid.enable(strategy="depcache", budget="10%")
        assert held() == config
    (record,) = caplog.records
    assert "holds in place of what dgl_hybrid.enable() was asked for" in record.getMessage()
    assert "not depcache, 10%" in record.getMessage()


@pytest.mark.parametrize(
    "first",
    [
        # Each is a process that imports PyTorch and DGL.
        pytest.param("import dgl_hybrid; dgl_hybrid.enable()", marks=pytest.mark.slow),
        pytest.param("import dgl_hybrid; dgl_hybrid.held_bytes()", marks=pytest.mark.slow),
        pytest.param("import dgl_hybrid; dgl_hybrid.partition_graph", marks=pytest.mark.slow),
        "import dgl_hybrid; dgl_hybrid.FullGraphLoader",
        "from dgl_hybrid.partition import partition_graph",
    ],
)
def test_the_plugin_may_be_what_imports_dgl(first: str) -> None:
    """In a process whose parent has it on; DGL's import then turns it on amid the import of what was asked for."""
    ran = run_python(
        f"{first}\nimport dgl_hybrid.sampling.switch as switch\nprint(switch._plugin is not None)",
        DGL_HYBRID_ENABLE="1",
    )
    assert ran.stdout == "True\n", ran.stderr[-2000:]


@pytest.mark.parametrize(
    "how",
    [
        "by the environment",
        pytest.param("by a call", marks=pytest.mark.slow),
        pytest.param("after an import", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_had_the_plugin_on_from_the_start_partitions_heterographs(how: str, tmp_path: Path) -> None:
    """Where what lets DGL write them is imported only when the hook is there, DGL's name leads to the hook."""
    first = {
        "by the environment": "",
        "by a call": "import dgl_hybrid\ndgl_hybrid.enable()",
        "after an import": "from dgl_hybrid import partition_graph\nimport dgl_hybrid\ndgl_hybrid.enable()",
    }[how]
    ran = run_python(
        f"""{first}
import dgl, torch
ring = torch.arange(40)
graph = dgl.heterograph({{("a", "x", "b"): (ring, ring), ("b", "y", "a"): (ring, ring.roll(1))}})
dgl.distributed.partition_graph(graph, "h", 2, {str(tmp_path / "parts")!r}, part_method="random")
""",
        **({"DGL_HYBRID_ENABLE": "1"} if how == "by the environment" else {}),
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert (tmp_path / "parts" / "h.json").is_file()


def test_servers_can_be_asked_before_anything_is_said_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a process that was connected while the plugin had never been on in it."""
    done = list[str]()
    monkeypatch.delenv(ENABLE_VARIABLE, raising=False)
    monkeypatch.setattr(switch, "_silent", None)
    monkeypatch.setattr(switch.written, "register_services", lambda: done.append("requests are known"))
    monkeypatch.setattr(switch, "_silent_since_connecting", lambda: done.append("silence"))
    dgl_hybrid.enable()
    assert done == ["requests are known", "silence"]


@pytest.mark.parametrize("value", ["1", "", None])
def test_what_it_leaves_open_the_script_says(
    value: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if value is None:
        monkeypatch.delenv(ENABLE_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(ENABLE_VARIABLE, value)
    switch.enable_from_environment()
    for budget in ("10%", "20%"):
        dgl_hybrid.enable(budget=budget)
        assert held() == HaloConfig(budget=budget)
    assert not caplog.records


def test_a_script_may_say_otherwise_after_disable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENABLE_VARIABLE, "depcomm")
    switch.enable_from_environment()
    dgl_hybrid.disable()
    dgl_hybrid.enable(budget="10%")
    assert held() == HaloConfig(budget="10%")
