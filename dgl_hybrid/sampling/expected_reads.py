# SPDX-License-Identifier: Apache-2.0
"""How often one epoch of a sampling loader will read each vertex: access probability propagated along in-edges.

The seeds of an epoch are spread over its batches at random. A vertex of some level's frontier draws `fanout` of its d
in-neighbours, so each is drawn with probability min(1, fanout / d); a batch reads a vertex once, however many drew it.
With the draws taken as independent, a vertex that is drawn `lam` times per batch in expectation is in the batch with
probability 1 - exp(-lam). The support is exact: what has expectation zero is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dgl_hybrid.exchange.segments import are_many
from dgl_hybrid.sampling.id_sums import IdSums
from dgl_hybrid.sampling.in_edge_lists import EdgeLists, cut_by_edges

Fanout = int | tuple[int, ...]
"""Of one layer; for a heterograph one for each edge type. -1: all."""

EDGES_AT_ONCE = 2**20
"""In-edges of a frontier that are weighed at a time; each takes about 100 bytes meanwhile."""


@dataclass(frozen=True, kw_only=True)
class LoaderAccess:
    """What is known of a sampling loader before it runs."""

    seeds: Tensor
    """(n,) int64, ascending, no duplicates; homogeneous ids."""
    occurrences: Tensor
    """(n,) float64: how often an epoch has each as a seed."""
    num_batches: int
    fanouts: tuple[Fanout, ...]
    """In the order of the layers, as samplers have them: the last one is drawn first, around the seeds."""
    replace: bool = False
    by_structure: bool = True
    """Whether it draws by structure alone. By weights or masks of edges only their owners do, so held lists are of no
    use to it."""

    @property
    def is_layer_wise(self) -> bool:
        """One layer with all neighbours: what inference uses, layer by layer, reading each input once a pass."""
        if len(self.fanouts) != 1:
            return False
        (fanout,) = self.fanouts
        return set(fanout if isinstance(fanout, tuple) else (fanout,)) == {-1}

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for loaders that read alike: scripts make the same one again for every evaluation."""
        same_seeds = (hash(self.seeds.numpy().tobytes()), hash(self.occurrences.numpy().tobytes()))
        return (*same_seeds, self.num_batches, self.fanouts, self.replace, self.by_structure)


@dataclass(frozen=True, kw_only=True)
class ExpectedReads:
    """Expected numbers per epoch, of the vertices that can be read at all."""

    ids: Tensor
    """(n,) int64, ascending."""
    as_seed: Tensor
    """(n,) float64: batches that have it as a seed."""
    as_frontier: Tensor
    """(n,) float64: times its in-edges are drawn, all layers together."""
    as_input: Tensor
    """(n,) float64: batches that have it as an input node."""

    @classmethod
    def none(cls) -> ExpectedReads:
        empty = torch.empty(0, dtype=torch.float64)
        return cls(ids=torch.empty(0, dtype=torch.int64), as_seed=empty, as_frontier=empty, as_input=empty)


class Lists(Protocol):
    """In-edge lists by id, as `InEdgeLists` has them."""

    def is_known(self, ids: Tensor) -> Tensor: ...

    def degrees(self, ids: Tensor) -> Tensor: ...

    def lookup(self, ids: Tensor) -> EdgeLists: ...


def expect_reads(
    loader: LoaderAccess,
    lists: Lists,
    *,
    make_known: Callable[[Tensor, Tensor], None],
    edge_type_of: Callable[[Tensor], Tensor] | None = None,
) -> ExpectedReads:
    """Propagates the seeds of a loader along in-edges, from the last layer to the inputs.

    Args:
        loader: Seeds, batches and fanouts.
        lists: Where in-edge lists are looked up. A vertex whose list stays unknown leads nowhere.
        make_known: Told of the vertices of a frontier, ascending, and how often each is drawn from; it may fetch lists.
        edge_type_of: Edge ids -> (E,) int64 type of each, for heterographs.
    """
    batches = float(max(loader.num_batches, 1))
    ids, reads = loader.seeds, batches * -torch.expm1(-loader.occurrences / batches)
    # An id that occurs at most once an epoch is in exactly that share of a batch, not in a Poisson number of them.
    reads = torch.where(loader.occurrences <= 1, loader.occurrences, reads)
    as_seed = (ids, reads)
    frontiers: list[tuple[Tensor, Tensor]] = []
    for fanout in reversed(loader.fanouts):
        frontiers.append((ids, reads))
        make_known(ids, reads)
        known = lists.is_known(ids)
        drawn_ids, drawn = _draw(lists, ids[known], reads[known], fanout, loader.replace, edge_type_of)
        merged = torch.unique(torch.cat([ids, drawn_ids]))
        before = _spread(merged, ids, reads)
        lam = _spread(merged, drawn_ids, drawn) / batches
        # A batch reads the destinations themselves, too: they are source rows of their block.
        ids, reads = merged, batches - (batches - before) * torch.exp(-lam)
    return _combine(ids, [as_seed], frontiers if loader.by_structure else [], [(ids, reads)])


