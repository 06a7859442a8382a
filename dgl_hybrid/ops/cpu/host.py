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

    @property
    def summed_bytes(self) -> int:
        """Of a row, how much kernels add up at once: as much as all registers hold, 512 bytes at most.

        That leaves none for operands where registers are few, so that sums wait in the nearest cache meanwhile. To go
        over the entries twice, with half of the columns each time, takes longer: 1.1 to 1.4 times (Zen 3, 16 registers
        of 32 bytes; sums and attention of 128 floats, 1.5 to 5 M edges).
        """
        return min(self.register_bytes * self.num_registers, 512)

    @property
    def compared_bytes(self) -> int:
        """The same where kernels keep the largest and where it came from: what half the registers hold of both."""
        return min(self.register_bytes * self.num_registers // 4, 256)

    @property
    def paired_bytes(self) -> int:
        """The same where kernels keep two sums of each column: what half of the registers hold, if there are many."""
        return self.register_bytes * self.num_registers // 4 if self.num_registers >= 32 else 0


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
