# SPDX-License-Identifier: Apache-2.0
"""How many rows does a layer of plain sums save if partial sums travel where they are fewer than sources?

    python -m benchmarks.exchange.rows_saved [--quick] [--graph G ...] [--scale S] [--ranks P ...] [--layers L] [--json]

Every graph is cut by METIS; nothing is cached, seeds are the train vertices. For each layer: the rows that all ranks
receive plainly, and the rows and sums of the minimum vertex cover (`dgl_hybrid/exchange/partial_sums.py`). These counts
are properties of the partition, the same on any machine however busy; the seconds are CPU time of the slowest rank. A
check comes first: on integers, both ways give every row's sum to the last bit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import dgl_hybrid
from benchmarks.console import make_console
from benchmarks.exchange.ranks import Records, measure_by_ranks
from benchmarks.systems.graphs import SHAPES, GraphError, prepare
from dgl_hybrid.exchange.closure import LayerStructure, close_levels, settle_seeds
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.partial_sums import MIN_SAVING, build_partial_sums
from dgl_hybrid.exchange.parts import RowsPart
from dgl_hybrid.exchange.rows import extend_rows
from dgl_hybrid.ops import SparseGraph, spmm
from dgl_hybrid.training.partitioned_graph import PartitionedGraph

RESULTS = Path(__file__).with_name("rows_saved.jsonl")
GRAPHS = ("products", "reddit", "powerlaw", "debian-deps")


def measure_layers(part_config: str, num_layers: int) -> Records:
    """Builds every layer's cover, checks it, and counts. Collective; the same on every rank."""
    g = PartitionedGraph.open(part_config)
    seeds, num_borrowed = settle_seeds(g.communicator, g.nodes, g.owned_nodes("train_mask"))
    sets = close_levels(g.communicator, g.nodes, g.in_edges, seeds, num_borrowed, [seeds[:0]] * num_layers)
    records = []
    for structure in sets.layers:
        g.communicator.barrier()
        start_s = time.process_time()
        built = build_partial_sums(g.communicator, structure, min_saving=0.0)
        build_cpu_s = time.process_time() - start_s
        num_sums = num_entries = 0
        if built.part is not None:
            check(g.communicator, structure, built.part, sets.rows_global)
            entries = built.part.pack.in_edges.indptr.diff()
            num_sums, num_entries = int((entries > 1).sum()), int(entries[entries > 1].sum())
        gathered = g.communicator.gather_floats([num_sums, num_entries, build_cpu_s, len(structure.indices)])
        by_rank = list(zip(*gathered, strict=True))
        records.append(
            {
                "layer": structure.layer,
                "edges": int(sum(by_rank[3])),
                "rows_plain": built.rows_plain,
                "rows_sent": built.rows_sent,
                "saving": built.saving,
                "is_used": built.saving >= MIN_SAVING,
                "sums": int(sum(by_rank[0])),
                "sum_entries": int(sum(by_rank[1])),
                "build_cpu_s": max(by_rank[2]),
            }
        )
    return records


def check(communicator: Communicator, structure: LayerStructure, part: RowsPart, rows_global: torch.Tensor) -> None:
    """Raises unless the sums over plain rows and those over the part are the same, on integers and so exactly."""
    received = structure.exchange.num_received
    x = torch.remainder(rows_global[: structure.num_held] * 7919, 1009).double()[:, None]
    graph = SparseGraph.from_csc(structure.indptr, structure.indices, num_src=structure.num_held + received)
    (extended,) = extend_rows([x], structure.exchange, communicator)
    arrived = communicator.exchange(spmm(part.pack, x), part.send_counts, part.recv_counts)
    split = spmm(graph, torch.cat([x, x.new_zeros(received, 1)]))
    split.index_add_(0, part.dst_rows, spmm(part.edges, arrived))
    assert torch.equal(split, spmm(graph, extended))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exchange.rows_saved")
    parser.add_argument("--quick", action="store_true", help="products alone, a tenth of it, 2 ranks")
    parser.add_argument(
        "--graph", action="append", metavar="G", help=f"may be given several times ({', '.join(GRAPHS)})"
    )
    parser.add_argument("--scale", type=float, help="of generated graphs (0.25)")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="P", help="numbers of ranks (2 3 4)")
    parser.add_argument("--layers", type=int, default=3, metavar="L", help="(3)")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--write", action="store_true", help=f"append to {RESULTS.name}")
    parser.add_argument("--cache", type=Path, help="folder for graphs and partitions (~/.cache/dgl_hybrid/systems)")
    args = parser.parse_args(argv)
    cache = args.cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dgl_hybrid" / "systems"
    scale = args.scale or (0.1 if args.quick else 0.25)
    records: list[dict[str, Any]] = []
    for name in args.graph or (GRAPHS[:1] if args.quick else GRAPHS):
        for world_size in args.ranks or ([2] if args.quick else [2, 3, 4]):
            try:
                graph = prepare(name, scale, world_size, cache.absolute())
            except GraphError as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
                break
            common = {
                "bench": "rows_saved",
                "graph": name,
                "scale": scale if name in SHAPES else None,
                "num_nodes": graph.num_nodes,
                "num_edges": graph.num_edges,
                "world_size": world_size,
                "num_layers": args.layers,
                "part_method": "metis",
                "versions": {"dgl_hybrid": dgl_hybrid.__version__, "torch": torch.__version__},
                "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
            }
            found = measure_by_ranks(measure_layers, world_size, graph.part_config, args.layers)
            records += [common | record for record in found]
    make_console(to_stderr=args.json).print(table_of(records))
    if args.write:
        with RESULTS.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    if args.json:
        print(json.dumps({"bench": "rows_saved", "cells": records}))


def table_of(records: list[dict[str, Any]]) -> Table:
    table = Table("graph", "vertices", "ranks", "layer", "rows", "with sums", "saved", "sums", "rows a sum", "CPU s")
    for r in records:
        table.add_row(
            r["graph"],
            f"{r['num_nodes']:,}",
            str(r["world_size"]),
            str(r["layer"]),
            f"{r['rows_plain']:,}",
            f"{r['rows_sent']:,}",
            f"{100 * r['saving']:.1f} %",
            f"{r['sums']:,}",
            f"{r['sum_entries'] / max(1, r['sums']):.1f}",
            f"{r['build_cpu_s']:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