def add_reads(first: ExpectedReads, second: ExpectedReads) -> ExpectedReads:
    """Returns the sum of two loaders' expectations."""
    ids = torch.unique(torch.cat([first.ids, second.ids]))
    return _combine(
        ids,
        [(first.ids, first.as_seed), (second.ids, second.as_seed)],
        [(first.ids, first.as_frontier), (second.ids, second.as_frontier)],
        [(first.ids, first.as_input), (second.ids, second.as_input)],
    )


def _draw(
    lists: Lists,
    ids: Tensor,
    reads: Tensor,
    fanout: Fanout,
    replace: bool,
    edge_type_of: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Sums over a frontier's in-edges the expected number of times each source is drawn."""
    sums = IdSums()
    for some in cut_by_edges(lists.degrees(ids), EDGES_AT_ONCE):
        of_some = lists.lookup(ids[some])
        sums.add(of_some.src_global, _times_drawn(of_some, reads[some], fanout, replace, edge_type_of))
    return sums.result()


def _times_drawn(
    lists: EdgeLists,
    reads: Tensor,
    fanout: Fanout,
    replace: bool,
    edge_type_of: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Expects how often each in-edge is drawn."""
    row = torch.repeat_interleave(torch.arange(len(lists.counts)), lists.counts)
    degree = lists.counts
    limit = torch.full((len(row),), fanout if isinstance(fanout, int) else -1, dtype=torch.int64)
    if not isinstance(fanout, int) or edge_type_of is not None:
        assert edge_type_of is not None
        per_type = torch.tensor(fanout) if not isinstance(fanout, int) else None
        edge_type = edge_type_of(lists.eid_global)
        num_types = int(edge_type.max()) + 1 if len(edge_type) else 1
        if per_type is not None:
            limit, num_types = per_type[edge_type], len(per_type)
        of_edge = _count_alike(row * num_types + edge_type, len(degree) * num_types).to(torch.float64)
    else:
        of_edge = degree[row].to(torch.float64)
    probability = torch.minimum(torch.ones_like(of_edge), limit / of_edge)
    if replace:
        probability = -torch.expm1(limit * torch.log1p(-1.0 / of_edge.clamp(min=1.0 + 1e-12)))
    return reads[row] * torch.where(limit < 0, 1.0, probability)


def _count_alike(kinds: Tensor, num_kinds: int) -> Tensor:
    """Returns for each of (n,) int64 `kinds` in [0, `num_kinds`) how often it is there."""
    if are_many(kinds, num_kinds):
        return torch.bincount(kinds, minlength=num_kinds)[kinds]
    # A table of all vertices and types is 8 GB for 100,000 vertices and 10,000 types.
    _, kind, counts = torch.unique(kinds, return_inverse=True, return_counts=True)
    return torch.as_tensor(counts[kind])


def _spread(all_ids: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    spread = torch.zeros(len(all_ids), dtype=torch.float64)
    spread[torch.searchsorted(all_ids, ids)] = values
    return spread


def _combine(
    ids: Tensor,
    seeds: Sequence[tuple[Tensor, Tensor]],
    frontiers: Sequence[tuple[Tensor, Tensor]],
    inputs: Sequence[tuple[Tensor, Tensor]],
) -> ExpectedReads:
    def summed(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        total = torch.zeros(len(ids), dtype=torch.float64)
        for part_ids, values in parts:
            total += _spread(ids, part_ids, values)
        return total

    return ExpectedReads(ids=ids, as_seed=summed(seeds), as_frontier=summed(frontiers), as_input=summed(inputs))
