# SPDX-License-Identifier: Apache-2.0
"""What do message-passing ops on CPU gain where rows that read the same sources are neighbours?

    python -m benchmarks.ops.row_order [--processes 2] [--rounds 7] [--json] [--write]

Random graphs with and without something to find, ids shuffled or in order, those of `benchmarks/systems` at half their
size, and the real ones that are there (`DGL_HYBRID_DATA`). Each op takes turns in the order by id, by reverse
Cuthill-McKee of all edges, and by clusters, which loaders take, in as many processes at once as a host would have
ranks. Results are compared in the first round of each op, which is not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import dgl_hybrid  # noqa: F401  before dgl, which it makes importable

# isort: split
import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import reverse_cuthill_mckee
from torch import Tensor

from benchmarks.ops.at_once import Result, measure_at_once, print_table, summarise_rule, write_table
from benchmarks.systems.graphs import DATA_VARIABLE, ROOT, SHAPES, generate
from dgl_hybrid.datasets import load_npz
from dgl_hybrid.ops import SparseGraph, gat, spmm
from dgl_hybrid.partition.local_order import LocalOrder, count_reads, find_local_order

Edges = tuple[int, Tensor, Tensor]
"""Vertices, sources, destinations."""

WIDTH, HEADS = 128, 4
ORDERS = ("id", "breadth first", "clusters")
REAL = ("coauthor-cs", "tolokers", "pubmed", "amazon-photo", "debian-deps", "moby-thesaurus")
HEAD = (
    *("graph", "vertices", "edges", "distinct reads: by id, breadth first, clusters", "found in, ms"),
    *("sum by id, ms", "breadth first, clusters", "attention by id, ms", "breadth first, clusters", "taken"),
)
README = Path(__file__).parent / "README.md"
MARK = "<!-- row order: written by benchmarks.ops.row_order, do not edit below -->"
END = "<!-- row order: end -->"


def _grid(side: int, generator: torch.Generator) -> Edges:
    """Points of a torus, each reading the 25 around it."""
    place = torch.arange(side * side)
    row, column = place // side, place % side
    around = [((row + i) % side) * side + (column + j) % side for i in range(-2, 3) for j in range(-2, 3)]
    return side * side, torch.cat(around), place.repeat(25)


def _communities(size: int, num_rows: int, generator: torch.Generator) -> Edges:
    """Twenty reads of each vertex, nine of ten within runs of `size`."""
    dst = torch.arange(num_rows).repeat_interleave(20)
    near = dst // size * size + torch.randint(size, (len(dst),), generator=generator)
    anywhere = torch.randint(num_rows, (len(dst),), generator=generator)
    is_near = torch.rand(len(dst), generator=generator) < 0.9
    return num_rows, torch.where(is_near, near, anywhere).clamp_(max=num_rows - 1), dst


def make_edges(name: str, scale: float) -> Edges:
    """Makes or reads the edges of a graph of the table, `scale` of its vertices if it is made."""
    generator = torch.Generator().manual_seed(0)
    kind, _, how = name.partition(", ")
    num_rows = round(100_000 * scale)
    if kind in SHAPES:
        arrays = generate(SHAPES[kind].scaled(scale / 2))
        return int(arrays["num_nodes"]), *(torch.from_numpy(arrays[end]).long() for end in ("src", "dst"))  # type: ignore[return-value]
    if kind in REAL:
        graph = load_npz(_file_of(kind)).graph
        src, dst = (torch.cat(ends) for ends in (graph.edges(), graph.edges()[::-1]))
        num_rows = int(graph.num_nodes())
        keys = (src.long() * num_rows + dst).unique()
        return num_rows, keys // num_rows, keys % num_rows
    makers: dict[str, Callable[[], Edges]] = {
        "grid": lambda: _grid(int(num_rows**0.5), generator),
        "communities of 500": lambda: _communities(500, num_rows, generator),
        "uniform": lambda: _communities(num_rows, num_rows, generator),
    }
    num_rows, src, dst = makers[kind]()
    if how == "shuffled":
        ids = torch.randperm(num_rows, generator=generator)
        src, dst = ids[src], ids[dst]
    return num_rows, src, dst


def _file_of(name: str) -> Path:
    return Path(os.environ.get(DATA_VARIABLE) or ROOT.parent / "shared" / "data") / f"{name}.npz"


def graphs_here() -> list[str]:
    """Returns the names of the table's graphs, real ones where their files are."""
    made = [f"{kind}, {how}" for kind in ("grid", "communities of 500") for how in ("shuffled", "in order")]
    return [*made, "uniform", *SHAPES, *(name for name in REAL if _file_of(name).is_file())]


def _breadth_first(indptr: Tensor, indices: Tensor) -> Tensor:
    num_rows = len(indptr) - 1
    held = (np.ones(len(indices), dtype=np.bool_), indices.int().numpy(), indptr.int().numpy())
    edges = csr_array(held, shape=(num_rows, num_rows))
    order = reverse_cuthill_mckee((edges + edges.T).tocsr(), symmetric_mode=True)
    return torch.from_numpy(order.astype(np.int64))


