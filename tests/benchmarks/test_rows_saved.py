# SPDX-License-Identifier: Apache-2.0
"""What the benchmark counts is what a graph small enough to count by hand has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dgl
import torch

from benchmarks.exchange.rows_saved import measure_layers, table_of
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks


def run_layers(rank: int, world_size: int, part_config: str) -> list[dict[str, Any]]:
    return measure_layers(part_config, 2)


def test_counts_of_a_star_between_two_parts(tmp_path: Path) -> None:
    # Nodes 0 to 3 are one part, 4 to 7 the other. Node 0 reads 4 to 7, which all read 1: one sum and one row suffice.
    far = torch.arange(4, 8)
    graph = dgl.graph((torch.cat([far, torch.ones(4).long()]), torch.cat([torch.zeros(4).long(), far])), num_nodes=8)
    graph.ndata["train_mask"] = torch.ones(8, dtype=torch.bool)
    part_config = PartitionStore(tmp_path).get("star", graph, 2, "contiguous")
    results = run_ranks(2, run_layers, part_config)
    for record in results[0]:
        counts = [record[name] for name in ("edges", "rows_plain", "rows_sent", "sums", "sum_entries", "is_used")]
        assert counts == [8, 5, 2, 1, 4, True]
    assert [record["layer"] for record in results[1]] == [1, 2]
    common = {"graph": "star", "num_nodes": 8, "world_size": 2}
    assert table_of([common | record for record in results[0]]).row_count == 2
