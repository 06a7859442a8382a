# SPDX-License-Identifier: Apache-2.0
"""What lists are planned to take against what they take when they are laid out."""

from __future__ import annotations

import math
from types import SimpleNamespace

import dgl_hybrid  # noqa: F401  before dgl, which it makes importable

# isort: split
import pytest
import torch
from torch import Tensor

from dgl_hybrid.sampling.halo_graph import pack_lists
from dgl_hybrid.sampling.in_edge_lists import EdgeLists
from dgl_hybrid.sampling.list_sizes import ListSizes, fitting, list_sizes

NUM_NODES = 100_000


def book(num_edges: int, num_types: int) -> SimpleNamespace:
    def type_of(eids: Tensor) -> tuple[Tensor, Tensor]:
        return eids % num_types, eids

    return SimpleNamespace(
        _num_nodes=lambda: NUM_NODES,
        _num_edges=lambda: num_edges,
        canonical_etypes=[("a", str(k), "a") for k in range(num_types)],
        map_to_per_etype=type_of,
    )


@pytest.mark.parametrize("num_sources", [2000, NUM_NODES], ids=["shared-sources", "own-sources"])
@pytest.mark.parametrize("num_types", [1, 3])
@pytest.mark.parametrize("num_edges", [50_000, 2**31, 2**31 + 1])
def test_lists_take_no_more_than_planned(num_edges: int, num_types: int, num_sources: int) -> None:
    """And not much less. It was 10 bytes an in-edge, whatever the graph: up to 24 are taken."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(0, NUM_NODES, 50)
    degrees = torch.randint(30, (len(ids),), generator=generator)
    num_entries = int(degrees.sum())
    lists = EdgeLists(
        counts=degrees,
        src_global=torch.randperm(NUM_NODES, generator=generator)[torch.arange(num_entries) % num_sources],
        eid_global=num_edges - 1 - torch.arange(num_entries),
    )
    packed = pack_lists(ids, lists, book(num_edges, num_types)).num_bytes
    sizes = list_sizes(book(num_edges, num_types), math.inf if num_edges < 2**31 else 1e9)
    alone = int(sizes.alone(degrees).sum()) + sizes.end_bytes
    counted = [int(each.sum()) + aside for each, aside in sizes.ways(degrees, num_sources)]
    assert counted[0] == alone
    assert packed <= min(counted) <= 1.35 * packed


def test_positions_of_more_than_any_budget_are_wide() -> None:
    assert list_sizes(book(2**31, 1), math.inf).entry_bytes == 8 + 4
    assert list_sizes(book(2**31, 1), 2.0**31).entry_bytes == 4 + 4
    assert list_sizes(book(2**31 + 1, 2), math.inf).entry_bytes == 3 * 8


def test_sources_count_with_each_entry_or_once() -> None:
    sizes = ListSizes(list_bytes=16, entry_bytes=8, source_bytes=8, end_bytes=4)
    (alone, end), (once, aside) = sizes.ways(torch.full((10,), 100), num_sources=50)
    assert (alone.tolist(), end) == ([1616] * 10, 4)
    assert (once.tolist(), aside) == ([816] * 10, 404)


@pytest.mark.parametrize(
    ("sizes", "room", "positions"),
    [
        ([3, 3, 3], 9.0, [0, 1, 2]),
        ([3, 9, 3, 5, 1, 1], 8.0, [0, 2, 4, 5]),
        ([9, 9], 8.0, []),
        ([9, 1], math.inf, [0, 1]),
        ([], 8.0, []),
        ([1], -1.0, []),
    ],
)
def test_what_no_longer_fits_is_passed_over(sizes: list[int], room: float, positions: list[int]) -> None:
    """The list of one hub kept out thousands of short ones."""
    assert fitting(torch.tensor(sizes, dtype=torch.int64), room).tolist() == positions
