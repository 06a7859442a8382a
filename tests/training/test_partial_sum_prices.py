# SPDX-License-Identifier: Apache-2.0
"""Plans know that sums travel in place of more rows."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch.nn.functional as F

from dgl_hybrid import FullGraphLoader, PartitionedGraph
from dgl_hybrid.graph.optimize import optimize
from dgl_hybrid.planner import uniform_topology
from tests.helpers.exactness import Case
from tests.helpers.graphs import power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.thinning import each_value
from tests.helpers.world import run_ranks

NUM_LAYERS = 3


class Seen(NamedTuple):
    wire_s: tuple[float, ...]
    """Of this rank, by layer, without latencies."""
    rows: list[tuple[int, int]]
    """(plain, sent) of all ranks, by layer, as they travelled in an epoch."""


def train(rank: int, world_size: int, folder: str, kind: str, partial_sums: bool, **options: object) -> Seen:
    g = PartitionedGraph.open(folder)
    model = optimize(Case(kind=kind, num_layers=NUM_LAYERS).build(g.ndata["feat"].shape[1]))
    loader = FullGraphLoader(
        g,
        g.owned_nodes("train_mask"),
        NUM_LAYERS,
        model=model,
        strategy="depcomm",
        topology=uniform_topology(world_size, bandwidth_bytes_per_s=1e6, latency_s=0.0),
        partial_sums=partial_sums,
        **options,  # type: ignore[arg-type]
    )
    for input_nodes, seeds, blocks in loader:
        F.cross_entropy(model(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds]).backward()
    assert loader.outcome is not None
    estimate = loader.outcome.plan.estimate
    assert estimate is not None
    found = [block._split._shared.partial_sums for block in loader.blocks if block._split is not None]
    rows = [(0, 0) if sums is None else (sums.rows_plain, sums.rows_sent) for sums in found]
    return Seen(estimate.ranks[rank].comm_s, rows)


@each_value(kind=["gcn_both", "sage_mean"], world_size=[2, 3, 4])
def test_what_is_predicted_on_the_wire_is_what_travels(kind: str, world_size: int, partitions: PartitionStore) -> None:
    folder = partitions.get("power_law_400", power_law(400, 2400), world_size)
    plain, shared = (run_ranks(world_size, train, folder, kind, sums) for sums in (False, True))
    for layer in range(1, NUM_LAYERS):
        rows_plain, rows_sent = shared[0].rows[layer]
        assert rows_sent < 0.95 * rows_plain, "sums are to save something here"
        predicted = sum(seen.wire_s[layer] for seen in shared) / sum(seen.wire_s[layer] for seen in plain)
        assert predicted == pytest.approx(rows_sent / rows_plain, rel=1e-9)
    assert [seen.wire_s[0] for seen in shared] == [seen.wire_s[0] for seen in plain]


@pytest.mark.parametrize(
    ("kind", "options"), [("gat", {}), ("sage_mean", {"chunk_rows": 5}), ("sage_mean", {"overlap": False})]
)
def test_where_no_sums_travel_none_are_reckoned_with(
    kind: str, options: dict[str, object], partitions: PartitionStore
) -> None:
    folder = partitions.get("power_law_400", power_law(400, 2400), 3)
    plain, shared = (run_ranks(3, train, folder, kind, sums, **options) for sums in (False, True))
    assert [seen.wire_s for seen in shared] == [seen.wire_s for seen in plain]
    assert any(sum(seen.wire_s) for seen in plain)
    assert not any(sent for seen in shared for _, sent in seen.rows)
