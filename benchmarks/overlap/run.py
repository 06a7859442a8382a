# SPDX-License-Identifier: Apache-2.0
"""How much of the exchange is hidden behind work on held rows, and what partial sums save?

    python -m benchmarks.overlap [--graph products --graph reddit] [--scale 0.3] [--json] [--write]

Everything is communicated ("depcomm"), three times on the same cell, in turns: exchange and aggregation apart;
together, so that held rows are summed while others travel; and together with partial sums sent where they are fewer.
The systems' own benchmark runs them (`benchmarks/systems`): results are checked against plain DGL before anything is
timed. With `--device cuda` the ranks share a GPU, and rows go through pinned memory.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.emulated_network import why_unavailable
from benchmarks.systems.grid import Cell
from benchmarks.systems.measure import Settings
from benchmarks.systems.results import Line
from benchmarks.systems.variants import Comparison, Result, make_parser

APART, TOGETHER, SUMS = SYSTEMS = ("depcomm_apart", "depcomm_overlap", "depcomm_sums")
ON_GPU = tuple(f"{system}_gpu" for system in SYSTEMS)
MODELS = (("sage", 2), ("sage", 3), ("gcn", 3), ("gat", 2))
NETWORKS = ("loopback", "1gbit", "200mbit")


def cells_of(graphs: Sequence[str], scale: float, networks: Sequence[str]) -> list[Cell]:
    """Returns what is measured: every model on every graph over every network, on two ranks of one thread each."""
    return [
        Cell(graph=graph, scale=scale, model=model, num_layers=layers, network=network)
        for graph in graphs
        for network in networks
        for model, layers in MODELS
    ]


def figures_of(line: Line) -> Result:
    return {
        "epoch_s": line["p50"],
        "blocked_s": line["exchange_s"] + line["wait_s"],
        "sent_bytes": line["sent_bytes"],
        "exchanges": line["exchanges"],
    }


def put_together(apart: Result, together: Result, sums: Result) -> Result:
    """Compares the variants.

    `hidden` is the share of the blocked time (exchange and wait) that is gone once exchange and aggregation go
    together; `gain` is what an epoch gains by it, which includes the copies that are not made any more. `enough` are
    the exchanges, by layer and direction, beside which at least as long was worked as they block on their own, and
    `hidden_of_enough` the share of their blocked time that is gone.
    """
    alone = {(one["layer"], one["backward"]): one["blocked_s"] for one in apart["exchanges"]}
    enough = {
        (one["layer"], one["backward"]): one["blocked_s"]
        for one in together["exchanges"]
        if one["beside_s"] >= alone[one["layer"], one["backward"]]
    }
    alone_s = sum(alone[kind] for kind in enough)
    return {
        "gain": apart["epoch_s"] / together["epoch_s"],
        "hidden": 1.0 - together["blocked_s"] / apart["blocked_s"] if apart["blocked_s"] else None,
        "beside_s": sum(one["beside_s"] for one in together["exchanges"]),
        "enough": [{"layer": layer, "backward": backward} for layer, backward in enough],
        "hidden_of_enough": 1.0 - sum(enough.values()) / alone_s if alone_s else None,
        "gain_of_sums": together["epoch_s"] / sums["epoch_s"],
        "bytes_saved": 1.0 - sums["sent_bytes"] / together["sent_bytes"] if together["sent_bytes"] else None,
    }


def row_of(result: Result) -> tuple[str, ...]:
    """Times in milliseconds."""
    apart, together, sums = (result.get(name) or result[f"{name}_gpu"] for name in SYSTEMS)
    return (
        f"{1e3 * apart['epoch_s']:.0f}",
        f"{1e3 * together['epoch_s']:.0f}",
        f"{result['gain']:.2f}",
        f"{1e3 * apart['blocked_s']:.0f}",
        f"{1e3 * result['beside_s']:.0f}",
        f"{1e3 * together['blocked_s']:.0f}",
        _share(result["hidden"]),
        f"{len(result['enough'])} of {len(apart['exchanges'])}",
        _share(result["hidden_of_enough"]),
        f"{1e3 * sums['epoch_s']:.0f}",
        _share(result["bytes_saved"]),
    )


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


COMPARISON = Comparison(
    systems=SYSTEMS,
    figures_of=figures_of,
    put_together=put_together,
    title="Milliseconds per epoch (median), everything communicated",
    head=(
        *("cell", "apart", "together", "gain", "blocked apart", "work beside", "blocked together", "hidden"),
        *("enough work", "hidden of these", "with sums", "rows saved"),
    ),
    row_of=row_of,
    readme=Path(__file__).parent / "README.md",
)
GPU_COMPARISON = replace(
    COMPARISON,
    systems=ON_GPU,
    title="Milliseconds per epoch (median) on one GPU that the ranks share, everything communicated",
    readme=Path(__file__).parent / "gpu.md",
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("python -m benchmarks.overlap")
    parser.add_argument("--network", action="append", choices=NETWORKS, help="may be given several times (all)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each variant")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the ranks compute (cpu)")
    args = parser.parse_args(arguments)
    comparison = COMPARISON if args.device == "cpu" else GPU_COMPARISON
    networks = args.network or NETWORKS
    why = None if set(networks) == {"loopback"} else why_unavailable()
    if why is not None:
        print(f"no links can be limited here: {why}", file=sys.stderr)
        sys.exit(2)
    settings = Settings(rounds=args.rounds, timeout_s=600.0)
    cells = cells_of(args.graph or ["powerlaw"], args.scale, networks)
    results = comparison.measure(cells, settings, args.cache)
    comparison.report(results, args)
