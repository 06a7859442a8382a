# SPDX-License-Identifier: Apache-2.0
"""DistDGL jobs for tests: generated graphs in partition folders, the truth beside them, servers and trainers.

The truth is the graph before it was partitioned, with the original id of every vertex and edge. A script that runs
inside the trainers reads it with `Truth.load` and compares with what DistDGL answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dgl_hybrid  # before dgl, which it makes importable

# isort: split
import dgl
import numpy as np
import torch
from dgl import DGLGraph
from torch import Tensor

from dgl_hybrid.launch.cluster import ClusterJob, ClusterResult, PartLine, run_cluster
from dgl_hybrid.sampling.config import ENABLE_VARIABLE, HaloConfig

CHECKOUT = Path(__file__).resolve().parents[2]
ETYPE = tuple[str, str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    """The whole graph, and the original ids by type of the partitioned graph's vertices and edges."""

    graph: DGLGraph
    orig_nodes: dict[str, Tensor]
    orig_edges: dict[ETYPE, Tensor]

    @classmethod
    def load(cls, folder: Path) -> Truth:
        (graph,), _ = dgl.load_graphs(str(folder / "graph.bin"))
        ids: dict[str, Any] = torch.load(folder / "ids.pt")
        return cls(graph=graph, orig_nodes=ids["nodes"], orig_edges=ids["edges"])


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionedCase:
    """A partition folder and the folder of its truth."""

    part_config: Path
    truth: Path
    num_parts: int


