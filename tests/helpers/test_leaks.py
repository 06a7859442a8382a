# SPDX-License-Identifier: Apache-2.0
"""What a test left behind is found, and named."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
import torch

from dgl_hybrid.ops.routing import route_ops
from tests.helpers.leaks import changes, process_state


def test_nothing_changed() -> None:
    assert changes(process_state(), process_state()) == []


def test_every_change_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DGL_HYBRID_OF_THIS_TEST", "before")
    before, handler = process_state(), signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("DGL_HYBRID_OF_THIS_TEST", "after")
    monkeypatch.setenv("DGL_HYBRID_ADDED", "1")
    monkeypatch.setenv("_TORCHINDUCTOR_OF_THIS_TEST", "PyTorch would have set it")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_default_dtype(torch.float64)
    route_ops("all")
    try:
        found = changes(before, process_state())
    finally:
        route_ops("layer_blocks")
        torch.set_default_dtype(torch.float32)
        signal.signal(signal.SIGTERM, handler)
    assert found[0] == "default dtype was torch.float32 and is torch.float64"
    assert found[1:3] == [
        "environment: DGL_HYBRID_ADDED was 'unset' and is '1'",
        "environment: DGL_HYBRID_OF_THIS_TEST was 'before' and is 'after'",
    ]
    assert found[3] == "graphs whose ops are routed was 'layer_blocks' and is 'all'"
    assert found[4].startswith("handler of SIGTERM was ")
    assert found[5].startswith("sys.path was ")
    assert found[6] == f"working folder was {before['working folder']!r} and is {str(tmp_path)!r}"
    assert len(found) == 7


def test_modules_that_were_loaded_meanwhile_changed_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as context:
        context.delitem(sys.modules, "dgl_hybrid.sampling.switch", raising=False)
        before = process_state()
    assert changes(before, process_state()) == []
