# SPDX-License-Identifier: Apache-2.0
"""What tells graphs apart, however they are partitioned: a run that is resumed must go on with its own."""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor

from dgl_hybrid.training.partitioned_graph import PartitionedGraph

SPLITS = ("train_mask", "val_mask", "test_mask")
_DIGEST_ENTRIES = 2**20


def facts_of_graph(g: PartitionedGraph, num_classes: int) -> dict[str, int | str]:
    """Returns sizes, how many vertices of each split have which label, and a sum over the rows of features; where the
    partition tells what ids were before it, also sums over which vertex has which label, splits and row, and over which
    vertex is joined to which. Collective.
    """
    label = g.ndata["label"].local
    of_splits = [label[g.ndata[split].local.bool()] for split in SPLITS]
    counts = [torch.bincount(labels, minlength=num_classes) for labels in of_splits]
    sums = g.communicator.sum_(torch.cat(counts).double()).long().tolist()
    digest = hashlib.sha256(json.dumps(sums).encode()).hexdigest()[:16]
    row_sums = _sums_of_bits(g.ndata["feat"].local)
    facts: dict[str, int | str] = {"vertices": g.num_nodes(), "edges": g.num_edges(), "labels": digest}
    facts["features"] = _total(g, row_sums)
    ids = g.partition.orig_node_ids
    if not all(row[0] for row in g.communicator.gather_ints([int(ids is not None)])) or ids is None:
        return facts
    splits = [g.ndata[split].local.to(torch.int64) << place for place, split in enumerate(SPLITS)]
    facts["rows"] = _total(g, _mixed(_mixed(_mixed(ids) + label.to(torch.int64)) + sum(splits)) * (2 * row_sums + 1))
    # The sum over edges of one number of the source times another one of the destination, source by source.
    of_destinations = _mixed(_mixed(ids)).repeat_interleave(g.partition.lists.counts)
    sources, partial = g.partition.lists.sum_by_source(of_destinations)
    facts["links"] = _total(g, _mixed(g.fetch_nodes(ids, sources)) * partial)
    return facts


def _total(g: PartitionedGraph, numbers: Tensor) -> str:
    """Adds numbers of all ranks up, modulo 2^64: exact, so the same however they are ordered and shared. Collective."""
    return f"{sum(row[0] for row in g.communicator.gather_ints([int(numbers.sum())])) % 2**64:016x}"


def _sums_of_bits(rows: Tensor) -> Tensor:
    """Returns (N,) int64: of each row of (N, F) the bit patterns added up, each column's times an odd number of its
    own, modulo 2^64.
    """
    bits = rows.contiguous().view(torch.int32 if rows.element_size() == 4 else torch.int64)
    factors = 2 * torch.arange(rows.shape[1]) + 1
    blocks = bits.split(max(1, _DIGEST_ENTRIES // max(1, rows.shape[1])))
    return torch.cat([(block.to(torch.int64) * factors).sum(dim=1) for block in blocks])


def _mixed(numbers: Tensor) -> Tensor:
    """Returns int64 numbers of which each bit depends on all bits of one: the finaliser of SplitMix64 (Steele et al.,
    Fast Splittable Pseudorandom Number Generators, OOPSLA 2014, section 4.2).
    """
    mixed = numbers + _as_int64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ _shifted(mixed, 30)) * _as_int64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _as_int64(0x94D049BB133111EB)
    return mixed ^ _shifted(mixed, 31)


def _shifted(numbers: Tensor, places: int) -> Tensor:
    """Shifts to the right as if they had no sign."""
    return (numbers >> places) & ((1 << (64 - places)) - 1)


def _as_int64(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
