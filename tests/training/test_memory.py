# SPDX-License-Identifier: Apache-2.0
"""What `give_back_memory` takes out of resident memory."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from dgl_hybrid.ops.cpu.memory import _mappings_in
from dgl_hybrid.training.memory import give_back_memory


def solve() -> int:
    from ortools.graph.python import max_flow

    problem = max_flow.SimpleMaxFlow()
    problem.add_arcs_with_capacity(np.arange(50), np.arange(50) + 1, np.full(50, 7))
    problem.solve(0, 50)
    return int(problem.optimal_flow())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what of a file is resident")
def test_the_code_of_planning_leaves_and_can_be_called_again() -> None:
    assert solve() == 7
    ortools = sys.modules["ortools"].__file__
    assert ortools is not None

    def resident() -> int:
        return sum(m.resident_bytes - m.private_bytes for m in _mappings_in(Path(ortools).parent.resolve()))

    before = resident()
    give_back_memory()
    assert resident() < before / 4
    assert solve() == 7
