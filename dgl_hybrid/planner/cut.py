# SPDX-License-Identifier: Apache-2.0
"""The exact plan: a minimum-weight closure, found as one minimum s-t cut (Picard 1976).

Variables are `c` (computed) and `a` (present) per item; every constraint says "this one implies that one", so the
choice of least cost is the source side of a minimum cut in this network:

    source --gain-->  c(u, l)                          gain = r - p, what computing saves once the row has to be present
    c(u, l) --inf-->  a(u, l), c(u, l - 1)             and a(w, l - 1) for every halo in-neighbour w
    a(w, l) --r---->  sink                             a row owned vertices do not read is brought here for this alone
    c(u, l) --loss->  sink                             where r < p

Only what is undecided enters: what the greedy took is in every optimum ([Note: persistence] in greedy.py), so its rows
are paid for; rows that are present anyway have no node; level 0 needs no structure, so `c(u, 0)` is folded into
`a(u, 0)`.
The source side that OR-tools returns is what the source reaches in the residual graph: the smallest minimum cut, the
same whatever maximum flow was found. So ties go to receiving and the plan is deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import PlanError
from .greedy import Prices, grow
from .items import Bools, Floats, Ints, Items

# Sum of all finite capacities after scaling. Doubles hold 53 bits, so more would only scale their noise.
CAPACITY_SUM = 1 << 56
WARM_ROUNDS = 3


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CutNetwork:
    """The network of what is undecided. Nodes 0..n-1, then source n, sink n + 1; infinite arcs between nodes."""

    compute_node: Ints
    """(L, H) node of c, or -1."""
    weight: Floats
    """(n,) positive: arc from the source (gain); negative: arc to the sink (price)."""
    tail: npt.NDArray[np.int32]
    head: npt.NDArray[np.int32]

    @property
    def num_arcs(self) -> int:
        """Arcs between nodes and to the terminals."""
        return int(self.tail.size + self.weight.size)


def settle_most(items: Items, prices: Prices) -> Bools:
    """Returns an (L, H) choice that is part of every optimum: a few rounds of the greedy settle most of a real graph.

    Past these the cut is faster.
    """
    nothing = np.zeros((items.num_layers, items.num_halo), dtype=np.bool_)
    return grow(items, prices, nothing, max_rounds=WARM_ROUNDS, alone=True)


def cut_choice(items: Items, prices: Prices, settled: Bools, *, max_arcs: int) -> Bools | None:
    """Returns the (L, H) choice of least cost, or None if the network would have more than `max_arcs` arcs.

    Args:
        items: of the problem.
        prices: of the items.
        settled: (L, H) part of every optimum, from `settle_most`; not modified.
        max_arcs: at most so many arcs are solved.

    Raises:
        PlanError: the solver gave up.
    """
    network = build_network(items, prices, settled, max_arcs=max_arcs)
    if network is None or network.num_arcs > max_arcs:
        return None
    side = solve(network)
    computed = settled.copy()
    chosen = np.zeros_like(computed)
    has_node = network.compute_node >= 0
    chosen[has_node] = side[network.compute_node[has_node]]
    computed |= chosen
    return settle_inputs(items, prices, computed)


def settle_inputs(items: Items, prices: Prices, computed: Bools) -> Bools:
    """Decides level 0, where holding a row needs nothing else: holds what is cheaper held, and what nests."""
    result = computed.copy()
    if items.num_layers > 1:
        result[0] |= result[1]
    here = items.present(result)[0]
    result[0] |= here & items.allowed[0] & (prices.compute[0] < prices.receive[0])
    return result


def build_network(items: Items, prices: Prices, computed: Bools, *, max_arcs: int | None = None) -> CutNetwork | None:
    """Builds the network of the items that `computed`, a part of every optimum, leaves undecided.

    None as soon as it is known to have more than `max_arcs` arcs.
    """
    num_layers, num_halo = items.num_layers, items.num_halo
    gain = prices.receive - prices.compute
    # Holding an input row that would be cheaper received is the only cost of c(u, 0): charge it to c(u, 1), which asks.
    if num_layers > 1:
        held = np.where(computed[0], 0.0, np.maximum(-gain[0], 0.0))
        gain[1] -= held
    present = items.present(computed)
    free = _candidates(items, gain, computed, present)
    compute_node = np.full((num_layers, num_halo), -1, dtype=np.int64)
    compute_node[free] = np.arange(int(free.sum()))
    num_nodes = int(free.sum())
    if max_arcs is not None and num_nodes > max_arcs:
        return None
    present_node = np.full((num_layers, num_halo), -1, dtype=np.int64)
    tails: list[Ints] = []
    heads: list[Ints] = []
    for level in range(num_layers - 1, -1, -1):
        wanted = free[level] & ~present[level]
        if level + 1 < num_layers:
            wanted |= items.reads(free[level + 1], level + 1)
            # c(u, l + 1) asks for c(u, l) and so for a(u, l); level 0 has no node for c.
            wanted |= free[level + 1]
        wanted &= ~present[level]
        present_node[level, wanted] = num_nodes + np.arange(int(wanted.sum()))
        num_nodes += int(wanted.sum())
    for level in range(1, num_layers):
        own = np.flatnonzero(free[level])
        for below in (present_node[level], compute_node[level - 1], present_node[level - 1]):
            arcs = own[below[own] >= 0]
            tails.append(compute_node[level, arcs])
            heads.append(below[arcs])
        if level <= items.lowest:
            continue
        edges = np.flatnonzero(free[level][items.reader] & (present_node[level - 1] >= 0)[items.source])
        if max_arcs is not None and edges.size + sum(part.size for part in tails) > max_arcs:
            return None
        tails.append(compute_node[level, items.reader[edges]])
        heads.append(present_node[level - 1, items.source[edges]])
    weight = np.zeros(num_nodes)
    weight[compute_node[free]] = gain[free]
    bought = present_node >= 0
    price = prices.receive.copy()
    price[0] = np.where(items.allowed[0], np.minimum(price[0], prices.compute[0]), price[0])
    weight[present_node[bought]] = -price[bought]
    none = [np.zeros(0, dtype=np.int64)]
    return CutNetwork(
        compute_node=compute_node,
        weight=weight,
        tail=np.concatenate(tails or none).astype(np.int32),
        head=np.concatenate(heads or none).astype(np.int32),
    )


def _candidates(items: Items, gain: Floats, computed: Bools, present: Bools) -> Bools:
    """Returns (L, H): undecided items at levels >= 1 that some optimum might compute.

    From the top: an item is worth a node if it might have to be present and some chain of levels upwards from it gains;
    dropping the rest from any choice frees constraints and loses nothing.
    """
    free = np.zeros_like(computed)
    above = np.zeros(items.num_halo)
    for level in range(items.num_layers - 1, 0, -1):
        possible = items.allowed[level] & ~computed[level]
        might = present[level] | free[level]
        if level + 1 < items.num_layers:
            might = present[level] | free[level + 1] | items.reads(free[level + 1], level + 1)
        # The best this item and levels above could gain if all inputs came free; `above` of levels without a node is 0.
        best = gain[level] + np.maximum(above, 0.0)
        free[level] = possible & might & (best > 0)
        above = np.where(free[level], best, 0.0)
    for level in range(2, items.num_layers):
        # A chain that loses as a whole is cut at its foot, so nothing of it can stand.
        free[level] &= free[level - 1] | computed[level - 1]
    return free


def solve(network: CutNetwork) -> Bools:
    """Returns (n,) bool: the nodes on the source side of the smallest minimum cut."""
    from ortools.graph.python import max_flow

    num_nodes = network.weight.size
    side = np.zeros(num_nodes, dtype=np.bool_)
    if not num_nodes or not (network.weight > 0).any():
        return side
    total = float(np.abs(network.weight).sum())
    capacity = np.rint(np.abs(network.weight) * (CAPACITY_SUM / total)).astype(np.int64)
    infinite = 2 * CAPACITY_SUM
    source, sink = num_nodes, num_nodes + 1
    gains, prices = np.flatnonzero(network.weight > 0), np.flatnonzero(network.weight < 0)
    if not prices.size:
        side[:] = True
        return side
    flow = max_flow.SimpleMaxFlow()
    for tail, head, limit in (
        (np.full(gains.size, source, dtype=np.int32), gains.astype(np.int32), capacity[gains]),
        (network.tail, network.head, np.full(network.tail.size, infinite, dtype=np.int64)),
        (prices.astype(np.int32), np.full(prices.size, sink, dtype=np.int32), capacity[prices]),
    ):
        if tail.size:
            flow.add_arcs_with_capacity(tail, head, limit)
    status = flow.solve(source, sink)
    if status != flow.OPTIMAL:
        raise PlanError(
            f"the minimum cut was not solved (got status {status}, {num_nodes} nodes, {network.num_arcs} arcs). "
            "Possible solutions: 1) set max_cut_arcs below that number to use the greedy, 2) choose strategy greedy"
        )
    reached = np.asarray(flow.get_source_side_min_cut(), dtype=np.int64)
    side[reached[reached < num_nodes]] = True
    return side
