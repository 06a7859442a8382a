# SPDX-License-Identifier: Apache-2.0
"""Made-up blocks of one rank: small ones of sizes by which every tensor's rows can be told, and ones of given edges."""

from __future__ import annotations

import torch
from torch import Tensor

from dgl_hybrid.exchange.closure import LayerStructure, LevelSets
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.plan import ExchangePlan
from dgl_hybrid.exchange.segments import gather_segments, indptr_of
from dgl_hybrid.graph.build import build_layer_blocks
from dgl_hybrid.graph.layer_block import LayerBlock
from dgl_hybrid.partition.narrow_ids import NarrowIds, narrow, repeated


def _tiny_sizes(num_layers: int, taken: set[int]) -> tuple[list[int], list[int]]:
    """Chooses level sizes and edge counts that no dimension of the model equals, so that they identify rows."""
    used = set(taken)
    levels: list[int] = []
    edges: list[int] = []
    size = 61
    for _ in range(num_layers + 1):
        while not used.isdisjoint({size, size + 1}):
            size += 1
        levels.append(size)
        used |= {size, size + 1}  # the latter is what a CSC structure of that many rows begins with
        size += 37
    for destinations in levels[:-1]:
        count = destinations * 4 + 3
        while count in used:
            count += 1
        edges.append(count)
        used.add(count)
    # levels[0] is |C_L|; edges[k] belong to the layer with destinations levels[k].
    return levels[::-1], edges[::-1]


def rows_alone(sizes: list[int]) -> list[int]:
    """Returns the rows of tiny blocks that read themselves alone, and that no other row reads: of every level, of so
    many rows, the first and the last, so that models that look at either can be told.
    """
    return sorted({0, *(size - 1 for size in sizes)})


def build_tiny_blocks(num_layers: int, taken: set[int]) -> tuple[list[LayerBlock], list[int], list[int]]:
    """Builds blocks that need no other rank.

    Args:
        num_layers: How many.
        taken: Numbers that no level and no edge count may equal.

    Returns:
        `(blocks, sizes, num_edges)`: (L,) blocks, (L + 1,) rows of each level, (L,) edges of each layer.
    """
    sizes, num_edges = _tiny_sizes(num_layers, taken)
    layers = []
    is_alone = torch.zeros(sizes[0], dtype=torch.bool)
    is_alone[rows_alone(sizes)] = True
    for layer in range(1, num_layers + 1):
        num_dst, num_held, total = sizes[layer], sizes[layer - 1], num_edges[layer - 1]
        # Every destination reads itself and some others, but for a few: a change of their rows can reach another one
        # only through a layer that mixes rows.
        spare = torch.arange(total - num_dst)
        readers, read = ((~is_alone[:count]).nonzero().squeeze(1) for count in (num_dst, num_held))
        dst = torch.cat([torch.arange(num_dst), readers[spare % len(readers)]])
        src = torch.cat([torch.arange(num_dst), read[(spare * 7919 + 13) % len(read)]])
        order = torch.argsort(dst, stable=True)
        indptr = torch.zeros(num_dst + 1, dtype=torch.int64)
        torch.cumsum(torch.bincount(dst, minlength=num_dst), 0, out=indptr[1:])
        layers.append(_structure_of_one_rank(layer, num_held, indptr, src[order]))
    blocks = _blocks_of_one_rank(tuple(layers), tuple(sizes), out_degrees=torch.full((sizes[0],), 4))
    return blocks, sizes, num_edges


def sizes_like(sets: LevelSets) -> list[int]:
    """Returns (L + 1,) how many rows of each level a rank has to do with: those it computes, and those it receives.

    A layer reads from among so many, wherever they are computed: of a quarter of them more would stay in caches.
    """
    received = [layer.exchange.num_received for layer in sets.layers]
    sizes = [held + more for held, more in zip(sets.sizes, [*received, 0], strict=True)]
    for level in range(sets.num_layers, 0, -1):
        sizes[level - 1] = max(sizes[level - 1], sizes[level])
    return sizes


