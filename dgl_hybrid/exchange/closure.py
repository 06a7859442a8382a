# SPDX-License-Identifier: Apache-2.0
"""The level sets of a rank: which rows it computes and receives at each level, closed top-down over its plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.ids import Ownership, Routing, request_ids
from dgl_hybrid.exchange.in_edges import InEdges
from dgl_hybrid.exchange.locality import LocalPlaces, RowOrder, order_rows
from dgl_hybrid.exchange.plan import ExchangePlan
from dgl_hybrid.exchange.segments import are_many, difference, find_sorted, indptr_of, place_of, union, unique
from dgl_hybrid.partition.narrow_ids import NarrowIds, narrow_dtype


@dataclass(frozen=True, kw_only=True)
class ReplicaRows:
    """Rows of a level that are computed here and owned elsewhere, of which their owners hand out something."""

    exchange: ExchangePlan
    """From owned rows of the level to replicas."""
    positions: Tensor
    """(R,) int64 positions of the replicas in the level, in the order in which they are received."""

    def to(self, device: torch.device) -> ReplicaRows:
        """Returns the same with its positions on `device`."""
        return ReplicaRows(exchange=self.exchange.to(device), positions=self.positions.to(device))


@dataclass(frozen=True, kw_only=True)
class LayerStructure:
    """The bipartite structure of one layer on one rank and the exchange that completes its sources."""

    layer: int
    num_dst: int
    """|C_l|: rows this layer computes here."""
    num_held: int
    """|C_(l-1)|: source rows computed here; the destinations are their prefix."""
    indptr: Tensor
    """(num_dst + 1,) int64."""
    indices: Tensor
    """(E,) int32, or int64 where that is too narrow: source positions, below `num_held` held here, from there on
    received."""
    exchange: ExchangePlan
    replicas: ReplicaRows | None = None
    """Destinations without in-edges here, whose owners hand out what they aggregate for them; None: on no rank are
    there any, and every destination has all its in-edges."""
    is_like_below: bool = False
    """Whether the layer below has the same rows and edges, on all ranks; its tensors are shared then."""
    has_empty_rows: bool = False
    """Whether some destination, on any rank, has no in-edges in the whole graph."""

    @property
    def num_edges(self) -> int:
        """E."""
        return len(self.indices)


@dataclass(frozen=True, kw_only=True)
class LevelSets:
    """C_L ⊆ … ⊆ C_0 of one rank under one permutation, highest level first: C_l is the first `sizes[l]` rows."""

    rows_global: Tensor
    """(|C_0|,) int64 global ids."""
    sizes: tuple[int, ...]
    """(L + 1,) |C_l|."""
    owned: Tensor
    """(|C_0|,) bool: masters; the rest are replicas."""
    layers: tuple[LayerStructure, ...]
    """Layer l at position l - 1."""
    edge_ids: tuple[NarrowIds, ...]
    """Of each layer, global ids of its edges and maybe more after them: layers that share their edges share these."""
    num_borrowed: int
    """Seeds owned elsewhere that this rank computes only so that it has any; their weight is zero."""
    by_locality: bool = False
    """Whether owned rows of a class (those of one highest level) are by locality, not by id."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def num_recomputed(self, level: int) -> int:
        """Returns how many of a level's rows are replicas computed here."""
        return int((~self.owned[: self.sizes[level]]).sum())


def settle_seeds(communicator: Communicator, ownership: Ownership, seeds_global: Tensor) -> tuple[Tensor, int]:
    """Moves every seed to its owner; lends one to a rank that is left with none. Collective.

    Args:
        seeds_global: (n,) int64 in any order; duplicates, also across ranks, count once.

    Returns:
        `(seeds, num_borrowed)`: sorted owned seeds and 0, or one borrowed seed and 1.

    Raises:
        ValueError: On every rank, if a seed is out of range on any, or if no rank has a seed.
    """
    with communicator.agreed():
        if seeds_global.dim() != 1 or seeds_global.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"seeds must be a one-dimensional integer tensor (got {seeds_global.dtype}, "
                f"shape {tuple(seeds_global.shape)})"
            )
        ownership.check_range(seeds_global, "seeds")
    given = unique(seeds_global.to(torch.int64), ownership.total)
    mine = ownership.is_owned(given)
    routing = request_ids(communicator, ownership, given[~mine])
    seeds = union(given[mine], routing.send_local + ownership.start)
    first = communicator.gather_ints([int(seeds[0]) if len(seeds) else -1])
    lenders = [row[0] for row in first if row[0] >= 0]
    if not lenders:
        raise ValueError("no rank has a seed: the node ids given to the loader are empty everywhere")
    if len(seeds):
        return seeds, 0
    return torch.tensor([lenders[ownership.rank % len(lenders)]]), 1


