# SPDX-License-Identifier: Apache-2.0
"""Machines without processes: every partition loaded here, and requests to one answered by its own server-side code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dgl_hybrid  # before dgl, which it makes importable

# isort: split
import dgl
import pytest
import torch
from dgl.distributed import rpc

from dgl_hybrid.partition.quiet import captured_output


@dataclass
class Machines:
    """All machines of a job, as their servers would see them."""

    graph: dgl.DGLGraph
    """Before partitioning."""
    states: list[SimpleNamespace]
    orig_nodes: torch.Tensor
    """Homogeneous id -> id in `graph` (homogeneous graphs only)."""
    num_requests: int = 0

    def view(self, machine: int) -> SimpleNamespace:
        """What of a `DistGraph` on that machine the lists and the halo graph look at."""
        state = self.states[machine]
        return SimpleNamespace(
            local_partition=state.graph, get_partition_book=lambda: state.partition_book, graph_name="case"
        )

    def answer(self, requests: list[tuple[int, Any]]) -> list[Any]:
        """Stands in for `rpc.remote_call_to_machine`, which fails without any request."""
        if not requests:
            raise ValueError("zero-size array to reduction operation maximum which has no identity")
        self.num_requests += len(requests)
        return [request.process_request(self.states[machine]) for machine, request in requests]


def start_machines(
    graph: dgl.DGLGraph,
    folder: Path,
    num_parts: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    num_hops: int = 1,
    part_method: str = "random",
) -> Machines:
    """Partitions a graph, loads all parts, and answers remote calls in this process."""
    nodes, _ = dgl_hybrid.partition_graph(
        graph, "case", num_parts, folder, num_hops=num_hops, part_method=part_method, return_mapping=True
    )
    states = []
    for part in range(num_parts):
        with captured_output("partition"):
            local, _, _, book, _, _, _ = dgl.distributed.load_partition(str(folder / "case.json"), part)
        states.append(SimpleNamespace(graph=local.formats("csc"), partition_book=book, kv_store=None))
    machines = Machines(graph=graph, states=states, orig_nodes=nodes if isinstance(nodes, torch.Tensor) else None)
    monkeypatch.setattr(rpc, "remote_call_to_machine", machines.answer)
    return machines
