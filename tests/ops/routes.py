# SPDX-License-Identifier: Apache-2.0
"""Finds out which functions of DGL each `dgl.nn` module reaches and which way they go, and writes the table of them.

python -m tests.ops.routes    # rewrites dgl_hybrid/ops/ROUTES.md
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dgl_hybrid

# isort: split
import dgl
import torch
from torch import Tensor

from dgl_hybrid.ops.op_counts import op_counts, reset_op_counts
from dgl_hybrid.ops.routing import ServedGraphs, route_ops
from tests.graph.modules import MODULES, NOT_ON_BLOCKS, WIDTH
from tests.helpers.graphs import with_duplicates, with_isolated

TABLE = Path(dgl_hybrid.__file__).parent / "ops" / "ROUTES.md"
MODULE_NAMES = tuple(MODULES)
BLOCK_MODULE_NAMES = tuple(name for name, entry in MODULES.items() if entry.error != NOT_ON_BLOCKS)
FLOAT32_ONLY = ("APPNPConv", "TWIRLSConv")
"""Stock DGL makes float32 weights in these, whatever the features are."""
NEED_IN_EDGES = ("EGATConv",)
"""These refuse destinations without in-edges and cannot be told otherwise."""


@contextlib.contextmanager
def routed(graphs: ServedGraphs) -> Iterator[None]:
    """Serves `graphs` inside and counts from zero; afterwards DGL's functions are as before."""
    route_ops(graphs)
    reset_op_counts()
    try:
        yield
    finally:
        route_ops("layer_blocks")
        reset_op_counts()


def make_graph(name: str, dtype: torch.dtype) -> Any:
    """Duplicate edges, not sorted; no self-loops, whose length is 0 and has no gradient in EGNNConv."""
    graph = dgl.remove_self_loop(with_duplicates())
    graph.edata["w"] = graph.edata["w"].to(dtype)
    return graph


def make_block(name: str, dtype: torch.dtype) -> Any:
    """A message-flow graph in which some destinations have no in-edge where the module allows it."""
    graph = with_isolated()
    seeds = torch.arange(graph.num_nodes() - 1, 0, -2)
    if name in NEED_IN_EDGES:
        seeds = seeds[graph.in_degrees(seeds) > 0]
    block = dgl.to_block(dgl.in_subgraph(graph, seeds), seeds)
    block.edata["w"] = torch.rand(block.num_edges(), dtype=dtype) + 0.5
    assert bool((block.in_degrees() == 0).any()) == (name not in NEED_IN_EDGES)
    return block


@dataclass
class Step:
    """One forward and backward of a module."""

    output: Tensor
    input_grad: Tensor
    weight_grads: dict[str, Tensor]
    counts: dict[str, int]


def run_step(name: str, graph: Any, dtype: torch.dtype) -> Step:
    torch.manual_seed(3)
    entry = MODULES[name]
    module = entry.make().to(dtype)
    x = torch.randn(graph.num_src_nodes(), WIDTH, dtype=dtype).requires_grad_()
    reset_op_counts()
    output = entry.call(module, graph, x)
    # Each element counts differently, so that no two may change places.
    (output * torch.sin(torch.arange(output.numel(), dtype=dtype)).view_as(output)).sum().backward()
    grads = {key: parameter.grad for key, parameter in module.named_parameters() if parameter.grad is not None}
    return Step(output.detach(), x.grad, grads, op_counts())


# ------------------------------------------------------------------------------------------------ the table


def _samples() -> dict[str, Callable[[], object]]:
    """What does not take our route, with the call that shows it."""
    graph = make_graph("", torch.float64)
    x = torch.rand(graph.num_nodes(), 3, dtype=torch.float64)
    w = torch.rand(graph.num_edges(), 3, dtype=torch.float64)
    hetero = dgl.heterograph({("a", "to", "b"): ([0, 1], [1, 0]), ("a", "of", "b"): ([0, 1], [1, 1])})

    def with_two_types() -> None:
        messages = {kind: (dgl.function.copy_u("h", "m"), dgl.function.sum("m", "h")) for kind in ("to", "of")}
        hetero.nodes["a"].data["h"] = torch.ones(2, 1)
        hetero.multi_update_all(messages, "sum")
        hetero.update_all(dgl.function.copy_u("h", "m"), dgl.function.sum("m", "y"))

    return {
        "`u_add_e`, `u_sub_e` reduced by sum, max, min": lambda: dgl.ops.u_add_e_sum(graph, x, w),
        "integer features (DGL refuses them)": lambda: dgl.ops.copy_u(graph, torch.arange(graph.num_nodes())),
        "`edge_softmax` over some of the edges": lambda: dgl.ops.edge_softmax(graph, w[:2], torch.tensor([0, 1])),
        "`update_all` over several edge types at once": with_two_types,
    }


def measure_routes() -> dict[str, dict[str, int]]:
    """Returns the counts of one forward of each module on a whole graph."""
    routes = {}
    with routed("all"):
        for name in MODULE_NAMES:
            dtype = torch.float32 if name in FLOAT32_ONLY else torch.float64
            routes[name] = run_step(name, make_graph(name, dtype), dtype).counts
    return routes


def measure_others() -> dict[str, dict[str, int]]:
    routes = {}
    with routed("all"):
        for name, call in _samples().items():
            reset_op_counts()
            with contextlib.suppress(dgl.DGLError):
                call()
            routes[name] = op_counts()
    return routes


_HEAD = """\
# Which way the message passing of `dgl.nn` goes

Written by `python -m tests.ops.routes`; a test compares it with what happens. A line is one forward of a module on a
whole graph with float features. *ours*: forward and backward run on the ops of this folder. *dgl*: DGL's own kernels
run, for the reason given. `dgl_hybrid.op_counts()` shows the same for a program.

The routes are taken on `LayerBlock`s without being asked for, and on every DGL graph and block after
`dgl_hybrid.route_ops("all")`. Which kernels serve "ours" (CPU, CUDA, or the plain reference) depends on the device and
dtype of the features. User-defined message and reduce functions run as they are, in PyTorch.

Only message passing is routed. DGL's products by type (`TypedLinear`: `RelGraphConv`, `HGTConv`) and its readouts
(`dgl.mean_nodes`, pooling) stay DGL's: on CUDA features they need a DGL built for CUDA.

| module | on blocks | functions reached | route |
| --- | --- | --- | --- |
"""
_MIDDLE = """
What our ops do not do, or not as DGL does, goes to DGL:

| operation | counted as |
| --- | --- |
"""


def routes_markdown() -> str:
    lines = [_HEAD]
    for name, counts in measure_routes().items():
        reached: dict[str, set[str]] = {}
        for key in counts:
            op, route = key.split("/", 1)
            reached.setdefault(route, set()).add(f"`{op}`")
        on_blocks = "yes" if name in BLOCK_MODULE_NAMES else "no, in stock DGL neither"
        functions = ", ".join(sorted(set().union(*reached.values()))) or "none: user-defined functions"
        lines.append(f"| {name} | {on_blocks} | {functions} | {', '.join(sorted(reached)) or 'PyTorch'} |\n")
    lines.append(_MIDDLE)
    for name, counts in measure_others().items():
        lines.append(f"| {name} | {', '.join(f'`{key}`' for key in counts)} |\n")
    return "".join(lines)


if __name__ == "__main__":
    TABLE.write_text(routes_markdown())
    print(f"wrote {TABLE}")
