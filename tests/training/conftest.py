# SPDX-License-Identifier: Apache-2.0
"""Partition folders shared by the tests of training."""

from __future__ import annotations

import pytest

from tests.helpers.partitions import PartitionStore


@pytest.fixture(scope="session")
def partitions(tmp_path_factory: pytest.TempPathFactory) -> PartitionStore:
    return PartitionStore(tmp_path_factory.mktemp("partitions"))
