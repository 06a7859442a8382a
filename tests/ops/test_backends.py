# SPDX-License-Identifier: Apache-2.0
"""Every backend that works here passes `backend_checks`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dgl_hybrid.errors import CompatError, KernelError
from dgl_hybrid.ops.backend import Backend, BackendName, load_backend
from tests.ops.backend_checks import CASES, CHECKS, Case

DEVICES: dict[BackendName, str] = {"naive": "cpu", "cpu": "cpu", "cuda": "cuda"}


@pytest.fixture(params=["naive", "cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def backend(request: pytest.FixtureRequest) -> tuple[Backend, str]:
    """The backend and the device its tensors lie on."""
    try:
        return load_backend(request.param), DEVICES[request.param]
    except (CompatError, KernelError, ImportError) as error:
        pytest.skip(f"the {request.param} backend cannot be loaded: {error}")


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_backend(backend: tuple[Backend, str], check: Callable[..., None], case: Case) -> None:
    kernels, device = backend
    if device == "cuda" and case.dtype == torch.float64:
        pytest.skip("float64 on CUDA goes to the reference")
    check(kernels, case, device=device)
