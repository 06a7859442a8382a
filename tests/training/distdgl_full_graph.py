# SPDX-License-Identifier: Apache-2.0
"""A DistDGL script that `test_distdgl_full_graph` runs on servers and trainers: many checks in one job.

    python distdgl_full_graph.py GRAPH_NAME RESULTS_FOLDER CASES TRANSPORT...

Each trainer writes `rank<r>.pt`: what it computed for each case and transport.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dgl_hybrid  # mends DGL, so before it  # isort: skip
import dgl

from tests.helpers.exactness import Case, step_on


def main(graph_name: str, results: Path, cases: list[Case], transports: list[str]) -> None:
    dgl.distributed.initialize(os.environ.get("DGL_IP_CONFIG"))
    dist.init_process_group("gloo")
    g = dgl.distributed.DistGraph(graph_name)
    outcome: dict[str, Any] = {}
    for transport in transports:
        view = dgl_hybrid.PartitionedGraph.from_dist_graph(g, transport=transport)
        original_ids = view.ndata["id"].local
        outcome[transport] = [step_on(g, view, case, original_ids, transport=transport) for case in cases]
    torch.save(outcome, results / f"rank{view.rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(
        sys.argv[1],
        Path(sys.argv[2]),
        torch.load(sys.argv[3], weights_only=False),
        sys.argv[4:],
    )
