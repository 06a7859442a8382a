# SPDX-License-Identifier: Apache-2.0
"""Every backend that works here passes `backend_checks`.

The default run takes turns where shapes only choose other kernels: each check sees every second of them, and each of
them every second check; the slow run has them all. Dtypes, indices, orders of edges and odd graphs meet every check.
Of `sddmm`, whose every op on every pair of targets is a kernel of its own, each case has a third, in turn: each dtype
sees them all.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from dgl_hybrid.errors import CompatError, KernelError
from dgl_hybrid.ops.backend import Backend, BackendName, load_backend
from tests.helpers.thinning import marks_of
from tests.ops.backend_checks import CASES, CHECKS, Case, check_sddmm

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
    """Each check on every other case by default, and neighbouring checks on the others."""
    params = []
    for turn, check in enumerate(CHECKS):
        seen: Counter[torch.dtype] = Counter()
        for at, case in enumerate(CASES):
            name = f"{check.__name__.removeprefix('check_')}-{case}"
            is_kept = (at + turn) % 2 == 0
            if check is not check_sddmm:
                params.append(pytest.param(check, case, id=name, marks=marks_of(is_kept)))
                continue
            for third in range(3):
                part = functools.partial(check_sddmm, third=third)
                marks = marks_of(is_kept and third == seen[case.dtype] % 3)
                params.append(pytest.param(part, case, id=f"{name}-{third + 1}of3", marks=marks))
            seen[case.dtype] += is_kept
    return params


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
