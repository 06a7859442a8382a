# SPDX-License-Identifier: Apache-2.0
"""The kernels under the compiler's sanitizers: undefined behaviour, misaligned vectors, foreign memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.ops.simt.build import needs_compiler
from tests.ops.simt.cases import default_cases

pytestmark = [needs_compiler, pytest.mark.slow]

FAMILIES = sorted({case.options.kernels for case in default_cases()})


@pytest.mark.parametrize("sanitizer", ["undefined", "address"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sanitizer_is_content(family: str, sanitizer: str) -> None:
    environment = dict(os.environ, ASAN_OPTIONS="detect_leaks=0:detect_stack_use_after_return=0")
    if sanitizer == "address":
        found = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
        if not os.path.isabs(found.stdout.strip()):
            pytest.skip("libasan is not installed")
        environment["LD_PRELOAD"] = found.stdout.strip()
    command = [sys.executable, "-m", "tests.ops.simt.guarded", "plain", "--sanitizer", sanitizer]
    names = [case.name for case in default_cases() if case.options.kernels == family]
    done = subprocess.run([*command, *names], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"after {done.stdout.split()[-1:]}:\n{done.stderr[-4000:]}"
