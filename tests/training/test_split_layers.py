# SPDX-License-Identifier: Apache-2.0
"""Exchange and aggregation together: the whole graph's results with messages in flight, in chunks, and apart."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from typing import Any

import dgl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dgl import function as fn

from dgl_hybrid import FullGraphLoader, PartitionedGraph
from dgl_hybrid.graph.optimize import optimize
from dgl_hybrid.ops import EdgeDropout
from dgl_hybrid.ops.op_counts import op_counts, reset_op_counts
from dgl_hybrid.planner import PlannerConfig, uniform_topology
from dgl_hybrid.planner.items import build_items
from dgl_hybrid.planner.plan import plan_from_choice
from dgl_hybrid.training.gradients import average_gradients
from tests.helpers.exactness import Case, StepResult, assert_close, assert_same_step, reference_step, run_step
from tests.helpers.graphs import NAMED, NUM_CLASSES, NUM_FEATURES, power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.thinning import each_value, pairwise
from tests.helpers.world import run_ranks, run_ranks_expect_errors

SUMS = ("gcn_both", "sage_mean", "gin", "edge_weight_norm")
ATTENTION = ("gat", "gatv2")
BY_OP = {"gcn_both": "copy_u", "sage_mean": "copy_u", "gin": "copy_u", "edge_weight_norm": "u_mul_e"}


def run_counted(rank: int, world_size: int, folder: str, case: Case) -> tuple[StepResult, dict[str, int]]:
    reset_op_counts()
    return run_step(rank, world_size, folder, case), op_counts()


Outcome = tuple[StepResult, dict[str, int]]


def run_case(case: Case, world_size: int, name: str, partitions: PartitionStore) -> list[Outcome]:
    graph = NAMED[name]()
    outcomes = run_ranks(world_size, run_counted, partitions.get(name, graph, world_size), case)
    assert_same_step([result for result, _ in outcomes], reference_step(graph, case))
    return outcomes  # type: ignore[no-any-return]


def num_split(counts: dict[str, int]) -> int:
    return sum(number for route, number in counts.items() if "split by source" in route)


@each_value(kind=[*SUMS, *ATTENTION], world_size=[2, 3, 4])
def test_in_one_message(kind: str, world_size: int, partitions: PartitionStore) -> None:
    """Each kind on 2 to 4 ranks: in chunks, below."""
    case = Case(kind=kind, num_layers=3, plan="random:1:0.3", epochs=2, optimized=True)
    for result, counts in run_case(case, world_size, "power_law", partitions):
        assert num_split(counts) == case.num_layers * case.epochs
        # Through memory nobody waits, and more would be held.
        assert "copy_u/ours: split by source, work beside" not in counts
        assert result.forward_exchanges == case.num_layers * case.epochs


@pairwise(kind=["gcn_both", "sage_mean"], world_size=[2, 3, 4], partial_sums=[False, True])
def test_over_a_network_products_run_beside(
    kind: str, world_size: int, partial_sums: bool, partitions: PartitionStore
) -> None:
    case = Case(
        kind=kind,
        num_layers=4,
        plan="random:2:0.3",
        epochs=2,
        optimized=True,
        partial_sums=partial_sums,
        rank_transport="collective",
    )
    for _, counts in run_case(case, world_size, "power_law", partitions):
        # Input features are copies that need a gradient, so no layer keeps its sums. The first and the last make rows
        # narrower: there `GraphConv` multiplies before anything travels.
        num_beside = case.num_layers if kind == "sage_mean" else case.num_layers - 2
        assert counts["copy_u/ours: split by source, work beside"] == num_beside * case.epochs


@pairwise(kind=[*SUMS, *ATTENTION], world_size=[2, 3, 4], chunk_rows=[1, 7])
def test_in_chunks(kind: str, world_size: int, chunk_rows: int, partitions: PartitionStore) -> None:
    case = Case(kind=kind, num_layers=2, plan="depcomm", epochs=1, optimized=True, chunk_rows=chunk_rows)
    outcomes = run_case(case, world_size, "power_law", partitions)
    exchanges = {(result.forward_exchanges, result.backward_exchanges) for result, _ in outcomes}
    assert len(exchanges) == 1
    forward, backward = exchanges.pop()
    assert forward > case.num_layers * (world_size - 1)
    # Attention fetches rows again.
    assert forward == (2 if kind in ATTENTION else 1) * backward
    assert all(num_split(counts) == case.num_layers for _, counts in outcomes)


@each_value(kind=[*SUMS, "gat"], world_size=[2, 3, 4], partial_sums=[True, False])
def test_partial_sums(kind: str, world_size: int, partial_sums: bool, partitions: PartitionStore) -> None:
    """Either way on 2 to 4 ranks: in `test_split_volume`."""
    case = Case(kind=kind, num_layers=3, epochs=2, partial_sums=partial_sums, optimized=True)
    run_case(case, world_size, "power_law", partitions)


@pytest.mark.parametrize("name", sorted(NAMED))
@pytest.mark.parametrize("kind", ["sage_mean", "gat"])
def test_every_graph_in_chunks(kind: str, name: str, partitions: PartitionStore) -> None:
    run_case(Case(kind=kind, plan="random:2:0.4", optimized=True, chunk_rows=3), 3, name, partitions)


@pytest.mark.parametrize("kind", [*SUMS, *ATTENTION])
def test_switched_off_nothing_is_split(kind: str, partitions: PartitionStore) -> None:
    for _, counts in run_case(Case(kind=kind, optimized=True, overlap=False), 3, "power_law", partitions):
        assert num_split(counts) == 0


@pytest.mark.parametrize("kind", ["sage_pool", "gin_max", "user_defined", "direct_ops", "dotgat"])
def test_what_cannot_be_split_is_exact_too(kind: str, partitions: PartitionStore) -> None:
    for _, counts in run_case(Case(kind=kind, chunk_rows=4), 3, "power_law", partitions):
        assert num_split(counts) == 0


@pytest.mark.parametrize("kind", ["gat", "gat_attn_drop"])
@pytest.mark.parametrize("chunk_rows", [None, 5])
def test_dropout_around_and_of_attention_is_that_of_one_rank(
    chunk_rows: int | None, kind: str, partitions: PartitionStore
) -> None:
    folder = {ranks: partitions.get("power_law", power_law(), ranks) for ranks in (1, 3)}
    case = Case(kind=kind, dropout=0.3, optimized=True, chunk_rows=chunk_rows, epochs=2)
    (alone,) = run_ranks(1, run_step, folder[1], case)
    together = run_ranks(3, run_step, folder[3], case)
    for epoch, loss in enumerate(alone.losses):
        assert sum(result.losses[epoch] for result in together) == pytest.approx(loss, rel=1e-9)


def run_double_backward(rank: int, world_size: int, folder: str, chunk_rows: int | None) -> dict[str, bool]:
    """Second derivatives of a split sum against those of the sum over complete rows."""
    g = PartitionedGraph.open(folder)
    found = {}
    for overlap in (True, False):
        nothing = [torch.empty(0, dtype=torch.int64)]
        loader = FullGraphLoader(
            g, g.nodes.owned(), 1, plan=nothing, overlap=overlap, chunk_rows=chunk_rows if overlap else None
        )
        for input_nodes, _, (block,) in loader:
            x = torch.sin(input_nodes.double())[:, None].repeat(1, 3).requires_grad_()
            with block.local_scope():
                block.srcdata["h"] = x
                block.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
                y = block.dstdata["h"]
            (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad((first**2).sum(), x)
            found[overlap] = (y, first, second)
    return {
        str(order): torch.allclose(split, whole, rtol=1e-9)
        for order, (split, whole) in enumerate(zip(found[True], found[False], strict=True))
    }


@pytest.mark.parametrize("chunk_rows", [None, 4])
def test_double_backward(chunk_rows: int | None, partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    for checks in run_ranks(3, run_double_backward, folder, chunk_rows):
        assert all(checks.values()), checks


def train_within(
    rank: int,
    world_size: int,
    folder: str,
    kind: str,
    budget: float | None,
    strategy: str = "hybrid",
    num_layers: int = 2,
    chunk_rows: int | None = None,
) -> dict[str, Any]:
    """Two epochs under a memory budget, planned."""
    g = PartitionedGraph.open(folder)
    case = Case(kind=kind, num_layers=num_layers)
    model = optimize(case.build(g.ndata["feat"].shape[1]))
    loader = FullGraphLoader(
        g,
        g.owned_nodes("train_mask"),
        num_layers,
        model=model,
        planner=PlannerConfig(strategy=strategy, memory_budget_bytes=budget),
        topology=uniform_topology(world_size),
        autotune=False,
        chunk_rows=chunk_rows,
    )
    assert loader.outcome is not None
    losses = []
    for _ in range(2):
        for input_nodes, seeds, blocks in loader:
            logits = model(blocks, g.ndata["feat"][input_nodes])
            loss = F.cross_entropy(logits, g.ndata["label"][seeds])
            loss.backward()
            losses.append(loss.item() * loader.loss_weight)
    average_gradients(model, loader)
    gradients = [parameter.grad for parameter in model.parameters()]
    estimate = loader.outcome.plan.estimate
    assert estimate is not None
    held_bytes = estimate.ranks[rank].held_bytes
    splits = [block._split for block in loader.blocks]
    return {
        "held_bytes": held_bytes,
        "planned": loader.outcome.plan.num_cached[0] + loader.outcome.plan.communicated[0],
        "inputs": int((~loader.sets.owned).sum()) + sum(loader.sets.layers[0].exchange.recv_counts),
        "chunk_rows": loader.outcome.plan.chunk_rows,
        "messages": [0 if split is None else len(split._messages) for split in splits],
        "losses": losses,
        "gradients": gradients,
    }


@pytest.mark.parametrize("kind", ["sage_mean", "gat"])
def test_what_does_not_fit_a_budget_is_received_in_chunks(kind: str, partitions: PartitionStore) -> None:
    folder = partitions.get("power_law_4000", power_law(4000, 16000), 3)
    free = run_ranks(3, train_within, folder, kind, None)
    tight = run_ranks(3, train_within, folder, kind, 60_000.0)
    assert all(result["chunk_rows"] is None for result in free)
    assert len({result["chunk_rows"] for result in tight}) == 1
    assert tight[0]["chunk_rows"] is not None, [result["held_bytes"] for result in free]
    if kind == "sage_mean":  # a script's own does not lift the budget, and may be smaller
        given = run_ranks(3, train_within, folder, kind, 60_000.0, "hybrid", 2, 100_000)
        assert [result["messages"] for result in given] == [result["messages"] for result in tight]
        given = run_ranks(3, train_within, folder, kind, 60_000.0, "hybrid", 2, 3)
        assert max(given[0]["messages"]) > max(tight[0]["messages"]) > max(free[0]["messages"])
    for one, other in zip(tight, free, strict=True):
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-9)
        for gradient, expected in zip(one["gradients"], other["gradients"], strict=True):
            assert_close(gradient, expected, "gradient")


def test_a_budget_is_not_charged_what_no_rank_holds(partitions: PartitionStore) -> None:
    """Sums of the first layer are kept: who caches a row of it gets the sum, not what its in-neighbours have."""
    folder = partitions.get("power_law_4000", power_law(4000, 16000), 3)
    free, within = (run_ranks(3, train_within, folder, "sage_mean", budget, "depcache") for budget in (None, 1e12))
    assert [one["held_bytes"] for one in within] == [one["held_bytes"] for one in free]
    assert all(one["held_bytes"] > 0 for one in free)


def ring(num_nodes: int) -> dgl.DGLGraph:
    """Each node reads two on either side: what is two steps from a part no vertex of it reads."""
    nodes, steps = torch.arange(num_nodes), [-2, -1, 1, 2]
    graph = dgl.graph((torch.cat([(nodes + step) % num_nodes for step in steps]), nodes.repeat(len(steps))))
    generator = torch.Generator().manual_seed(0)
    graph.ndata["feat"] = torch.randn(num_nodes, NUM_FEATURES, generator=generator, dtype=torch.float64)
    graph.ndata["label"] = torch.randint(NUM_CLASSES, (num_nodes,), generator=generator)
    graph.ndata["train_mask"] = nodes % 2 > 0
    return graph


def cache_level_1(rank: int, world_size: int, folder: str) -> tuple[int, int]:
    """Caches at level 1 what this rank reads there, and nothing at level 2. Returns how many rows of other ranks'
    vertices the planner reckons with at level 0, and how many there are."""
    g = PartitionedGraph.open(folder)
    model = optimize(Case(kind="sage_mean", num_layers=3).build(g.ndata["feat"].shape[1]))
    mask = g.owned_nodes("train_mask")
    loader = FullGraphLoader(
        g, mask, 3, model=model, strategy="depcache", topology=uniform_topology(world_size), autotune=False
    )
    outcome = loader.outcome
    assert outcome is not None
    assert outcome.basis is not None
    problem, costs = outcome.basis.problem, outcome.basis.costs
    items = build_items(problem)
    computed = np.zeros_like(items.demand)
    computed[:2] = items.demand[1] & items.allowed[1]
    plan = plan_from_choice(problem, items, costs, computed, strategy="forced")
    loader = FullGraphLoader(g, mask, 3, plan=dataclasses.replace(plan, trace=outcome.plan.trace))
    held = int((~loader.sets.owned).sum()) + sum(loader.sets.layers[0].exchange.recv_counts)
    return int(items.present(computed)[0].sum()), held


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rows_cached_at_level_1_bring_no_inputs(num_ranks: int, partitions: PartitionStore) -> None:
    folder = partitions.get("ring_300", ring(300), num_ranks, method="metis")
    for reckoned, held in run_ranks(num_ranks, cache_level_1, folder):
        assert reckoned == held > 0


@pytest.mark.parametrize("kind", ["sage_pool", "sage_mean"])
def test_a_budget_that_nothing_fits_is_an_error_on_all_ranks(kind: str, partitions: PartitionStore) -> None:
    # A maximum needs all its sources; sums could do with a few at a time, but not with none.
    budget = 60_000.0 if kind == "sage_pool" else 100.0
    folder = partitions.get("power_law_4000", power_law(4000, 16000), 3)
    for error in run_ranks_expect_errors(3, train_within, folder, kind, budget):
        assert "no plan fits the memory budget" in error.message


def two_clusters() -> dgl.DGLGraph:
    """Two cliques; one node of each is read by four of the other: with a part each, one row goes either way."""
    pairs = [(base + u, base + v) for base in (0, 20) for u in range(20) for v in range(20) if u != v]
    pairs += [(0, 20 + k) for k in range(4)] + [(20, k) for k in range(4)]
    graph = dgl.graph(pairs, num_nodes=40)
    generator = torch.Generator().manual_seed(0)
    graph.ndata["feat"] = torch.randn(40, NUM_FEATURES, generator=generator, dtype=torch.float64)
    graph.ndata["label"] = torch.randint(NUM_CLASSES, (40,), generator=generator)
    graph.ndata["train_mask"] = torch.arange(40) % 3 > 0
    graph.edata["w"] = torch.rand(graph.num_edges(), generator=generator, dtype=torch.float64) + 0.5
    return graph


@pytest.mark.parametrize("kind", [*ATTENTION, "gcn_both"])
def test_a_single_row_is_received(kind: str, partitions: PartitionStore) -> None:
    graph = two_clusters()
    case = Case(kind=kind, num_layers=3, optimized=True)
    results = run_ranks(2, run_step, partitions.get("two_clusters", graph, 2, method="metis"), case)
    assert_same_step(results, reference_step(graph, case))


def one_way(num_parts: int, nodes_per_part: int = 12) -> dgl.DGLGraph:
    """Consecutive nodes are a part. The first part is read by all others and reads itself alone; rank 1 has no edge
    between its own nodes."""
    generator = torch.Generator().manual_seed(0)
    num_nodes = num_parts * nodes_per_part
    src, dst = torch.randint(num_nodes, (2, 12 * num_nodes), generator=generator)
    owner, reader = src // nodes_per_part, dst // nodes_per_part
    kept = ((reader != 0) | (owner == 0)) & ((reader != 1) | (owner != 1))
    graph = dgl.graph((src[kept], dst[kept]), num_nodes=num_nodes)
    graph.ndata["feat"] = torch.randn(num_nodes, NUM_FEATURES, generator=generator, dtype=torch.float64)
    graph.ndata["label"] = torch.randint(NUM_CLASSES, (num_nodes,), generator=generator)
    graph.ndata["train_mask"] = torch.arange(num_nodes) % 3 > 0
    graph.edata["w"] = torch.rand(graph.num_edges(), generator=generator, dtype=torch.float64) + 0.5
    return graph


@pairwise(kind=["gat", "gatv2", "sage_mean"], world_size=[2, 3, 4], chunk_rows=[None, 3], partial_sums=[False, True])
def test_a_rank_receives_nothing_and_another_reads_nothing_of_its_own(
    kind: str, world_size: int, chunk_rows: int | None, partial_sums: bool, partitions: PartitionStore
) -> None:
    graph = one_way(world_size)
    case = Case(kind=kind, optimized=True, chunk_rows=chunk_rows, partial_sums=partial_sums, epochs=2)
    folder = partitions.get(f"one_way_{world_size}", graph, world_size, method="contiguous")
    outcomes = run_ranks(world_size, run_counted, folder, case)
    assert_same_step([result for result, _ in outcomes], reference_step(graph, case))
    assert all(num_split(counts) == case.num_layers * case.epochs for _, counts in outcomes)


def run_corners(rank: int, world_size: int, folder: str, chunk_rows: int | None) -> dict[str, bool]:
    """Rows without columns, copies on another device, and a failure beside a message in flight."""
    g = PartitionedGraph.open(folder)
    nothing = [torch.empty(0, dtype=torch.int64)]
    loader = FullGraphLoader(g, g.nodes.owned(), 1, plan=nothing, chunk_rows=chunk_rows)
    checks = {}
    for input_nodes, _, (block,) in loader:
        for shape in ((), (0,), (3, 0), (2, 3)):
            with block.local_scope():
                block.srcdata["h"] = torch.ones(len(input_nodes), *shape)
                block.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
                checks[f"shape {shape}"] = block.dstdata["h"].shape == (block.num_dst_nodes(), *shape)
        split = block._split
        assert split is not None
        meta = split.on(torch.device("meta"))
        checks["one for each device"] = (
            split.on(torch.device("cpu")) is split and split.on(torch.device("meta")) is meta
        )
        x = torch.ones(len(input_nodes), 2)
        held = split.plain_sums.layer.held
        split.plain_sums.layer.__dict__["held"] = None  # what is done beside the first message fails
        with contextlib.suppress(AttributeError):
            split.sum(x)
        split.plain_sums.layer.__dict__["held"] = held
        # The other messages of the failed call were never begun on any rank: the next call is a whole one again.
        checks["goes on after a failure"] = torch.equal(split.sum(x)[:, 0], block.in_degrees().float())
    return checks


@pytest.mark.parametrize("chunk_rows", [None, 4])
def test_corners(chunk_rows: int | None, partitions: PartitionStore) -> None:
    for checks in run_ranks(3, run_corners, partitions.get("power_law", power_law(), 3), chunk_rows):
        assert all(checks.values()), checks


def keys_left_by_an_epoch(rank: int, world_size: int, folder: str) -> int:
    """Returns how many dropouts of edges, with keys of their own, are alive while the script still has the loss."""
    g = PartitionedGraph.open(folder)
    model = optimize(Case(kind="gat_attn_drop", num_layers=2).build(g.ndata["feat"].shape[1]))
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, model=model, strategy="depcomm", autotune=False)
    for input_nodes, seeds, blocks in loader:
        loss = F.cross_entropy(model(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds])
        loss.backward()
        assert all(block._split is not None for block in blocks)
        dropouts = [one for one in gc.get_objects() if isinstance(one, EdgeDropout) and one.edge_keys is not None]
        shared = {block.structure.num_edges for block in blocks}
        return sum(len(one.edge_keys) not in shared for one in dropouts)  # type: ignore[arg-type]
    return -1


def test_no_keys_of_edges_outlive_a_backward(partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 2)
    assert run_ranks(2, keys_left_by_an_epoch, folder) == [0, 0]
