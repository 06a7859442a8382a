# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.partitions import PartitionStore
from tests.pretend_gpu.build import build_library, find_compiler
from tests.pretend_gpu.ranks import IS_REAL, PretendedGpus, workers_of_their_own


@pytest.fixture(scope="session")
def partitions(tmp_path_factory: pytest.TempPathFactory) -> PartitionStore:
    return PartitionStore(tmp_path_factory.mktemp("partitions"))


@pytest.fixture(scope="package")
def gpus() -> Iterator[PretendedGpus]:
    """Where there is a GPU, that one: the same tests then say what was pretended wrongly."""
    if IS_REAL:
        yield PretendedGpus(None)
        return
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler here")
    library = build_library(compiler)
    with workers_of_their_own():
        yield PretendedGpus(library)
