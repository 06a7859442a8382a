# SPDX-License-Identifier: Apache-2.0
"""Functions of vectors that no machine has an instruction for: exp, and the random words of dropout."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dgl_hybrid.ops.cpu.ir import KernelBuilder, Kind, Pointer, Value


@dataclass(frozen=True)
class _ExpConstants:
    bits: Kind
    mantissa_bits: int
    exponent_of_one: int
    least: float
    ln2_high: float
    ln2_low: float
    degree: int


# ln 2 in two parts: n times the first is exact for the n that occur, so nothing is lost in x - n ln 2.
_EXP_CONSTANTS: dict[Kind, _ExpConstants] = {
    "f32": _ExpConstants("i32", 23, 0x3F800000, -87.33, 0.693359375, -2.12194440e-4, 7),
    "f64": _ExpConstants(
        "i64", 52, 0x3FF0000000000000, -708.39, 6.93147180369123816490e-01, 1.90821492927058770002e-10, 13
    ),
}


def exp(x: Value) -> Value:
    """E to the power x, within 2 units of the last place; 0 where that would be denormal; for x up to 88.

    x = n ln 2 + r with |r| <= ln 2 / 2; e^r by its Taylor series, whose remainder is below the rounding error; 2^n is
    written into the exponent's bits. n is rounded by adding 1.5 * 2^mantissa_bits, which leaves n in the last bits.
    """
    r, scale = _reduced(x)
    return x.compare("olt", _EXP_CONSTANTS[x.type.kind].least).select(0.0, _taylor(r, 0) * scale)


def exp_less_1(x: Value) -> Value:
    """E to the power x less 1, for x up to 88: as exact where that is small as elsewhere.

    2^n (e^r - 1) + (2^n - 1), in which nothing is taken from 1 that was rounded beside it.
    """
    r, scale = _reduced(x)
    result = (_taylor(r, 1) * r).multiply_add(scale, scale - 1.0)
    return x.compare("olt", _EXP_CONSTANTS[x.type.kind].least).select(-1.0, result)


def _reduced(x: Value) -> tuple[Value, Value]:
    """R and 2^n."""
    c = _EXP_CONSTANTS[x.type.kind]
    magic = 1.5 * 2.0**c.mantissa_bits
    shifted = x.multiply_add(1.0 / math.log(2.0), x.like(magic))
    n = shifted - magic
    r = n.multiply_add(-c.ln2_low, n.multiply_add(-c.ln2_high, x))
    return r, ((shifted.bits(c.bits) << c.mantissa_bits) + c.exponent_of_one).bits(x.type.kind)


def _taylor(r: Value, first: int) -> Value:
    """The series of e^r from its term of order `first` on, divided by r to the power of that."""
    degree = _EXP_CONSTANTS[r.type.kind].degree
    power = r.like(1.0 / math.factorial(degree))
    for order in reversed(range(first, degree)):
        power = power.multiply_add(r, r.like(1.0 / math.factorial(order)))
    return power


def leaky_relu(x: Value, slope: Value) -> Value:
    """X where it is positive, slope * x elsewhere."""
    return x.compare("ogt", 0.0).select(x, x * slope)


def leaky_relu_slope(x: Value, slope: Value) -> Value:
    """The derivative of `leaky_relu`: 1 where x is positive, slope elsewhere."""
    return x.compare("ogt", 0.0).select(1.0, slope.shuffle([0] * x.type.lanes))


@dataclass(frozen=True)
class DropoutArguments:
    """Dropout as a kernel sees it, of attention or rows; see "the mask function" in `ops/random_words.py`.

    `edge_keys` holds a key per edge row, or its address is 0: the edge row is the key. `columns` are the heads' words.
    Of rows: a key per row, and the columns' words.
    """

    kind: Kind
    keys: tuple[Value, Value]
    threshold: Value
    scale: Value
    edge_keys: Pointer | None
    columns: Pointer

    @classmethod
    def declare(cls, k: KernelBuilder, kind: Kind, has_edge_keys: bool) -> DropoutArguments:
        """Takes the arguments that `launch.dropout_arguments` passes."""
        keys = k.integer(), k.integer()
        threshold, scale = k.integer().convert("i32"), k.number(kind)
        edge_keys = k.pointer("i64")
        return cls(kind, keys, threshold, scale, edge_keys if has_edge_keys else None, k.pointer("i32"))

    def factors(self, edge: Value, heads: int) -> Value:
        """What the attention of that edge is multiplied by, per head: `scale` or 0."""
        return self.factors_of(self.words_of(edge), 0, heads)

    def words_of(self, edge: Value) -> tuple[Value, Value]:
        """The two halves of the word of that edge, or row."""
        key = edge if self.edge_keys is None else self.edge_keys.load(edge)
        word = _splitmix64(key * _signed64(0x9E3779B97F4A7C15) + self.keys[0])
        word = _splitmix64(word ^ self.keys[1])
        return word.convert("i32"), (word >> 32).convert("i32")

    def factors_of(self, halves: tuple[Value, Value], first: int, lanes: int) -> Value:
        """What that edge's, or row's, columns `first` to `first + lanes` are multiplied by."""
        low, high = halves
        words = self.columns.load(first, lanes) + low
        words = (words ^ (words >> 16)) * 0x7FEB352D
        words = (words ^ (words >> 15)) * (0x846CA68B - 2**32)
        words = words ^ high
        words = (words ^ (words >> 16)) * 0x7FEB352D
        return words.compare("sge", self.threshold).select(self.scale, low.builder.constant(self.kind, 0, lanes))


def _splitmix64(word: Value) -> Value:
    word = (word ^ (word >> 30)) * _signed64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> 27)) * _signed64(0x94D049BB133111EB)
    return word ^ (word >> 31)


def _signed64(word: int) -> int:
    return word - 2**64 if word >> 63 else word
