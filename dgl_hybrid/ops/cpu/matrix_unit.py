# SPDX-License-Identifier: Apache-2.0
"""The matrix unit of some x86 processors (Intel's AMX), and float32 numbers for it, which it does not multiply.

It multiplies matrices of 16 rows of 32 numbers and of 32 rows of 16, sixteen times as fast as vector units multiply
float32, but numbers of 8 significant bits (bfloat16); sums are float32. A float32 number has 24 of them, so it is the
sum of three such parts, to the last bit. Of the nine products of the parts of two numbers, six matter: the other three
together are below 2^-26 of the whole, a fourth of what rounding the product to float32 may change (Henry, Tang and
Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations", ARITH 2019).

The unit takes numbers below the normal range for 0, so parts must not lie there unless numbers below the normal range
are to be taken for 0 anyway; infinity has no parts, and those of large numbers may overflow with opposite signs.
Kernels look for such numbers and leave them to vectors.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from collections.abc import Sequence

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numpy as np

from dgl_hybrid.ops.cpu.ir import KernelBuilder, Pointer, Value

SIZE = 16
"""Rows of a matrix register, and float32 numbers of each."""
DEPTH = 32
"""Parts of a row of the left operand, and rows of the right one."""
NUM_PARTS = 3
REGISTER_PARTS = SIZE * DEPTH
"""Parts that a register holds."""
STEP_PARTS = NUM_PARTS * REGISTER_PARTS
"""Those of a step of a right operand's columns, or of a left one's rows."""

LEAST_OPERAND, LEAST_GRADIENT = 2.0**-40, 2.0**-60
"""Numbers that are nearer to 0, but not 0, are left to vectors. Of products of others what the unit takes for 0, below
2^-126, is below 2^-26 of the whole. Gradients are multiplied by operands, never by each other."""
MOST = 2.0**60
"""Numbers from here on are left to vectors, too: no product of others overflows, so a sum that does is infinite as it
would be by vectors, and not NaN, as it were if parts of opposite signs did."""


@functools.cache
def _bits_of(number: float) -> int:
    return int(np.float32(number).view(np.int32))


_MOST_BITS = _bits_of(MOST)
_TINY, _HALF = np.finfo(np.float32).tiny, np.float32(0.5)

_ARCH_PRCTL, _ASK, _TILE_DATA = 158, 0x1023, 18
"""Linux grants the unit, 8 KiB of registers, to processes that ask (arch_prctl, ARCH_REQ_XCOMP_PERM)."""


@functools.cache
def has_matrix_unit() -> bool:
    """Whether kernels of this process may use it; not where the variable DGL_HYBRID_MATRIX_UNIT is 0."""
    if os.environ.get("DGL_HYBRID_MATRIX_UNIT") == "0":
        return False
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    features = llvm.get_host_cpu_features()
    if not all(features.get(name) for name in ("amx-tile", "amx-bf16", "avx512f", "avx512bw")):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK, ctypes.c_ulong(_TILE_DATA)) == 0)


def least_bits(least: float) -> int:
    """What `Fitness` takes for `least`; 0 where this thread takes numbers below the normal range for 0."""
    return 0 if _TINY * _HALF == 0.0 else _bits_of(least)


class Fitness:
    """Notes, in a kernel, whether all float32 numbers that it sees may be multiplied by their parts.

    Args:
        least: From `least_bits`.
    """

    def __init__(self, k: KernelBuilder, least: Value) -> None:
        self._builder, self._least = k, least
        self._largest = k.variable(k.constant("i32", 0, SIZE))
        self._smallest = k.variable(k.constant("i32", -1, SIZE))

    def forget(self) -> None:
        """From here on, notes anew."""
        self._largest.set(self._builder.constant("i32", 0, SIZE))
        self._smallest.set(self._builder.constant("i32", -1, SIZE))

    def note(self, value: Value) -> None:
        """Sees a vector of at most 16."""
        bits = value.pad(SIZE, 0.0).bits("i32") & 0x7FFFFFFF
        self._largest.set(self._largest.get().maximum(bits))
        # Zero becomes the largest number without a sign.
        smallest = self._builder.intrinsic("umin", bits.type, self._smallest.get(), bits + -1)
        self._smallest.set(smallest)

    def are_fit(self) -> Value:
        """Whether all numbers since `forget` are."""
        largest, smallest = self._largest.get().fold_maximum(1), self._smallest.get()
        while (half := smallest.type.lanes // 2) >= 1:
            low, high = smallest.shuffle(range(half)), smallest.shuffle(range(half, 2 * half))
            smallest = self._builder.intrinsic("umin", low.type, low, high)
        is_none_less = (smallest + 1).compare("uge", self._least) | smallest.compare("eq", -1)
        return largest.compare("slt", _MOST_BITS) & is_none_less


def cut(value: Value) -> list[Value]:
    """The parts of a vector of 16 float32 numbers, each in the upper half of 32 bits whose lower half is anything."""
    found = []
    for part in range(NUM_PARTS):
        rounded = value.bits("i32") + 0x8000
        found.append(rounded)
        if part + 1 < NUM_PARTS:
            value = value - (rounded & -0x10000).bits("f32")
    return found


def halves(first: Value, second: Value) -> Value:
    """(32) the upper halves of 2 × 16 numbers of 32 bits, side by side: of a row of a left operand."""
    low, high = (value.halved() for value in (first, second))
    return low.join(high, range(1, 4 * SIZE, 2))


def pairs(first: Value, second: Value) -> Value:
    """(16) of two rows the upper halves, one below the other in each number of 32 bits: of a right operand."""
    return (first >> 16) | (second & -0x10000)


def turned(rows: Sequence[Value]) -> list[Value]:
    """Of 16 vectors of 16 numbers of 32 bits, rows to columns: pairs, then fours, then quarters of registers."""
    quarters = range(0, SIZE, 4)

    def in_quarters(first: Value, second: Value, lanes: Sequence[int]) -> Value:
        """In each quarter the given lanes, those of `second` counted from 4."""
        chosen = [quarter + (lane if lane < 4 else SIZE + lane - 4) for quarter in quarters for lane in lanes]
        return first.join(second, chosen)

    twos = []
    for first, second in zip(rows[::2], rows[1::2]):
        twos += [in_quarters(first, second, (0, 4, 1, 5)), in_quarters(first, second, (2, 6, 3, 7))]
    fours = []
    for i in range(0, SIZE, 4):
        for first, second in ((twos[i], twos[i + 2]), (twos[i + 1], twos[i + 3])):
            fours += [in_quarters(first, second, (0, 1, 4, 5)), in_quarters(first, second, (2, 3, 6, 7))]

    def quarters_of(first: Value, second: Value, odd: int) -> Value:
        """The even, or odd, quarters of both."""
        chosen = [base + 4 * (quarter + odd) + lane for base in (0, SIZE) for quarter in (0, 2) for lane in range(4)]
        return first.join(second, chosen)

    columns: list[Value] = [rows[0]] * SIZE
    for j in range(4):
        for odd in range(2):
            low, high = (quarters_of(fours[i + j], fours[i + 4 + j], odd) for i in (0, 8))
            columns[4 * odd + j], columns[4 * (odd + 2) + j] = quarters_of(low, high, 0), quarters_of(low, high, 1)
    return columns


class MatrixRegisters:
    """The eight registers of the unit, in a kernel: 0 to 3 hold sums, 4 and 5 left operands, 6 and 7 right ones."""

    def __init__(self, k: KernelBuilder) -> None:
        self._builder = k
        for name, types in (
            ("ldtilecfg", "ptr"),
            ("tilerelease", ""),
            ("tilezero", "i8"),
            ("tileloadd64", "i8, ptr, i64"),
            ("tilestored64", "i8, ptr, i64"),
            ("tdpbf16ps", "i8, i8, i8"),
        ):
            k.declare(f"declare void @llvm.x86.{name}({types})")

    def configure(self) -> None:
        """All of full size; before anything else, on each thread."""
        k = self._builder
        shape = k.scratch("i32", 16)
        # 64 bytes: palette 1; from byte 16 on the bytes of a row (16 bits each), from byte 48 the rows (8 bits).
        words = [1, 0, 0, 0, *[0x400040] * 4, 0, 0, 0, 0, *[0x10101010] * 2, 0, 0]
        shape.store(0, k.vector("i32", words))
        k.line(f"call void @llvm.x86.ldtilecfg(ptr {shape.ref})")

    def release(self) -> None:
        """Leaves nothing that the system would have to keep with the thread."""
        self._builder.line("call void @llvm.x86.tilerelease()")

    def zero(self, number: int) -> None:
        """All zeros."""
        self._builder.line(f"call void @llvm.x86.tilezero(i8 {number})")

    def load(self, number: int, where: Pointer, row_bytes: int = 64) -> None:
        """Reads 16 rows of 64 bytes."""
        self._builder.line(f"call void @llvm.x86.tileloadd64(i8 {number}, ptr {where.ref}, i64 {row_bytes})")

    def store(self, number: int, where: Pointer, row_bytes: int = 64) -> None:
        """Writes them."""
        self._builder.line(f"call void @llvm.x86.tilestored64(i8 {number}, ptr {where.ref}, i64 {row_bytes})")

    def multiply_add(self, total: int, left: int, right: int) -> None:
        """Total += left @ right."""
        self._builder.line(f"call void @llvm.x86.tdpbf16ps(i8 {total}, i8 {left}, i8 {right})")
