# SPDX-License-Identifier: Apache-2.0
"""Every backend that works here passes `backend_checks`.

The default run takes turns where shapes only choose other kernels: each check sees every second of them, and each of
them every second check; the slow run has them all. Dtypes, indices, orders of edges and odd graphs meet every check.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dgl_hybrid.errors import CompatError, KernelError
from dgl_hybrid.ops.backend import Backend, BackendName, load_backend
from tests.helpers.thinning import marks_of
from tests.ops.backend_checks import CASES, CHECKS, SHAPES, Case

SHAPES_OF_THE_REFERENCE = ((1, 1), (2, 12), (4, 16), (1, 40), (1, 0), (3, 0), (0, 4))
"""The reference has one path for every width; the kernels have several."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def backend(request: pytest.FixtureRequest) -> tuple[Backend, str]:
    """The backend and the device its tensors lie on; the two have the same names."""
    name: BackendName = request.param
    try:
        return load_backend(name), name
    except (CompatError, KernelError, ImportError) as error:
        pytest.skip(f"the {name} backend cannot be loaded: {error}")


def taking_turns() -> list[object]:
    shapes = [Case("power-law", torch.float32, heads, width) for heads, width in SHAPES]
    return [
        pytest.param(
            check,
            case,
            id=f"{check.__name__.removeprefix('check_')}-{case}",
            marks=marks_of(case not in shapes or (shapes.index(case) + turn) % 2 == 0),
        )
        for turn, check in enumerate(CHECKS)
        for case in CASES
    ]


@pytest.mark.parametrize(("check", "case"), taking_turns())
def test_kernels(backend: tuple[Backend, str], check: Callable[..., None], case: Case) -> None:
    kernels, device = backend
    if device == "cuda" and case.dtype == torch.float64:
        pytest.skip("float64 on CUDA goes to the reference")
    check(kernels, case, device=device)


@pytest.mark.parametrize(
    "case", [case for case in CASES if (case.heads, case.width) in SHAPES_OF_THE_REFERENCE], ids=str
)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_reference(check: Callable[..., None], case: Case) -> None:
    check(load_backend("naive"), case)