def close_levels(
    communicator: Communicator,
    ownership: Ownership,
    in_edges: InEdges,
    seeds: Tensor,
    num_borrowed: int,
    cached: list[Tensor] | tuple[Tensor, ...],
    *,
    dense_below: int = 0,
    row_order: RowOrder = "id",
    places: LocalPlaces | None = None,
    owners_aggregate: bool = False,
    seed_order: Tensor | None = None,
) -> LevelSets:
    """Builds the level sets for a plan, top-down, with one id exchange per layer. Collective.

    Layer l reads level l - 1 of C_l and of its in-neighbours. A row that is not owned is computed here if the plan
    caches it or the level above needs it as its own row (nesting), and requested from its owner otherwise; the owner
    adds what it is asked for to its own set. So only what the seeds depend on is computed anywhere.

    Args:
        seeds: Sorted ids from `settle_seeds`.
        cached: For each level 0..L-1 the sorted ids of halo nodes computed here (level 0: held here) when needed.
        dense_below: Levels below this one hold every owned node, needed or not (a layer that mixes rows needs them).
        row_order: Of the rows of equal highest level, without effect on any result but the order of sums over rows.
            "id" on all ranks or on none.
        places: Of this graph, found for this row order; None: rows are by id.
        owners_aggregate: What layer 1 aggregates is the same in every epoch: vertices that are cached at level 1 get it
            from their owners, once, and need neither in-edges nor inputs of their in-neighbours here. Nothing is held
            of level 0 then but the rows of level 1 and owned ones. Alike on all ranks.
        seed_order: The same seeds in the order in which they are to come, whatever order the others have; None: in
            theirs.

    Returns:
        The sets, structures and exchange plans of all layers.
    """
    levels = _find_levels(
        communicator, ownership, in_edges, seeds, cached, dense_below=dense_below, owners_aggregate=owners_aggregate
    )
    rows_global = _order(levels, ownership.total, row_order, places)
    if seed_order is not None:
        rows_global = torch.cat([seed_order, rows_global[len(seed_order) :]])
    layers, edge_ids = _build_layers(levels, communicator, ownership, in_edges, rows_global)
    with communicator.agreed():
        for structure in layers:
            structure.exchange.validate()
            if structure.replicas is not None:
                structure.replicas.exchange.validate()
    return LevelSets(
        rows_global=rows_global,
        sizes=tuple(len(level) for level in levels.computed),
        owned=ownership.is_owned(rows_global),
        layers=layers,
        edge_ids=edge_ids,
        num_borrowed=num_borrowed,
        by_locality=places is not None and places.is_local(row_order),
    )


@dataclass(frozen=True, kw_only=True)
class _Levels:
    """Ids, sorted; and who sends what to whom."""

    computed: list[Tensor]
    """Of each level 0..L."""
    received: list[Tensor]
    """Of each level 0..L-1."""
    routings: list[Routing]
    """Of what is received."""
    replicas: Tensor
    """Those of level 1 for which owners aggregate."""
    lent: Routing | None
    """Of what owners aggregate for replicas; None: nothing, every destination has its in-edges."""


