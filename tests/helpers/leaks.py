# SPDX-License-Identifier: Apache-2.0
"""What a test must leave as it was: state of its process, which others meet in whatever order they run there."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
NOT_OF_TESTS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_", "_TORCHINDUCTOR_")
"""How variables begin that pytest sets in each phase of a test, and PyTorch when it first compiles something."""


def process_state() -> dict[str, Any]:
    """Returns what tests of one process share without saying so, by name."""
    return {
        **{f"handler of {number.name}": signal.getsignal(number) for number in SIGNALS},
        "environment": {name: value for name, value in os.environ.items() if not name.startswith(NOT_OF_TESTS)},
        "working folder": os.getcwd(),
        "sys.path": [place for place in sys.path if "site-packages" not in place],  # setuptools adds to it
        "default dtype": torch.get_default_dtype(),
        "gradients are recorded": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "threads of PyTorch": torch.get_num_threads(),
        "process group": distributed.is_initialized(),
        "the plugin": _of("dgl_hybrid.sampling.switch", "_plugin", None),
        "graphs whose ops are routed": _of("dgl_hybrid.ops.routing", "_served", "layer_blocks"),
        "fixes that are switched on": _of("dgl_hybrid.compat.repairs", "_undo", None),
    }


def _of(module: str, name: str, before: object) -> object:
    """Returns a module's variable, `before` where nothing has loaded the module."""
    return getattr(sys.modules[module], name) if module in sys.modules else before


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Returns a line for each difference between two states."""
    found = []
    for name in sorted({*before, *after}):
        was, now = before.get(name, "unset"), after.get(name, "unset")
        if isinstance(was, Mapping):
            found += [f"{name}: {line}" for line in changes(was, now)]
        elif was != now:
            found.append(f"{name} was {was!r} and is {now!r}")
    return found
