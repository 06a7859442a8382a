# SPDX-License-Identifier: Apache-2.0
"""Rows or partial sums by a minimum vertex cover: the same linear map as plain rows, over the fewest rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dgl_hybrid.errors import ExchangeError
from dgl_hybrid.exchange.closure import LayerStructure
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.connect import create_communicator
from dgl_hybrid.exchange.partial_sums import (
    Order,
    PartialSums,
    _reads_by_owner,
    build_partial_sums,
    count_least_rows,
    cover_reads,
    minimum_vertex_cover,
    pack_ordered,
)
from dgl_hybrid.exchange.parts import RowsPart
from dgl_hybrid.exchange.plan import ExchangePlan, check_symmetry
from dgl_hybrid.exchange.segments import indptr_of
from dgl_hybrid.ops import SparseGraph, spmm
from tests.helpers.world import run_ranks, run_ranks_expect_errors

WIDTH = 3


@dataclass(frozen=True, kw_only=True)
class World:
    """One layer of every rank, made without processes, and the linear map that it is."""

    structures: list[LayerStructure]
    matrix: Tensor
    """(all destinations, all held rows) float64 number of edges, ranks one after the other."""


def make_world(
    world_size: int,
    num_nodes: int,
    edges: Tensor,
    *,
    owner: Tensor,
    replica_chance: float = 0.2,
    dst_share: float = 0.8,
    seed: int = 0,
) -> World:
    """Every rank holds its nodes and some replicas in any order; the first of them are destinations.

    Args:
        edges: (2, E) sources and destinations, ids in [0, num_nodes).
        owner: (num_nodes,) rank of each.
    """
    generator = torch.Generator().manual_seed(seed)
    held, num_dst = [], []
    for rank in range(world_size):
        chosen = (owner == rank) | (torch.rand(num_nodes, generator=generator) < replica_chance) & (owner >= 0)
        if not bool((owner == rank).any()):
            chosen[:] = False  # a rank without nodes has nothing at all
        rows = torch.nonzero(chosen).squeeze(1)
        held.append(rows[torch.randperm(len(rows), generator=generator)])
        num_dst.append(round(dst_share * len(rows)))
    row_offsets = [0, *torch.cumsum(torch.tensor([len(rows) for rows in held]), 0).tolist()]
    dst_offsets = [0, *torch.cumsum(torch.tensor(num_dst), 0).tolist()]
    matrix = torch.zeros(dst_offsets[-1], row_offsets[-1], dtype=torch.float64)
    sources_of: list[list[list[int]]] = []
    received: list[list[int]] = []
    for rank in range(world_size):
        here = set(held[rank].tolist())
        lists = [edges[0][edges[1] == node].tolist() for node in held[rank][: num_dst[rank]].tolist()]
        sources_of.append(lists)
        missing = {node for sources in lists for node in sources} - here
        received.append(sorted(missing, key=lambda node: (int(owner[node]), node)))
    structures = []
    position = [{node: k for k, node in enumerate(rows.tolist())} for rows in held]
    for rank in range(world_size):
        place = {node: len(held[rank]) + k for k, node in enumerate(received[rank])} | position[rank]
        sent = [[node for node in received[peer] if int(owner[node]) == rank] for peer in range(world_size)]
        plan = ExchangePlan(
            rank=rank,
            world_size=world_size,
            layer=1,
            num_rows=len(held[rank]),
            send_index=torch.tensor([position[rank][node] for rows in sent for node in rows], dtype=torch.int64),
            send_counts=tuple(len(rows) for rows in sent),
            recv_counts=tuple(sum(int(owner[node]) == peer for node in received[rank]) for peer in range(world_size)),
            recv_global=torch.tensor(received[rank], dtype=torch.int64),
            is_idle=not any(received),
        )
        lists = sources_of[rank]
        for row, sources in enumerate(lists):
            for node in sources:
                at = rank if node in position[rank] else int(owner[node])
                matrix[dst_offsets[rank] + row, row_offsets[at] + position[at][node]] += 1
        indices = torch.tensor([place[node] for sources in lists for node in sources], dtype=torch.int64)
        structures.append(
            LayerStructure(
                layer=1,
                num_dst=num_dst[rank],
                num_held=len(held[rank]),
                indptr=indptr_of(torch.tensor([len(sources) for sources in lists], dtype=torch.int64)),
                indices=indices,
                exchange=plan,
            )
        )
    check_symmetry([structure.exchange for structure in structures])
    return World(structures=structures, matrix=matrix)


def random_world(world_size: int, seed: int, *, num_nodes: int = 40, num_edges: int = 220, **kwargs: Any) -> World:
    """Power-law ends and many multiple edges."""
    generator = torch.Generator().manual_seed(seed)
    ends = (torch.rand(2, num_edges, generator=generator) ** 2 * num_nodes).long()
    ends[:, : num_edges // 4] = ends[:, num_edges // 4 : 2 * (num_edges // 4)]
    mixed = torch.randperm(num_nodes, generator=generator)
    ends = mixed[ends]
    owner = kwargs.pop("owner", torch.randint(world_size, (num_nodes,), generator=generator))
    return make_world(world_size, num_nodes, ends, owner=owner, seed=seed, **kwargs)


def held_graph(structure: LayerStructure) -> SparseGraph:
    is_held = structure.indices < structure.num_held
    dst = torch.repeat_interleave(torch.arange(structure.num_dst), structure.indptr.diff())
    return SparseGraph.from_coo(structure.indices[is_held], dst[is_held], structure.num_held, structure.num_dst)


def parts_of(world: World) -> list[RowsPart]:
    """What `build_partial_sums` would build, with messages handed over directly."""
    reads = [cover_reads(structure) for structure in world.structures]
    parts = []
    for rank, structure in enumerate(world.structures):
        orders = [Order.from_message(read.orders[rank].to_message(), read.orders[rank].sizes) for read in reads]
        parts.append(
            RowsPart(
                send_counts=tuple(order.num_wire_rows for order in orders),
                recv_counts=tuple(order.num_wire_rows for order in reads[rank].orders),
                pack=pack_ordered(structure.exchange, orders),
                dst_rows=reads[rank].dst_rows,
                edges=reads[rank].edges,
                are_sums=True,
            )
        )
    return parts


def run_split(world: World, parts: list[RowsPart], xs: list[Tensor]) -> list[Tensor]:
    """y = held·x + scatter(edges · exchange(pack · x)) on every rank; differentiable."""
    packed = [spmm(part.pack, x).split(part.send_counts) for part, x in zip(parts, xs, strict=True)]
    results = []
    for rank, (structure, part) in enumerate(zip(world.structures, parts, strict=True)):
        arrived = torch.cat([packed[owner][rank] for owner in range(len(parts))])
        total = spmm(held_graph(structure), xs[rank])
        results.append(total.index_add(0, part.dst_rows, spmm(part.edges, arrived)))
    return results


def check_parts(world: World, parts: list[RowsPart]) -> None:
    for rank, (structure, part) in enumerate(zip(world.structures, parts, strict=True)):
        part.pack.validate()
        part.edges.validate()
        assert part.pack.num_src == structure.num_held
        assert part.pack.num_dst == sum(part.send_counts)
        assert part.edges.num_src == sum(part.recv_counts)
        assert part.edges.num_dst == len(part.dst_rows)
        assert part.are_sums
        assert part.send_index is None
        assert bool((part.dst_rows.diff() > 0).all())
        assert bool((part.edges.in_edges.indptr.diff() > 0).all())
        assert bool((part.pack.in_edges.indptr.diff() > 0).all())
        for peer, other in enumerate(parts):
            assert part.send_counts[peer] == other.recv_counts[rank]
            assert part.recv_counts[peer] <= structure.exchange.recv_counts[peer]


def rows_of(world: World) -> list[int]:
    return [structure.num_held for structure in world.structures]


CASES = {
    "one rank": lambda: random_world(1, 0),
    "two ranks": lambda: random_world(2, 1),
    "three ranks": lambda: random_world(3, 2),
    "four ranks": lambda: random_world(4, 3),
    "dense": lambda: random_world(3, 4, num_nodes=20, num_edges=900),
    "sparse": lambda: random_world(4, 5, num_nodes=60, num_edges=70),
    "no replicas, all rows are destinations": lambda: random_world(4, 6, replica_chance=0.0, dst_share=1.0),
    "a rank without nodes": lambda: random_world(4, 7, owner=torch.arange(40) % 3),
    "a rank without destinations' neighbours": lambda: random_world(3, 8, dst_share=0.1),
    "no edges": lambda: random_world(3, 9, num_edges=0),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_linear_map_and_its_adjoint(case: str) -> None:
    world = CASES[case]()
    parts = parts_of(world)
    check_parts(world, parts)
    generator = torch.Generator().manual_seed(0)

    whole = torch.randint(-1000, 1000, (world.matrix.shape[1], WIDTH), generator=generator).double()
    results = torch.cat(run_split(world, parts, list(whole.split(rows_of(world)))))
    assert torch.equal(results, world.matrix @ whole)

    x = torch.randn(world.matrix.shape[1], WIDTH, dtype=torch.float64, generator=generator, requires_grad=True)
    y = torch.randn(world.matrix.shape[0], WIDTH, dtype=torch.float64, generator=generator)
    results = torch.cat(run_split(world, parts, list(x.split(rows_of(world)))))
    (gradient,) = torch.autograd.grad(results, x, y, allow_unused=True)
    gradient = torch.zeros_like(x) if gradient is None else gradient
    torch.testing.assert_close(results, world.matrix @ x, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, world.matrix.T @ y, rtol=0, atol=1e-12)
    torch.testing.assert_close((results * y).sum(), (x * gradient).sum(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_the_least_rows_are_counted_without_their_cover(case: str) -> None:
    for structure in CASES[case]().structures:
        assert count_least_rows(structure) == [order.num_wire_rows for order in cover_reads(structure).orders]


def test_edges_of_each_owner_are_found_among_those_of_all() -> None:
    """Edge by edge; a reader's edges come from several owners in turns, which one owner's are picked out of."""
    num_turns = 0
    for structure in random_world(4, 3).structures:
        offsets, expected = structure.exchange.recv_offsets, [list[tuple[int, int]]() for _ in range(4)]
        for dst in range(structure.num_dst):
            owners = []
            for index in structure.indices[structure.indptr[dst] : structure.indptr[dst + 1]].tolist():
                if (row := index - structure.num_held) >= 0:
                    owners.append(next(peer for peer in range(4) if offsets[peer] <= row < offsets[peer + 1]))
                    expected[owners[-1]].append((dst, row - offsets[owners[-1]]))
            num_turns += owners != sorted(owners)
        found = [list(zip(dst.tolist(), row.tolist(), strict=True)) for dst, row in _reads_by_owner(structure)]
        assert found == expected
    assert num_turns > 4


def test_multiple_edges_count_in_sums_and_in_rows() -> None:
    # Rank 1 owns 2, 3 and 4. Node 0 reads 2 twice, 3 once and 4 thrice, node 1 reads 4 twice: 4 travels, and 2 + 2 + 3.
    edges = torch.tensor([[2, 2, 3, 4, 4, 4, 4, 4], [0, 0, 0, 0, 0, 0, 1, 1]])
    world = make_world(2, 5, edges, owner=torch.tensor([0, 0, 1, 1, 1]), replica_chance=0.0, dst_share=1.0)
    parts = parts_of(world)
    order = cover_reads(world.structures[0]).orders[1]
    assert order.rows.tolist() == [2]
    assert order.sum_counts.tolist() == [3]
    assert order.sum_rows.tolist() == [0, 0, 1]
    assert parts[1].send_counts == (2, 0)
    assert parts[0].edges.num_edges == 3 + 2 + 1
    x = torch.tensor([[1.0], [10.0], [100.0], [1000.0], [10000.0]], dtype=torch.float64)
    assert torch.equal(torch.cat(run_split(world, parts, list(x.split([2, 3])))), world.matrix @ x)


def brute_force(neighbours: Sequence[set[int]]) -> tuple[int, int]:
    """Tries all sets of sources; returns the least size of a cover, and the most sources of one of that size."""
    best = (len(neighbours) + 1, 0)
    for chosen in range(2 ** len(neighbours)):
        left = set[int]().union(*(seen for source, seen in enumerate(neighbours) if not chosen >> source & 1))
        rows = chosen.bit_count()
        best = min(best, (rows + len(left), -rows))
    return best[0], -best[1]


@pytest.mark.parametrize("num_sources", [1, 4, 7])
@pytest.mark.parametrize("chance", [0.1, 0.3, 0.6])
def test_the_cover_is_the_least_with_most_rows(num_sources: int, chance: float) -> None:
    generator = torch.Generator().manual_seed(num_sources)
    for _ in range(40):
        has_edge = torch.rand(6, num_sources, generator=generator) < chance
        dst, source = (ends.repeat_interleave(2) for ends in torch.nonzero(has_edge).unbind(1))
        is_row, is_sum = minimum_vertex_cover(dst.numpy(), source.numpy(), num_sources, 6)
        assert bool((is_row[source] | is_sum[dst]).all())
        neighbours = [set(torch.nonzero(has_edge[:, k]).squeeze(1).tolist()) for k in range(num_sources)]
        assert (int(is_row.sum()) + int(is_sum.sum()), int(is_row.sum())) == brute_force(neighbours)


@pytest.mark.parametrize("one_more", [False, True])
def test_long_alternating_paths(one_more: bool) -> None:
    # s0 - d0 - s1 - d1 - … and at the end a source without a partner, from which paths lead to everything, or none.
    num = 2000
    dst = torch.arange(num).repeat_interleave(2)[: None if one_more else -1]
    source = torch.stack([torch.arange(num), torch.arange(1, num + 1)], dim=1).reshape(-1)[: len(dst)]
    is_row, is_sum = minimum_vertex_cover(dst.numpy(), source.numpy(), num + one_more, num)
    assert int(is_row.sum()) == (0 if one_more else num)
    assert int(is_sum.sum()) == (num if one_more else 0)


def test_one_reader_of_many_and_many_readers_of_one() -> None:
    many, one, owner = torch.arange(1, 9), torch.zeros(8, dtype=torch.int64), torch.tensor([0] + [1] * 8)
    for edges, rank, sizes in ((torch.stack([many, one]), 0, [0, 1, 8]), (torch.stack([one, many]), 1, [1, 0, 0])):
        world = make_world(2, 9, edges, owner=owner, replica_chance=0.0, dst_share=1.0)
        assert cover_reads(world.structures[rank]).orders[1 - rank].sizes == sizes
        assert cover_reads(world.structures[1 - rank]).orders[rank].sizes == [0, 0, 0]
        check_parts(world, parts_of(world))


# -------------------------------------------------------------------- with processes


def run_built(rank: int, world_size: int, seed: int, min_saving: float) -> dict[str, Any]:
    world = random_world(world_size, seed)
    structure = world.structures[rank]
    communicator = create_communicator()
    built = build_partial_sums(communicator, structure, min_saving=min_saving)
    if built.part is None:
        return {"built": built}
    part, held = built.part, held_graph(structure)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(structure.num_held, WIDTH, dtype=torch.float64, generator=generator)
    y = torch.randn(structure.num_dst, WIDTH, dtype=torch.float64, generator=generator)
    arrived = communicator.exchange(spmm(part.pack, x), part.send_counts, part.recv_counts)
    result = spmm(held, x).index_add(0, part.dst_rows, spmm(part.edges, arrived))
    returned = communicator.exchange(spmm(part.edges.reverse(), y[part.dst_rows]), part.recv_counts, part.send_counts)
    gradient = spmm(held.reverse(), y) + spmm(part.pack.reverse(), returned)
    return {"built": built, "x": x, "y": y, "result": result, "gradient": gradient}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_build_what_they_would_without_processes(world_size: int) -> None:
    world = random_world(world_size, world_size)
    results = run_ranks(world_size, run_built, world_size, 0.0)
    if world_size == 1:
        assert results[0]["built"] == PartialSums(part=None, rows_plain=0, rows_sent=0)
        return
    parts = parts_of(world)
    check_parts(world, [result["built"].part for result in results])
    for result, part, structure in zip(results, parts, world.structures, strict=True):
        built: PartialSums = result["built"]
        assert built.rows_plain == sum(other.exchange.num_received for other in world.structures)
        assert built.rows_sent == sum(sum(other.recv_counts) for other in parts)
        assert built.rows_sent < built.rows_plain
        assert built.saving == pytest.approx(1 - built.rows_sent / built.rows_plain)
        assert built.part is not None
        assert torch.equal(built.part.pack.in_edges.indices, part.pack.in_edges.indices)
        assert structure.num_dst == len(result["result"])
    x, y = (torch.cat([result[name] for result in results]) for name in ("x", "y"))
    result, gradient = (torch.cat([one[name] for one in results]) for name in ("result", "gradient"))
    torch.testing.assert_close(result, world.matrix @ x, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, world.matrix.T @ y, rtol=0, atol=1e-12)
    torch.testing.assert_close((result * y).sum(), (x * gradient).sum(), rtol=1e-12, atol=1e-12)


def test_plain_rows_stay_on_all_ranks_where_little_is_saved() -> None:
    for result in run_ranks(3, run_built, 3, 0.9):
        built: PartialSums = result["built"]
        assert built.part is None
        assert 0 < built.rows_sent < built.rows_plain


def run_corrupt(rank: int, world_size: int, kind: str) -> None:
    structure = random_world(world_size, 4).structures[rank]
    communicator = create_communicator()
    if rank == 1:
        damage(communicator, structure, kind)
    build_partial_sums(communicator, structure, min_saving=0.0)


def damage(communicator: Communicator, structure: LayerStructure, kind: str) -> None:
    """Changes what rank 1 is told by rank 0, on arrival."""
    gather_ints, exchange = communicator.gather_ints, communicator.exchange
    sizes: list[int] = []

    def gather(values: Sequence[int]) -> list[list[int]]:
        told = gather_ints(values)
        if len(values) == 1:  # a report of `agreed`
            return told
        sizes.extend(told[0][4:8])
        if kind == "too many rows":
            told[0][5] += told[0][4]
        elif kind == "another plan":
            told[0][4] += 1
        return told

    def arrive(*args: Any, **kwargs: Any) -> Tensor:
        message: Tensor = exchange(*args, **kwargs)
        _, num_rows, num_sums, num_entries = sizes
        assert num_rows > 1
        assert num_sums > 0
        if kind == "row out of range":
            message[0] = structure.exchange.send_counts[0]
        elif kind == "negative entry":
            message[num_rows + num_sums] = -1
        elif kind == "row twice":
            message[1] = message[0]
        elif kind == "empty sum":
            message[num_rows] = 0
        elif kind == "long sum":
            message[num_rows] += num_entries
        return message

    communicator.gather_ints = gather  # type: ignore[method-assign]
    communicator.exchange = arrive  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("too many rows", "orders"),
        ("another plan", "partial sums do not fit the plan: rank 1 of 3 sends"),
        ("row out of range", "rows must lie in [0, "),
        ("negative entry", "(got -1.."),
        ("row twice", "rows must ascend"),
        ("empty sum", "each at least one"),
        ("long sum", "entries, each at least one"),
    ],
)
def test_a_damaged_message_ends_on_all_ranks(kind: str, words: str) -> None:
    errors = run_ranks_expect_errors(3, run_corrupt, kind)
    for error in errors:
        assert error.type_name == ExchangeError.__name__
        assert words in error.message
    assert errors[0].message == f"rank 1 of 3: {errors[1].message}"
