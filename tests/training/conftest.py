# SPDX-License-Identifier: Apache-2.0
"""Partition folders shared by the tests of training."""

from __future__ import annotations

import pytest

from tests.helpers.graphs import power_law
from tests.helpers.partitions import PartitionStore
from tests.training.user_scripts import RANKS


@pytest.fixture(scope="session")
def partitions(tmp_path_factory: pytest.TempPathFactory) -> PartitionStore:
    return PartitionStore(tmp_path_factory.mktemp("partitions"))


@pytest.fixture
def folder(partitions: PartitionStore) -> str:
    """For scripts of several ranks."""
    return partitions.get("power_law", power_law(), RANKS)


@pytest.fixture
def folder_of_one(partitions: PartitionStore) -> str:
    """The same graph."""
    return partitions.get("power_law", power_law(), 1)
