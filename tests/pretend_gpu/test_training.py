# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from tests.helpers.exactness import Case, assert_same_step, reference_step, run_step
from tests.helpers.graphs import power_law
from tests.helpers.partitions import PartitionStore
from tests.pretend_gpu.ranks import PretendedGpus


@pytest.mark.parametrize("kind", ["gcn_both", "sage_mean", "gat", "user_defined"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_step(world_size: int, kind: str, gpus: PretendedGpus, partitions: PartitionStore) -> None:
    graph = power_law()
    case = Case(kind=kind, plan="random:1:0.3", device="cuda")
    results = gpus.run(world_size, run_step, partitions.get("power_law", graph, world_size), case)
    assert_same_step(results, reference_step(graph, case))
