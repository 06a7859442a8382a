# SPDX-License-Identifier: Apache-2.0
"""How long is an epoch of exact full-graph training on one GPU, beside PyTorch Geometric?

    python -m benchmarks.one_gpu [--graph products --graph reddit] [--scale 0.3] [--json] [--write]

Needs a GPU, and PyTorch Geometric (`pip install torch_geometric`) to compare with. DGL's own build may be that for
CPUs: messages are passed by this project's kernels. PyTorch Geometric runs the same layers on an `edge_index` and on a
sparse matrix, whose sums are cuSPARSE's; the faster of the two is compared. The systems' own benchmark runs them
(`benchmarks/systems`): results are checked against plain DGL's on the CPU before anything is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.systems.grid import Cell
from benchmarks.systems.measure import Settings
from benchmarks.systems.results import Line
from benchmarks.systems.variants import Comparison, Result, make_parser

OURS, INDEX, SPARSE = SYSTEMS = ("hybrid_gpu", "pyg_gpu", "pyg_sparse_gpu")
GRAPH = "products"
MODELS = (("gcn", 2), ("gcn", 3), ("sage", 2), ("gat", 2))


def cells_of(graphs: Sequence[str], scale: float, hidden: int) -> list[Cell]:
    """Returns what is measured: every model on every graph, one rank."""
    return [
        Cell(graph=graph, scale=scale, model=model, num_layers=layers, hidden=hidden, ranks=1)
        for graph in graphs
        for model, layers in MODELS
    ]


def figures_of(line: Line) -> Result:
    return {"epoch_s": line["p50"], "p20_s": line["p20"], "p80_s": line["p80"], "gpu_bytes": line["facts"]["gpu_bytes"]}


def put_together(ours: Result, index: Result, sparse: Result) -> Result:
    """Returns how much longer the faster of the others takes, and how much more the thriftier one holds."""
    return {
        "vs_pyg": min(index["epoch_s"], sparse["epoch_s"]) / ours["epoch_s"],
        "memory_vs_pyg": ours["gpu_bytes"] / min(index["gpu_bytes"], sparse["gpu_bytes"]),
    }


def row_of(result: Result) -> tuple[str, ...]:
    """Times in milliseconds, memory in MiB."""
    ours = result[OURS]
    return (
        f"{1e3 * ours['epoch_s']:.2f} ({1e3 * ours['p20_s']:.2f} to {1e3 * ours['p80_s']:.2f})",
        *(f"{1e3 * result[name]['epoch_s']:.2f}" for name in (INDEX, SPARSE)),
        f"{result['vs_pyg']:.2f}",
        *(f"{result[name]['gpu_bytes'] / 2**20:,.0f}" for name in SYSTEMS),
    )


COMPARISON = Comparison(
    systems=SYSTEMS,
    figures_of=figures_of,
    put_together=put_together,
    title="Milliseconds per epoch (median), one GPU",
    head=(
        *("cell", "dgl_hybrid (p20 to p80)", "PyG, edge index", "PyG, sparse matrix", "PyG's faster over ours"),
        *("MiB of the GPU", "edge index", "sparse matrix"),
    ),
    row_of=row_of,
    readme=Path(__file__).parent / "README.md",
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("python -m benchmarks.one_gpu", graph=GRAPH)
    parser.add_argument("--hidden", type=int, default=128)
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.one_gpu needs a CUDA GPU. Nothing was measured.", file=sys.stderr)
        return 2
    settings = Settings(rounds=5, timeout_s=600.0)
    results = COMPARISON.measure(cells_of(args.graph or [GRAPH], args.scale, args.hidden), settings, args.cache)
    COMPARISON.report(results, args, device=torch.cuda.get_device_name())
    return 1 if any(result["failed"] for result in results) else 0