def measure_here(cell: tuple[str, float], rounds: int) -> Result:
    """Times one graph in this process."""
    num_rows, src, dst = make_edges(*cell)
    by_id = SparseGraph.from_coo(src, dst, num_rows, num_rows).in_edges
    begin = time.perf_counter()
    clusters = find_local_order(by_id.indptr.long(), by_id.indices.long())
    found_s = time.perf_counter() - begin
    orders = dict(
        zip(ORDERS, (torch.arange(num_rows), _breadth_first(by_id.indptr, by_id.indices), clusters), strict=True)
    )
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(num_rows, HEADS, WIDTH // HEADS, generator=generator) for _ in range(2))
    terms = [torch.randn(num_rows, HEADS, generator=generator) for _ in range(2)]
    graphs, operands, distinct = {}, {}, {}
    for name, order in orders.items():
        position = torch.empty_like(order)
        position[order] = torch.arange(num_rows)
        graphs[name] = SparseGraph.from_coo(position[src], position[dst], num_rows, num_rows)
        operands[name] = [rows[order].requires_grad_() for rows in (x, *terms)], grad[order]
        distinct[name] = count_reads(by_id.indptr.long(), by_id.indices, order)

    def attend(name: str) -> list[Tensor]:
        rows, its_grad = operands[name]
        out = gat(graphs[name], *rows)
        return [out.detach(), *torch.autograd.grad(out, rows, its_grad)]

    def add_up(name: str) -> list[Tensor]:
        return [spmm(graphs[name], operands[name][0][0].detach())]

    seconds: dict[str, dict[str, list[float]]] = {}
    for op, run in (("sum", add_up), ("attention", attend)):
        first: list[Tensor] = []
        times: dict[str, list[float]] = {name: [] for name in ORDERS}
        for number in range(rounds + 1):
            for name in ORDERS:
                begin = time.perf_counter()
                found = run(name)
                if number:  # the first compiles the kernel and faults in the memory
                    times[name].append(time.perf_counter() - begin)
                    continue
                back = [torch.empty_like(one).index_copy_(0, orders[name], one) for one in found]
                first = first or back
                for one, other in zip(back, first, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
        seconds[op] = times
    medians = {op: {name: statistics.median(times[name]) for name in ORDERS} for op, times in seconds.items()}
    kept = LocalOrder(rows=clusters, reads_by_id=distinct["id"], reads_by_locality=distinct["clusters"])
    size = {"rows": num_rows, "edges": len(src), "found_s": found_s, "distinct": distinct, "by_rule": kept.shares_more}
    return size | {f"{op}_s": medians[op] for op in medians}


def measure(names: list[str], *, scale: float, processes: int, rounds: int) -> list[Result]:
    """Measures graphs, each in all processes at once; the slowest process counts."""
    results = []
    cells = [(name, scale) for name in names]
    for name, found in zip(
        names, measure_at_once(measure_here, cells, processes=processes, rounds=rounds), strict=True
    ):
        result: Result = {"graph": name} | found[0] | {"found_s": max(one["found_s"] for one in found)}
        for op in ("sum_s", "attention_s"):
            result[op] = {order: max(one[op][order] for one in found) for order in ORDERS}
        # Of a sum and an attention together, as an epoch may have them.
        both = {order: result["sum_s"][order] + result["attention_s"][order] for order in ORDERS}
        results.append(result | {"gain": both["id"] / both["clusters"]})
    return results


def table_rows(results: list[Result]) -> list[tuple[str, ...]]:
    """Returns the lines of the table: times by id, and what share of them others take."""
    rows = []
    for one in results:
        distinct = ", ".join(f"{one['distinct'][order]:.2f}" for order in ORDERS)
        row = [one["graph"], f"{one['rows']:,}", f"{one['edges']:,}", distinct, f"{1e3 * one['found_s']:.0f}"]
        for op in ("sum_s", "attention_s"):
            row.append(f"{1e3 * one[op]['id']:.1f}")
            row.append(", ".join(f"{one[op][order] / one[op]['id']:.2f}" for order in ORDERS[1:]))
        rows.append((*row, "yes" if one["by_rule"] else "no"))
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ops.row_order", description=__doc__.split("\n")[0])
    parser.add_argument("--processes", type=int, default=2, help="at once, each with one thread (2)")
    parser.add_argument("--rounds", type=int, default=7, help="timed runs of each op in each order (7)")
    parser.add_argument("--graph", action="append", help="of the table; may be given several times")
    parser.add_argument("--scale", type=float, default=1.0, help="of graphs that are made (1)")
    parser.add_argument("--json", action="store_true", help="only the result: one JSON object on the last line")
    parser.add_argument("--write", action="store_true", help="put the table into the README beside this file")
    options = parser.parse_args(arguments)
    here = graphs_here()
    if min(options.processes, options.rounds) < 1 or not 0.001 <= options.scale <= 10:
        parser.error("--processes and --rounds must be positive, --scale 0.001 to 10")
    if unknown := sorted(set(options.graph or ()) - set(here)):
        parser.error(f"--graph must be one of {'; '.join(here)} (got {unknown[0]})")
    results = measure(options.graph or here, scale=options.scale, processes=options.processes, rounds=options.rounds)
    if options.write:
        write_table(HEAD, table_rows(results), options.processes, README, begin=MARK, end=END)
    if not options.json:
        print_table(HEAD, table_rows(results))
    print(json.dumps(summarise_rule(results, "clusters")))


if __name__ == "__main__":
    main()
