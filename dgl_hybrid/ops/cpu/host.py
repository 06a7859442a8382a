# SPDX-License-Identifier: Apache-2.0
"""What the machine's vector unit can hold, and the compiler's view of the machine."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]

CODE_LEVEL = 3
"""How much LLVM does for the code that it generates, of 0 to 3."""


@dataclass(frozen=True)
class VectorUnit:
    """The vector registers of a machine."""

    register_bytes: int
    num_registers: int

    def accumulator_bytes(self, num_sums: int = 1) -> int:
        """How many bytes a kernel keeps of each of so many sums: at most half the registers in all.

        The rest are for operands and weights.
        """
        return min(self.register_bytes * self.num_registers // (2 * num_sums), 512)


@cache
def _target() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple()


def host_features() -> str:
    """What this processor offers, as LLVM writes it."""
    return str(llvm.get_host_cpu_features().flatten())


def new_target_machine() -> Any:
    """A target machine of LLVM for this processor, with everything the processor offers; an engine takes it over."""
    return _target().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=host_features(), opt=CODE_LEVEL, jit=True
    )


@cache
def vector_unit() -> VectorUnit:
    """The registers of this processor; 16 bytes each where its features do not tell."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return VectorUnit(64, 32)
    if features.get("avx"):
        return VectorUnit(32, 16)
    return VectorUnit(16, 32 if platform.machine() in ("aarch64", "arm64", "ppc64le") else 16)