def _find_levels(
    communicator: Communicator,
    ownership: Ownership,
    in_edges: InEdges,
    seeds: Tensor,
    cached: list[Tensor] | tuple[Tensor, ...],
    *,
    dense_below: int,
    owners_aggregate: bool,
) -> _Levels:
    num_layers, num_ids = len(cached), ownership.total
    computed: list[Tensor] = [seeds] * (num_layers + 1)
    received: list[Tensor] = [seeds[:0]] * num_layers
    routings: list[Routing] = []
    lent: Routing | None = None
    replicas = seeds[:0]
    for layer in range(num_layers, 0, -1):
        level = layer - 1
        if layer == 1 and owners_aggregate:
            replicas = computed[1][~ownership.is_owned(computed[1])]
            lent = request_ids(communicator, ownership, replicas)
            computed[1] = union(computed[1], lent.send_local + ownership.start)
        above = computed[layer]
        readers = above if lent is None else above[ownership.is_owned(above)]
        in_edges.ensure(readers)
        _, src_global, _ = in_edges.lookup(readers)
        needed = unique(src_global, num_ids)
        is_owned = ownership.is_owned(needed)
        foreign = needed[~is_owned]
        is_cached, _ = find_sorted(cached[level] if lent is None else seeds[:0], foreign, num_ids)
        remote = difference(foreign[~is_cached], above, num_ids)
        routing = request_ids(communicator, ownership, remote)
        owned_here = ownership.owned() if level < dense_below else needed[is_owned]
        asked = routing.send_local + ownership.start
        computed[level] = union(above, owned_here, foreign[is_cached], asked, num_ids=num_ids)
        received[level] = remote
        routings.insert(0, routing)
    return _Levels(computed=computed, received=received, routings=routings, replicas=replicas, lent=lent)


def _order(levels: _Levels, num_ids: int, row_order: RowOrder, places: LocalPlaces | None) -> Tensor:
    """Returns the ids of C_0, highest level first. Collective."""
    computed = levels.computed
    classes = [computed[-1]]
    classes += [difference(computed[k], computed[k + 1], num_ids) for k in range(len(computed) - 2, -1, -1)]
    rows_global = torch.cat(classes)
    if places is None or not places.are_used(row_order):
        return rows_global
    return rows_global[order_rows([len(rows) for rows in classes], places.of(rows_global, row_order))]


def _build_layers(
    levels: _Levels, communicator: Communicator, ownership: Ownership, in_edges: InEdges, rows_global: Tensor
) -> tuple[tuple[LayerStructure, ...], tuple[NarrowIds, ...]]:
    """Returns structures and ids of edges of all layers. Collective: two gathers.

    Destinations are prefixes of one order, so a layer has the edges of the layers above in the order of each, which
    share its memory: of layer 1 only if no destination of layer 2 lacks its edges there. Sources have the same
    positions, too, where none is received: what one layer computes here, the layer below holds; and where both layers
    hold and receive the same, as in the middle of a deep model.
    """
    computed, received, num_ids = levels.computed, levels.received, ownership.total
    order = torch.argsort(rows_global)
    sorted_rows = rows_global[order]
    alike = [int(_is_like_below(levels, layer)) for layer in range(1, len(computed))]
    traffic = communicator.gather_ints([*map(len, received), len(levels.replicas), *alike])
    are_like_below = [all(column) for column in list(zip(*traffic, strict=True))[len(received) + 1 :]]

    def positions_of(ids: Tensor) -> Tensor:
        return order[find_sorted(sorted_rows, ids, num_ids)[1]]

    def plan_of(routing: Routing, layer: int, num_rows: int, ids: Tensor, column: int) -> ExchangePlan:
        return ExchangePlan(
            rank=ownership.rank,
            world_size=ownership.world_size,
            layer=layer,
            num_rows=num_rows,
            send_index=positions_of(routing.send_local + ownership.start),
            send_counts=routing.send_counts,
            recv_counts=routing.recv_counts,
            recv_global=ids,
            is_idle=not any(counts_of_rank[column] for counts_of_rank in traffic),
        )

    of_first = rows_global[: len(computed[1])]
    counts, src_global, eid_global = _lists_of_first_layer(in_edges, ownership, of_first, levels.lent)
    indptr, ids_of_edges = indptr_of(counts), NarrowIds(eid_global)
    del counts, eid_global
    layers: list[LayerStructure] = []
    edge_ids: list[NarrowIds] = []
    for layer in range(1, len(computed)):
        level = layer - 1
        is_apart = layer == 2 and levels.lent is not None and not bool(ownership.is_owned(computed[2]).all())
        if is_apart:
            counts, src_global, eid_global = in_edges.lookup(rows_global[: len(computed[2])])
            indptr, ids_of_edges = indptr_of(counts), NarrowIds(eid_global)
            del counts, eid_global
        edge_ids.append(ids_of_edges)
        num_dst, num_held = len(computed[layer]), len(computed[level])
        num_edges = int(indptr[num_dst])
        is_like_below = are_like_below[layer - 1]
        if layers and not is_apart and (is_like_below or not len(received[level])):
            indices = layers[-1].indices[:num_edges]
        else:
            indices = _find_sources(rows_global[:num_held], received[level], src_global[:num_edges], num_ids)
        replicas: ReplicaRows | None = None
        has_replicas = any(counts_of_rank[len(received)] for counts_of_rank in traffic)
        if layer == 1 and levels.lent is not None and has_replicas:
            ids = levels.replicas
            replicas = ReplicaRows(
                exchange=plan_of(levels.lent, 1, num_dst, ids, len(received)), positions=positions_of(ids)
            )
        layers.append(
            LayerStructure(
                layer=layer,
                num_dst=num_dst,
                num_held=num_held,
                indptr=indptr[: num_dst + 1],
                indices=indices,
                exchange=replace(layers[-1].exchange, layer=layer)
                if is_like_below
                else plan_of(levels.routings[level], layer, num_held, received[level], level),
                replicas=replicas,
                is_like_below=is_like_below,
            )
        )
    # Replicas have in-edges elsewhere: their owners are asked.
    empty = [int((layer.indptr.diff() == 0).sum()) for layer in layers]
    empty[0] -= len(layers[0].replicas.positions) if layers[0].replicas is not None else 0
    have_empty = [any(column) for column in zip(*communicator.gather_ints(empty), strict=True)]
    layers = [replace(layer, has_empty_rows=has) for layer, has in zip(layers, have_empty, strict=True)]
    return tuple(layers), tuple(edge_ids)


