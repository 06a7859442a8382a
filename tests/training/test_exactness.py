# SPDX-License-Identifier: Apache-2.0
"""Forward, input gradients and weight gradients equal single-process full-graph DGL, element by element."""

from __future__ import annotations

import dgl_hybrid
import pytest

from tests.helpers.exactness import LAYERS, Case, assert_same_step, reference_step, run_step
from tests.helpers.graphs import power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks


@pytest.fixture(scope="session")
def partitions(tmp_path_factory: pytest.TempPathFactory) -> PartitionStore:
    return PartitionStore(tmp_path_factory.mktemp("partitions"))


@pytest.mark.parametrize("plan", ["depcomm", "depcache", "random:1:0.5"])
@pytest.mark.parametrize("kind", sorted(LAYERS))
def test_every_layer(kind: str, plan: str, partitions: PartitionStore) -> None:
    graph = power_law()
    case = Case(kind=kind, plan=plan, num_layers=2)
    results = run_ranks(3, run_step, partitions.get("power_law", graph, 3), case)
    assert_same_step(results, reference_step(graph, case))
