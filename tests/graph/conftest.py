# SPDX-License-Identifier: Apache-2.0
"""One folder of the power-law graph in three parts, for all tests of blocks."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.graphs import power_law
from tests.helpers.partitions import PartitionStore


@pytest.fixture(scope="session")
def graph() -> object:
    graph = power_law()
    graph.ndata["id"] = torch.arange(graph.num_nodes())
    return graph


@pytest.fixture(scope="session")
def folder(graph: object, tmp_path_factory: pytest.TempPathFactory) -> str:
    return PartitionStore(tmp_path_factory.mktemp("blocks")).get("power_law", graph, 3)  # type: ignore[arg-type]