def _is_like_below(levels: _Levels, layer: int) -> bool:
    """Whether a layer and the one below compute, hold, receive and send the same rows on this rank."""
    if layer == 1 or (layer == 2 and levels.lent is not None):  # the first layer's edges may be others then
        return False
    sizes = {len(levels.computed[level]) for level in (layer, layer - 1, layer - 2)}  # nested: alike if as many
    received, received_below = levels.received[layer - 1], levels.received[layer - 2]
    routing, below = levels.routings[layer - 1], levels.routings[layer - 2]
    return (
        len(sizes) == 1
        and torch.equal(received, received_below)
        and (routing.send_counts, routing.recv_counts) == (below.send_counts, below.recv_counts)
        and torch.equal(routing.send_local, below.send_local)
    )


def _lists_of_first_layer(
    in_edges: InEdges, ownership: Ownership, rows_global: Tensor, lent: Routing | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `in_edges.lookup`; where owners aggregate for replicas, these have none."""
    if lent is None:
        return in_edges.lookup(rows_global)
    is_owned = ownership.is_owned(rows_global)
    counts_of_owned, src_global, eid_global = in_edges.lookup(rows_global[is_owned])
    counts = torch.zeros(len(rows_global), dtype=torch.int64)
    counts[is_owned] = counts_of_owned
    return counts, src_global, eid_global


def _find_sources(held_global: Tensor, received_global: Tensor, src_global: Tensor, num_ids: int) -> Tensor:
    """Returns (E,) source positions, received ones from len(held_global) on.

    Positions are int32 if they, and the numbers of the edges, all fit.

    Args:
        held_global: In any order; a source that is not among the received ones is among these.
        received_global: Sorted, none of them held.
        num_ids: All ids are below it.
    """
    num_held, num_sources = len(held_global), len(held_global) + len(received_global)
    dtype = narrow_dtype(max(num_sources, len(src_global) + 1))
    if are_many(src_global, num_ids):
        return place_of(torch.cat([held_global, received_global]), num_ids, dtype).index_select(0, src_global)
    is_received, received_position = find_sorted(received_global, src_global)
    order = torch.argsort(held_global)
    _, position = find_sorted(held_global[order], src_global)
    indices = torch.where(is_received, received_position + num_held, order[position])
    return indices.to(dtype)
