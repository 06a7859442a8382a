# SPDX-License-Identifier: Apache-2.0
"""Reads from a DistDGL data loader, before it runs, what it is going to read: its seeds, batches and fanouts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from dgl import DGLError
from dgl.dataloading.dist_dataloader import EdgeCollator, NodeCollator
from dgl.distributed import DistGraph, graph_services
from torch import Tensor

from dgl_hybrid.sampling.expected_reads import EDGES_AT_ONCE, Fanout, LoaderAccess
from dgl_hybrid.sampling.id_sums import IdSums


def graph_of_loader(collate_fn: Any) -> Any:
    """Returns the `DistGraph` that a loader's collate function samples from, or None if it cannot be told."""
    owner = getattr(collate_fn, "__self__", collate_fn)
    g = _attribute(owner, "g_sampling")
    g = _attribute(owner, "g") if g is None else g
    return g if isinstance(g, DistGraph) else None


def _attribute(owner: Any, name: str, default: Any = None) -> Any:
    """An attribute of an object of the script's, which may be a property that cannot be asked yet."""
    try:
        return getattr(owner, name, default)
    except Exception:
        return default


def read_loader(
    g: Any,
    dataset: Any,
    batch_size: int,
    drop_last: bool,
    collate_fn: Any,
    *,
    seen: set[tuple[object, ...]] | None = None,
) -> LoaderAccess | None:
    """Returns what a loader will read, as far as its objects say; None when they do not.

    DGL's node and edge collators are understood, and objects of scripts with `fanouts` whose data set is node ids (the
    way DistDGL scripts were written before those collators).

    Args:
        g: What `graph_of_loader` found.
        dataset, batch_size, drop_last, collate_fn: As `DistDataLoader` gets them.
        seen: Edge loaders that were read before, to which this one is added; None for one of them. The ends of its
            edges are asked of their owners, and scripts make the same loader again for every evaluation.
    """
    owner = getattr(collate_fn, "__self__", collate_fn)

    def count_batches(num_seeds: int) -> int:
        return num_seeds // batch_size if drop_last else math.ceil(num_seeds / batch_size)

    if isinstance(owner, (NodeCollator, EdgeCollator)):
        sampler = _attribute(owner, "graph_sampler")
        fanouts = _read_fanouts(g, _attribute(sampler, "fanouts"), first_drawn_last=True)
        wanted = _attribute(owner, "nids" if isinstance(owner, NodeCollator) else "eids")
        if fanouts is None or wanted is None or _attribute(sampler, "edge_dir", "in") != "in":
            return None
        if isinstance(owner, NodeCollator) and isinstance(wanted, Mapping) and not set(wanted) <= set(g.ntypes):
            return None  # DGL says so when it samples
        replace = bool(_attribute(sampler, "replace", False))
        by_structure = _attribute(sampler, "prob") is None  # which has masks, too
        # Of what is drawn from: scripts' own loaders may hand over another form of it, by type say.
        num_batches = count_batches(sum(map(len, wanted.values())) if isinstance(wanted, Mapping) else len(wanted))
        if isinstance(owner, NodeCollator):
            seeds, occurrences = _count(_homogeneous_nodes(g, wanted))
        else:
            if _attribute(owner, "g", g) is not g:
                return None  # edges of one graph, whose ids are of no meaning in the one that is sampled
            key = (*_edge_key(owner), num_batches, fanouts, replace, by_structure)
            if seen is not None and key in seen:
                return None
            seeds, occurrences = _edge_seeds(g, owner)
            if seen is not None:
                seen.add(key)
        return LoaderAccess(
            seeds=seeds,
            occurrences=occurrences,
            num_batches=num_batches,
            fanouts=fanouts,
            replace=replace,
            by_structure=by_structure,
        )
    fanouts = _read_fanouts(g, _attribute(owner, "fanouts"), first_drawn_last=False)
    ids = _as_ids(dataset)
    if fanouts is None or ids is None or len(g.ntypes) > 1:
        return None
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= g.num_nodes()):
        return None  # not node ids
    seeds, occurrences = _count(ids)
    return LoaderAccess(seeds=seeds, occurrences=occurrences, num_batches=count_batches(len(dataset)), fanouts=fanouts)