def write_case(
    graph: DGLGraph, folder: Path, num_parts: int, *, num_hops: int = 1, part_method: str = "random"
) -> PartitionedCase:
    """Partitions the graph and writes the truth next to the parts."""
    nodes, edges = dgl_hybrid.partition_graph(
        graph,
        "case",
        num_parts,
        str(folder / "parts"),
        num_hops=num_hops,
        part_method=part_method,
        return_mapping=True,
    )
    if not isinstance(nodes, dict):
        nodes, edges = {graph.ntypes[0]: nodes}, {graph.canonical_etypes[0]: edges}
    truth = folder / "truth"
    truth.mkdir()
    dgl.save_graphs(str(truth / "graph.bin"), [graph])
    torch.save({"nodes": nodes, "edges": edges}, truth / "ids.pt")
    return PartitionedCase(part_config=folder / "parts" / "case.json", truth=truth, num_parts=num_parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """What runs on each machine."""

    num_servers: int = 1
    num_trainers: int = 1
    num_samplers: int = 0
    """Of each trainer."""


def run_job(
    part_config: Path,
    *command: object,
    plugin: HaloConfig | None = None,
    topology: Topology = Topology(),
    timeout_s: float = 900.0,
) -> tuple[ClusterResult, list[str]]:
    """Runs what the interpreter is given (a script and its arguments) in servers and trainers on this host.

    Args:
        plugin: What the startup hook enables in every process; None: DistDGL as it is.
        timeout_s: A job takes 10 to 20 s on two idle cores, most of it to import PyTorch and DGL in each process.
    Returns:
        The result, and the lines that the trainers wrote to stdout.
    """
    lines: list[str] = []

    def keep(line: PartLine) -> None:
        if line.part.role == "trainer" and not line.is_error:
            lines.append(line.text)

    job = ClusterJob(
        part_config=part_config,
        command=tuple(map(str, command)),
        num_servers=topology.num_servers,
        num_trainers=topology.num_trainers,
        num_samplers=topology.num_samplers,
        threads=1,
        environment={"PYTHONPATH": str(CHECKOUT)} | ({ENABLE_VARIABLE: plugin.to_environment()} if plugin else {}),
        timeout_s=timeout_s,
    )
    return run_cluster(job, on_line=keep), lines


def homogeneous_graph(num_nodes: int = 500, degree: int = 8, seed: int = 0) -> DGLGraph:
    """Skewed degrees; each edge has a reverse; duplicate edges, self-loops, isolated vertices and a hub.

    Vertices carry `feat` (N, 12) float32, `wide` (N, 3) float64, `label` int64, `train_mask`, `val_mask`, and `scratch`
    (N, 4) float32 zeros to be written. Edges carry `w` (E, 3) float32, `chance` (E,) float32 (a fifth is 0, but never
    all of a vertex), `train_mask`, and `pair` int64: an edge and its reverse share it.
    """
    rng = np.random.default_rng(seed)
    isolated = 5
    num_pairs = num_nodes * degree // 2
    share = 1.0 / np.arange(1, num_nodes - isolated + 1) ** 0.6
    src, dst = (rng.choice(num_nodes - isolated, size=num_pairs, p=share / share.sum()) for _ in range(2))
    src[:3] = dst[:3]  # self-loops
    hub = np.arange(1, 61)
    src, dst = np.concatenate([src, src[:40], hub]), np.concatenate([dst, dst[:40], np.zeros_like(hub)])
    order = rng.permutation(num_nodes)  # so that ids say nothing about degrees
    src, dst = order[src], order[dst]
    pair = np.arange(len(src))
    shuffled = rng.permutation(2 * len(src))
    both_src, both_dst = np.concatenate([src, dst])[shuffled], np.concatenate([dst, src])[shuffled]
    g = dgl.graph((torch.from_numpy(both_src), torch.from_numpy(both_dst)), num_nodes=num_nodes)
    generator = torch.Generator().manual_seed(seed)
    fill_nodes(g.ndata, num_nodes, 12, generator)
    g.ndata["wide"] = torch.randn(num_nodes, 3, dtype=torch.float64, generator=generator)
    g.ndata["scratch"] = torch.zeros(num_nodes, 4)
    num_edges = g.num_edges()
    g.edata["w"] = torch.randn(num_edges, 3, generator=generator)
    g.edata["chance"] = chances(g.edges()[1], num_nodes, generator)
    g.edata["train_mask"] = torch.rand(num_edges, generator=generator) < 0.4
    g.edata["pair"] = torch.from_numpy(np.concatenate([pair, pair])[shuffled])
    return g


def heterograph(seed: int = 0) -> DGLGraph:
    """Papers (`feat`, labels, masks), authors (no data at all) and venues (`x`), five edge types.

    `cites` edges carry `w` (E, 2) and `chance` (E,), `writes` edges `train_mask` and `chance`, the others nothing.
    """
    rng = np.random.default_rng(seed)
    num = {"paper": 260, "author": 340, "venue": 12}

    def skewed(size: int, count: int) -> np.ndarray:
        share = 1.0 / np.arange(1, size + 1) ** 0.5
        return rng.permutation(size)[rng.choice(size, size=count, p=share / share.sum())]

    citing, cited = skewed(num["paper"], 2200), skewed(num["paper"], 2200)
    writer, written = skewed(num["author"], 1500), skewed(num["paper"], 1500)
    venue = skewed(num["venue"], num["paper"])
    papers = np.arange(num["paper"])
    pairs = {
        ("paper", "cites", "paper"): (citing, cited),
        ("author", "writes", "paper"): (writer, written),
        ("paper", "written-by", "author"): (written, writer),
        ("paper", "appears-in", "venue"): (papers, venue),
        ("venue", "publishes", "paper"): (venue, papers),
    }
    g = dgl.heterograph({k: (torch.from_numpy(u), torch.from_numpy(v)) for k, (u, v) in pairs.items()}, num)
    generator = torch.Generator().manual_seed(seed)
    fill_nodes(g.nodes["paper"].data, num["paper"], 8, generator)
    g.nodes["venue"].data["x"] = torch.randn(num["venue"], 4, generator=generator)
    g.edges["cites"].data["w"] = torch.randn(g.num_edges("cites"), 2, generator=generator)
    for etype in ("cites", "writes"):
        g.edges[etype].data["chance"] = chances(g.edges(etype=etype)[1], num["paper"], generator)
    g.edges["writes"].data["train_mask"] = torch.rand(g.num_edges("writes"), generator=generator) < 0.4
    return g


def fill_nodes(data: Any, num_nodes: int, width: int, generator: torch.Generator) -> None:
    data["feat"] = torch.randn(num_nodes, width, generator=generator)
    data["label"] = torch.randint(4, (num_nodes,), generator=generator)
    draw = torch.rand(num_nodes, generator=generator)
    data["train_mask"] = draw < 0.3
    data["val_mask"] = (draw >= 0.3) & (draw < 0.5)


def chances(dst: Tensor, num_nodes: int, generator: torch.Generator) -> Tensor:
    """Unnormalised probabilities of edges: (E,) float32, a fifth 0, of every vertex at least one in-edge above 0."""
    chance = torch.rand(len(dst), generator=generator) + 0.2
    chance[torch.rand(len(dst), generator=generator) < 0.2] = 0.0
    some_edge = torch.full((num_nodes,), -1, dtype=torch.int64)
    some_edge[dst] = torch.arange(len(dst))
    chance[some_edge[some_edge >= 0]] = 1.0
    return chance
