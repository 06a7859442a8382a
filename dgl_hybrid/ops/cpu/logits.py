# SPDX-License-Identifier: Apache-2.0
"""Numbers per entry and head, logits first of all, laid out so that exp and maximum run on full vectors.

With 4 heads and 16 lanes one vector holds the logits of 4 entries; with one head, of 16:

    scratch:  entry 0: h0 h1 h2 h3 | entry 1: h0 h1 h2 h3 | ...

The number of heads is padded to a power of two (above the machine's lanes, to a multiple of them).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from dgl_hybrid.ops.cpu.elementary import exp
from dgl_hybrid.ops.cpu.host import vector_unit
from dgl_hybrid.ops.cpu.ir import KernelBuilder, Kind, Pointer, Value
from dgl_hybrid.ops.cpu.lanes import ELEMENT_BYTES

CHUNK_ENTRIES = 64
"""Entries whose logits are held at once: a multiple of the lanes of every machine; 64 * 16 heads are 4 KiB."""


class LogitChunk:
    """Room for the logits of up to so many entries, one value per entry and head.

    What the methods call a head vector has `padded` lanes, one per head and some without meaning. Whole vectors are
    written and read behind the last entry.
    """

    def __init__(self, k: KernelBuilder, kind: Kind, heads: int, entries: int = CHUNK_ENTRIES) -> None:
        lanes = vector_unit().register_bytes // ELEMENT_BYTES[kind]
        self._k, self._kind, self._heads = k, kind, heads
        self.padded = next((2**i for i in range(lanes.bit_length()) if 2**i >= heads), -(-heads // lanes) * lanes)
        self._group_lanes = max(lanes, self.padded)
        self._group_entries = self._group_lanes // self.padded
        self._scratch = k.scratch(kind, entries * self.padded + self._group_lanes)

    def at(self, first: Value) -> LogitChunk:
        """The same room from its entry `first` on."""
        part = copy.copy(self)
        part._scratch = self.row(first)
        return part

    @contextmanager
    def chunks(self, begin: Value, end: Value) -> Iterator[tuple[Value, Value]]:
        """Runs the body for each chunk of the entries: (its first entry, how many)."""
        with self._k.loop(begin, end, CHUNK_ENTRIES) as first:
            yield first, self._k.intrinsic("smin", end.type, end - first, self._k.constant("i64", CHUNK_ENTRIES))

    def constant(self, value: float) -> Value:
        """A head vector of one value."""
        return self._k.constant(self._kind, value, self.padded)

    def heads_of(self, vector: Value) -> Value:
        """The heads' values of a head vector, without padding."""
        return vector.shuffle(range(self._heads))

    def clear_last(self, count: Value, value: float = float("-inf")) -> None:
        """Sets what lies behind the last of `count` entries in its vector; before they are put (count > 0)."""
        last = (count - 1) & -self._group_entries
        self._scratch.store(last * self.padded, self._k.constant(self._kind, value, self._group_lanes))

    def put(self, j: Value, logits: Value) -> None:
        """Sets the values of the chunk's entry j, one per head."""
        self._scratch.store(j * self.padded, logits)

    def put_heads(self, j: Value, logits: list[Value]) -> None:
        """The same with a number per head."""
        for head, logit in enumerate(logits):
            self._scratch.store(j * self.padded + head, logit)

    def row(self, j: Value) -> Pointer:
        """Where the values of entry j begin."""
        return self._scratch.at(j * self.padded)

    def get(self, j: Value) -> Value:
        """The values of entry j, one per head."""
        return self._scratch.load(j * self.padded, self._heads)

    def maximum(self, count: Value) -> Value:
        """The largest value of each head: a head vector."""
        best = self._k.variable(self._k.constant(self._kind, float("-inf"), self._group_lanes))
        with self._groups(count) as at:
            best.set(best.get().maximum(self._scratch.load(at, self._group_lanes)))
        return best.get().fold_maximum(self.padded)

    def exponentiate(self, count: Value, largest: Value | None = None) -> Value:
        """Replaces each value by exp(value - largest); returns their sums; head vectors both."""
        spread = None if largest is None else largest.shuffle([*range(self.padded)] * self._group_entries)
        total = self._k.variable(self._k.constant(self._kind, 0.0, self._group_lanes))
        with self._groups(count) as at:
            value = self._scratch.load(at, self._group_lanes)
            value = exp(value if spread is None else value - spread)
            self._scratch.store(at, value)
            total.set(total.get() + value)
        return total.get().fold_sum(self.padded)

    def multiply(self, count: Value, factors: LogitChunk) -> None:
        """Multiplies each value by that of `factors`."""
        with self._groups(count) as at:
            value = self._scratch.load(at, self._group_lanes)
            self._scratch.store(at, value * factors._scratch.load(at, self._group_lanes))

    def weighted_sum(self, count: Value, weights: LogitChunk) -> Value:
        """The sum of the values times those of `weights`: a head vector."""
        total = self._k.variable(self._k.constant(self._kind, 0.0, self._group_lanes))
        with self._groups(count) as at:
            value, weight = (chunk._scratch.load(at, self._group_lanes) for chunk in (self, weights))
            total.set(value.multiply_add(weight, total.get()))
        return total.get().fold_sum(self.padded)

    def select_where_positive(self, count: Value, values: LogitChunk) -> Value:
        """Replaces each value by that of `values` where it is positive, by 0 elsewhere; returns their sums."""
        zero = self._k.constant(self._kind, 0.0, self._group_lanes)
        total = self._k.variable(zero)
        with self._groups(count) as at:
            is_positive = self._scratch.load(at, self._group_lanes).compare("ogt", 0.0)
            value = is_positive.select(values._scratch.load(at, self._group_lanes), zero)
            self._scratch.store(at, value)
            total.set(total.get() + value)
        return total.get().fold_sum(self.padded)

    @contextmanager
    def _groups(self, count: Value) -> Iterator[Value]:
        with self._k.loop(0, count * self.padded, self._group_lanes) as at:
            yield at