def build_blocks_like(
    sets: LevelSets, factor: float, taken: set[int], *, without_edges: frozenset[int] = frozenset()
) -> tuple[list[LayerBlock], list[int], list[int]]:
    """Builds blocks that need no other rank, with the structure of a rank's own, or of part of it, or of copies of it.

    A row reads what the row it stands for reads: its first rows in a part, each copy for the most part its own rows.
    Received sources become rows held here, which read what others do.

    Args:
        sets: Of the rank.
        factor: Rows of each level, as a multiple of `sizes_like`.
        taken: Numbers that no level and no edge count may equal.
        without_edges: Layers whose destinations read themselves alone.

    Returns:
        As `build_tiny_blocks`.
    """
    used = set(taken)
    num_layers = sets.num_layers
    sizes = sizes_like(sets)
    for level in range(num_layers, -1, -1):
        sizes[level] = max(1, round(factor * sizes[level]))
        while sizes[level] in used or (level < num_layers and sizes[level] <= sizes[level + 1]):
            sizes[level] += 1
        used |= {sizes[level], sizes[level] + 1}  # the latter is what a CSC structure of that many rows begins with
    layers = []
    for structure in sets.layers:
        num_dst, num_held = sizes[structure.layer], sizes[structure.layer - 1]
        if structure.layer in without_edges or not structure.num_edges:
            counts, indices = torch.ones(num_dst, dtype=torch.int64), torch.arange(num_dst)
        else:
            rows = torch.arange(num_dst)
            counts, positions = gather_segments(structure.indptr, rows % structure.num_dst)
            num_sources = structure.num_held + structure.exchange.num_received
            shift = num_sources * torch.repeat_interleave(rows // structure.num_dst, counts)
            indices = (structure.indices[positions] + shift) % num_held
        spare = 0
        while len(indices) + spare in used:
            spare += 1
        used.add(len(indices) + spare)
        counts[-1] += spare
        indices = torch.cat([indices, torch.full((spare,), num_dst - 1)])
        layers.append(_structure_of_one_rank(structure.layer, num_held, indptr_of(counts), indices))
    degrees = torch.bincount(layers[0].indices, minlength=sizes[0]).clamp(min=1)
    num_edges = [layer.num_edges for layer in layers]
    blocks = _blocks_of_one_rank(
        tuple(layers),
        tuple(sizes),
        out_degrees=degrees,
        # A model may look up rows of its own by them.
        rows_global=repeated(sets.rows_global, sizes[0]),
        edge_ids=tuple(ids.repeated(count) for ids, count in zip(sets.edge_ids, num_edges, strict=True)),
    )
    return blocks, sizes, num_edges


def build_block_of(indptr: Tensor, sources: Tensor) -> LayerBlock:
    """Builds one block of N sources, which are its destinations too, that needs no other rank.

    Args:
        indptr: (N + 1,) int64.
        sources: (E,) int64 in [0, N).
    """
    num_nodes = len(indptr) - 1
    structure = _structure_of_one_rank(1, num_nodes, indptr, sources)
    out_degrees = torch.bincount(sources, minlength=num_nodes)
    return _blocks_of_one_rank((structure,), (num_nodes, num_nodes), out_degrees=out_degrees)[0]


def _structure_of_one_rank(layer: int, num_held: int, indptr: Tensor, sources: Tensor) -> LayerStructure:
    none = torch.empty(0, dtype=torch.int64)
    num_dst = len(indptr) - 1
    return LayerStructure(
        layer=layer,
        num_dst=num_dst,
        num_held=num_held,
        indptr=indptr,
        indices=narrow(sources, max(num_held, len(sources) + 1)),
        exchange=ExchangePlan(
            rank=0,
            world_size=1,
            layer=layer,
            num_rows=num_held,
            send_index=none,
            send_counts=(0,),
            recv_counts=(0,),
            recv_global=none,
            # Nothing to exchange, nothing to copy: what an exchange costs is priced by the row received, not held.
            is_idle=True,
        ),
    )


def _blocks_of_one_rank(
    layers: tuple[LayerStructure, ...],
    sizes: tuple[int, ...],
    *,
    out_degrees: Tensor,
    rows_global: Tensor | None = None,
    edge_ids: tuple[NarrowIds, ...] | None = None,
) -> list[LayerBlock]:
    if edge_ids is None:
        edge_ids = (NarrowIds(torch.arange(max(layer.num_edges for layer in layers))),) * len(layers)
    sets = LevelSets(
        rows_global=torch.arange(sizes[0]) if rows_global is None else rows_global,
        sizes=sizes,
        owned=torch.ones(sizes[0], dtype=torch.bool),
        layers=layers,
        edge_ids=edge_ids,
        num_borrowed=0,
    )
    return build_layer_blocks(
        sets,
        Communicator(None),
        out_degrees=out_degrees,
        device=torch.device("cpu"),
        weighted_out_degrees=lambda block, weight: torch.ones(block.structure.num_held),
    )
