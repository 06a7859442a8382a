# SPDX-License-Identifier: Apache-2.0
"""What every backend must pass, passed by the CUDA backend on a GPU that is this CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.ops.backend_checks import CASES, CHECKS, Case, check_sddmm
from tests.ops.cuda.fake_driver import FakeDriver
from tests.ops.cuda.host_gpu import make_backend
from tests.ops.simt.build import needs_compiler

pytestmark = needs_compiler

SERVED = [case for case in CASES if case.dtype != torch.float64]
CHOSEN = [
    (check, case)
    for check in CHECKS
    for case in SERVED
    # Forty-odd specialisations for each shape, so these are for the slow run.
    if check is not check_sddmm and (case.graph == "nothing" or (case.graph, case.width) == ("power-law", 3))
]


def identify(value: object) -> str:
    return value.__name__.removeprefix("check_") if callable(value) else str(value)


@pytest.mark.parametrize(("check", "case"), CHOSEN, ids=identify)
def test_check(check: Callable[..., None], case: Case, fake: FakeDriver) -> None:
    check(make_backend(fake, 16)[0], case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SERVED, ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=identify)
def test_every_check(check: Callable[..., None], case: Case, fake: FakeDriver) -> None:
    check(make_backend(fake, 64)[0], case)
