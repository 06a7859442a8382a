# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ops.cuda.fake_driver import FakeDriver, build_fake_driver


@pytest.fixture(scope="session")
def built_driver(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    return build_fake_driver(tmp_path_factory.mktemp("fake_driver"))


@pytest.fixture
def fake(built_driver: FakeDriver) -> Iterator[FakeDriver]:
    """A CUDA driver whose GPUs are this CPU."""
    built_driver.set()
    yield built_driver
    built_driver.set()
