# SPDX-License-Identifier: Apache-2.0
"""One folder for all tests of the exchange."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.graphs import directed
from tests.helpers.partitions import PartitionStore


@pytest.fixture(scope="session")
def graph() -> Any:
    graph = directed()
    graph.ndata["id"] = torch.arange(graph.num_nodes())
    return graph


@pytest.fixture(scope="session")
def folder(graph: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return PartitionStore(tmp_path_factory.mktemp("exchange")).get("directed", graph, 3)