def _read_fanouts(g: Any, fanouts: Any, *, first_drawn_last: bool) -> tuple[Fanout, ...] | None:
    if isinstance(fanouts, (Tensor, np.ndarray)):
        fanouts = fanouts.tolist()
    if not isinstance(fanouts, Sequence) or isinstance(fanouts, str) or not fanouts:
        return None
    known: list[Fanout] = []
    for fanout in fanouts:
        if isinstance(fanout, Mapping):
            try:
                by_type = {g.to_canonical_etype(etype): int(limit) for etype, limit in fanout.items()}
            except (DGLError, TypeError, ValueError, OverflowError):
                return None  # by type of vertex, say: of a script's own sampler
            if set(by_type) != set(g.canonical_etypes):
                return None
            limits = tuple(by_type[etype] for etype in g.canonical_etypes)
            known.append(limits if len(limits) > 1 else limits[0])  # one type: nothing to tell apart
        elif isinstance(fanout, Integral) or (isinstance(fanout, Tensor) and fanout.numel() == 1):
            known.append(int(fanout))
        else:
            return None
    return tuple(known if first_drawn_last else reversed(known))


def _as_ids(dataset: Any) -> Tensor | None:
    if not isinstance(dataset, (Tensor, np.ndarray, list, tuple, range)):
        return None  # a data set of the script's own: it may make up items for ever
    try:
        ids = torch.as_tensor(dataset)
    except (TypeError, ValueError, RuntimeError):
        return None
    is_id = ids.dim() == 1 and not ids.is_floating_point() and ids.dtype != torch.bool
    return ids.to("cpu", torch.int64) if is_id else None


def _count(ids: Tensor) -> tuple[Tensor, Tensor]:
    unique, counts = torch.unique(ids, return_counts=True)
    return unique, counts.to(torch.float64)


def _homogeneous_nodes(g: Any, nids: Any) -> Tensor:
    book = g.get_partition_book()
    if isinstance(nids, Mapping):
        parts = [_homogeneous(book.map_to_homo_nid, ids, ntype) for ntype, ids in nids.items() if len(ids)]
        return torch.cat([torch.empty(0, dtype=torch.int64), *parts])
    if len(g.ntypes) == 1 and not book.is_homogeneous:
        return _homogeneous(book.map_to_homo_nid, nids, g.ntypes[0])
    ids: Tensor = nids.to(torch.int64)
    return ids


def _homogeneous(to_homogeneous: Any, ids: Tensor, of_type: Any) -> Tensor:
    mapped: Tensor = torch.as_tensor(to_homogeneous(ids.to(torch.int64), of_type))
    return mapped.to(torch.int64)


def _edge_key(collator: Any) -> tuple[object, ...]:
    """Equal for collators of the same edges and as many negatives, whatever asking for their ends would tell."""
    by_type = collator.eids if isinstance(collator.eids, Mapping) else {"": collator.eids}
    digests = [(str(etype), hash(eids.cpu().numpy().tobytes()), str(eids.dtype)) for etype, eids in by_type.items()]
    return (*sorted(digests), _negatives_per_edge(_attribute(collator, "negative_sampler")))


def _edge_seeds(g: Any, collator: Any) -> tuple[Tensor, Tensor]:
    """Both ends of the loader's edges, and what a uniform negative sampler adds to every vertex it draws from."""
    book = g.get_partition_book()
    by_type = collator.eids if isinstance(collator.eids, Mapping) else {g.canonical_etypes[0]: collator.eids}
    sums = IdSums()
    num_negatives = _negatives_per_edge(_attribute(collator, "negative_sampler"))
    for etype, eids in by_type.items():
        edges = eids.to(torch.int64)
        if not book.is_homogeneous:
            edges = _homogeneous(book.map_to_homo_eid, edges, etype)
        for some in edges.split(EDGES_AT_ONCE):
            for side in graph_services.find_edges(g, some):
                sums.add(torch.as_tensor(side).to(torch.int64), torch.ones(len(some), dtype=torch.float64))
        if num_negatives:
            of_type = g.to_canonical_etype(etype)[2]
            every = torch.arange(g.num_nodes(of_type))
            if not book.is_homogeneous:
                every = _homogeneous(book.map_to_homo_nid, every, of_type)
            times = num_negatives * len(eids) / max(len(every), 1)
            for some in every.split(EDGES_AT_ONCE):
                sums.add(some, torch.full((len(some),), times, dtype=torch.float64))
    return sums.result()


def _negatives_per_edge(negative_sampler: Any) -> float:
    """DGL's samplers name their number `k`; of others nothing is known, and what they draw is learnt while it runs."""
    number = _attribute(negative_sampler, "k", 0)
    return float(number) if isinstance(number, (int, float)) else 0.0
