# SPDX-License-Identifier: Apache-2.0
"""Raw features that are mostly zeros go by their other entries, and training stays what plain DGL computes."""

from __future__ import annotations

import dgl
import pytest
import torch

from tests.helpers.exactness import (
    Case,
)
from tests.helpers.graphs import power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.thinning import each_value
from tests.helpers.world import run_ranks
from tests.training.kept_runs import assert_same, reference, train


def mostly_zeros(num_features: int = 400) -> dgl.DGLGraph:
    """Bags of words: one vertex in five has none."""
    graph = power_law()
    generator = torch.Generator().manual_seed(11)
    counts = torch.randint(1, 4, (graph.num_nodes(), num_features), generator=generator).double()
    graph.ndata["feat"] = counts * (torch.rand(graph.num_nodes(), num_features, generator=generator) < 0.04)
    graph.ndata["feat"][::5] = 0.0
    return graph


SPARSE = {"gcn_both": 1, "gcn_none": 1, "sage_mean": 2, "sage_gcn": 1, "gat": 1, "gatv2": 2, "gin": 2}
"""Layer to the number of operands of its first products: sums, rows, or both."""


@each_value(kind=sorted(SPARSE), world_size=[2, 3, 4, 1], plan=["depcomm", "depcache", "planned:hybrid"])
def test_features_that_are_mostly_zeros(kind: str, world_size: int, plan: str, partitions: PartitionStore) -> None:
    graph = mostly_zeros()
    case = Case(kind=kind, plan=plan)
    folder = partitions.get("mostly_zeros", graph, world_size)
    runs = run_ranks(world_size, train, folder, case, optimized=True)
    assert_same(runs, reference(case, graph=graph))
    # Sums have too many entries where a rank holds the hub and little else; rows are needed once or in two numbers.
    assert all(run.num_sparse <= SPARSE[kind] for run in runs)
    assert any(run.num_sparse in (SPARSE[kind], 1) for run in runs)


@pytest.mark.parametrize("kind", sorted(SPARSE))
def test_layers_as_they_are_take_zeros_as_well(kind: str, partitions: PartitionStore) -> None:
    graph, case = mostly_zeros(), Case(kind=kind)
    runs = run_ranks(3, train, partitions.get("mostly_zeros", graph, 3), case)
    assert_same(runs, reference(case, graph=graph))
    assert all(run.num_sparse == 0 for run in runs)


def test_sparse_features_that_are_set_are_taken_anew(partitions: PartitionStore) -> None:
    graph, case = mostly_zeros(), Case(kind="sage_mean")
    folder = partitions.get("mostly_zeros", graph, 3)
    runs = run_ranks(3, train, folder, case, optimized=True, change="sets the field")
    assert_same(runs, reference(case, change="sets the field", graph=graph))
