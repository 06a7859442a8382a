# SPDX-License-Identifier: Apache-2.0
"""k-hop closure against breadth-first search on the whole graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dgl_hybrid.partition import Closure, LocalPartition, khop_closure, load_partition, partition_graph
from tests.helpers.graphs import NAMED

EMPTY = torch.empty(0, dtype=torch.int64)


def closure_of(part: LocalPartition, num_hops: int) -> Closure:
    return khop_closure(
        first_inner=int(part.node_offsets[part.part_id]),
        indptr=part.lists.indptr,
        src_global=part.lists.src_global,
        halo_global=part.halo_global,
        halo_indptr=part.halo_lists.indptr,
        halo_src_global=part.halo_lists.src_global,
        num_hops=num_hops,
    )


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("num_hops", [0, 1, 2, 3])
def test_equals_breadth_first_search(name: str, num_hops: int, tmp_path: Path) -> None:
    graph = NAMED[name]()
    mapping = partition_graph(graph, "g", 3, tmp_path, max(num_hops, 1), "random", return_mapping=True)
    assert mapping is not None
    global_of = torch.empty(graph.num_nodes(), dtype=torch.int64)
    global_of[mapping[0]] = torch.arange(graph.num_nodes())
    src, dst = (global_of[ends].tolist() for ends in graph.edges(order="eid"))
    for part_id in range(3):
        part = load_partition(tmp_path / "g.json", part_id)
        distance = dict.fromkeys(range(int(part.node_offsets[part_id]), int(part.node_offsets[part_id + 1])), 0)
        for hop in range(1, num_hops + 1):
            for u in [u for u, v in zip(src, dst, strict=True) if distance.get(v) == hop - 1]:
                distance.setdefault(u, hop)
        expected = {v: d for v, d in distance.items() if d > 0}
        found = closure_of(part, num_hops)
        assert found.is_complete
        assert found.halo_global.tolist() == sorted(expected)
        assert dict(zip(found.halo_global.tolist(), found.distance.tolist(), strict=True)) == expected


def test_the_docstring_example_seeds_and_blocked_vertices() -> None:
    arguments = {
        "first_inner": 0,
        "indptr": torch.tensor([0, 1, 1]),
        "src_global": torch.tensor([5]),
        "halo_global": torch.tensor([5]),
        "halo_indptr": torch.tensor([0, 1]),
        "halo_src_global": torch.tensor([7]),
    }
    found = khop_closure(num_hops=2, **arguments)
    assert (found.halo_global.tolist(), found.distance.tolist(), found.is_complete) == ([5, 7], [1, 2], True)
    assert khop_closure(num_hops=2, seeds=torch.tensor([1]), **arguments).halo_global.tolist() == []
    beyond = khop_closure(num_hops=3, **arguments)
    assert (beyond.is_complete, beyond.blocked.tolist()) == (False, [7])
    without = {**arguments, "halo_global": EMPTY, "halo_indptr": torch.tensor([0]), "halo_src_global": EMPTY}
    assert khop_closure(num_hops=2, **without).blocked.tolist() == [5]
    with pytest.raises(ValueError, match=r"num_hops must not be negative \(got -1\)"):
        khop_closure(num_hops=-1, **arguments)
    with pytest.raises(ValueError, match=r"seeds must be inner vertices 0\.\.1 \(got 5\.\.5\)"):
        khop_closure(num_hops=1, seeds=torch.tensor([5]), **arguments)
