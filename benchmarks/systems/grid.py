# SPDX-License-Identifier: Apache-2.0
"""Which cells there are: a graph, a model, a number of ranks and the links between them. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

NETWORKS: dict[str, int | None] = {"loopback": None, "1gbit": 1_000_000_000, "200mbit": 200_000_000}
"""Name of the links between ranks -> their rate in bits per second; None: the loopback interface as it is."""
GENERATED = ("products", "reddit", "powerlaw")
REAL = ("debian-deps", "moby-thesaurus")
MODELS = ("gcn", "sage", "gat")
PURE = ("depcache", "depcomm")
OURS = ("hybrid", *PURE, "neutronstar")
SAR = ("sar", "sar_mfg", "sar_mfg_no_sr")
PEERS = {"SAR": SAR, "PipeGCN": ("pipegcn",)}
"""Folder of a peer's checkout -> the systems that need it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """What all systems are compared on."""

    graph: str
    """A name of `graphs.SHAPES` or `REAL`, or a spec of `load_dataset` (`ogb:ogbn-products`, `dgl:reddit`)."""
    scale: float = 1.0
    """Of the number of vertices of a generated graph."""
    model: str = "sage"
    num_layers: int = 2
    hidden: int = 128
    ranks: int = 2
    """Of one thread each."""
    network: str = "loopback"

    def __post_init__(self) -> None:
        """Checks every field."""
        if self.model not in MODELS:
            raise ValueError(f"unknown model (got {self.model!r}); choose one of {', '.join(MODELS)}")
        if self.network not in NETWORKS:
            raise ValueError(f"unknown network (got {self.network!r}); choose one of {', '.join(NETWORKS)}")
        if self.ranks == 1 and self.network != "loopback":
            raise ValueError(f"one rank uses no link (got network {self.network!r})")
        if self.scale <= 0 or min(self.num_layers, self.hidden, self.ranks) < 1:
            raise ValueError(f"scale, num_layers, hidden and ranks must be positive (got {self})")

    @property
    def key(self) -> str:
        """Names the cell: `products@0.05/sage-2x128/2/1gbit`."""
        return f"{self.dataset}/{self.model}-{self.num_layers}x{self.hidden}/{self.ranks}/{self.network}"

    @property
    def dataset(self) -> str:
        return self.graph if self.scale == 1.0 else f"{self.graph}@{self.scale:g}"

    @property
    def rate_bits_per_s(self) -> int | None:
        return NETWORKS[self.network]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def systems_of(cell: Cell) -> tuple[str, ...]:
    """Returns the systems that can run a cell; the peers among them where the user has them.

    Plain DGL uses no link, so it is timed on loopback only; on blocks from the train vertices down, too, but for GCN,
    whose norm takes out-degrees of the graph. On one rank nothing is cached or communicated, so one
    strategy stands for all. PipeGCN has GraphSAGE only. SAR's message-flow graphs are exact for GraphSAGE and GAT (for
    GCN their out-degrees are not the full graph's), and switching its rematerialisation off matters for GAT only.
    """
    systems = [*(OURS if cell.ranks > 1 else OURS[:1])]  # first: those most alike are to take turns with each other
    if cell.network == "loopback":
        systems.append("dgl")
        if cell.model != "gcn":
            systems.append("dgl_blocks")
        if cell.ranks > 1:
            systems.append("dgl_one_thread")
    systems += ["distdgl_full", "sar"]
    if cell.model != "gcn":
        systems.append("sar_mfg")
    if cell.model == "gat":
        systems.append("sar_mfg_no_sr")
    if cell.model == "sage" and cell.ranks > 1:
        systems.append("pipegcn")
    return tuple(systems)


def all_systems() -> tuple[str, ...]:
    """Returns every system that runs some cell."""
    cells = full_grid((*GENERATED, *REAL))
    return tuple(dict.fromkeys(system for cell in cells for system in systems_of(cell)))


def quick_systems_of(cell: Cell) -> tuple[str, ...]:
    """Returns what is measured quickly: on one rank, only what hybrid is held to there."""
    if cell.ranks == 1:
        return ("hybrid", "dgl") if cell.model == "gcn" else ("hybrid", "dgl", "dgl_blocks")
    left_out = ("dgl_one_thread", "sar_mfg" if cell.model == "gat" else "")  # of SAR's modes the fastest stays
    return tuple(system for system in systems_of(cell) if system not in left_out)


def quick_grid() -> tuple[Cell, ...]:
    """Small cells of every kind: 10 to 15 minutes on two cores."""
    products, dense = Cell(graph="products", scale=0.1), Cell(graph="reddit", scale=0.1)
    power = Cell(graph="powerlaw", scale=0.2)
    return (
        *(replace(products, model=model, ranks=1) for model in MODELS),
        products,
        replace(power, model="gcn", num_layers=3, network="1gbit"),
        replace(dense, model="gat", network="200mbit"),
    )


def full_grid(
    graphs: Sequence[str] = (*GENERATED, *REAL),
    *,
    models: Sequence[str] = MODELS,
    layers: Sequence[int] = (2, 3),
    hidden: Sequence[int] = (128, 256),
    ranks: Sequence[int] = (1, 2, 3, 4),
    networks: Sequence[str] = tuple(NETWORKS),
    scale: float = 1.0,
    sample: int | None = None,
) -> tuple[Cell, ...]:
    """Returns every combination, the most telling first, so that a run which is cut short has seen something of all.

    Args:
        sample: A seed; cells come in the order that it draws, so that those a run has come to are a random sample.
    """
    cells = [
        Cell(
            graph=graph,
            scale=scale if graph in GENERATED else 1.0,
            model=model,
            num_layers=depth,
            hidden=width,
            ranks=count,
            network=network,
        )
        for graph in graphs
        for model in models
        for depth in layers
        for width in hidden
        for count in ranks
        for network in networks
        if count > 1 or network == "loopback"
    ]
    if sample is not None:
        random.Random(sample).shuffle(cells)
        return tuple(cells)
    choices: tuple[tuple[str, Sequence[Any]], ...] = (
        ("num_layers", layers),
        ("hidden", hidden),
        ("ranks", (2, 1, 4, 3)),
        ("network", ("1gbit", "loopback", "200mbit")),
    )

    def distance(cell: Cell) -> int:
        return sum(
            list(options).index(getattr(cell, name)) for name, options in choices if getattr(cell, name) in options
        )

    return tuple(sorted(cells, key=distance))  # stable: graphs and models take turns within a distance
