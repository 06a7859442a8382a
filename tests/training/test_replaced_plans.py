# SPDX-License-Identifier: Apache-2.0
"""What is left of a plan that was replaced, or of a loader that was dropped, whatever the script or its layers still
hold; what held blocks answer.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import dgl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph, optimize
from dgl_hybrid.errors import BlockError
from dgl_hybrid.planner import uniform_topology
from dgl_hybrid.training import loader as loader_module
from tests.helpers.exactness import Case
from tests.helpers.graphs import power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks
from tests.training.trial_turns import AT_ONCE, MOST_EPOCHS


@contextlib.contextmanager
def the_first_plan_is_the_fastest(loader: FullGraphLoader) -> Iterator[None]:
    """By times made up: however many candidates there are, each is tried, and the first one comes back at the end."""
    real_clock, strategies, now_ns = loader_module.time.perf_counter_ns, [], 0

    def look() -> int:
        nonlocal now_ns
        strategies.append(loader.outcome.plan.strategy)
        now_ns += 10**8 if strategies[-1] == strategies[0] else 10**9
        return now_ns

    loader_module.time.perf_counter_ns = look
    try:
        yield
    finally:
        loader_module.time.perf_counter_ns = real_clock


def watch_what_stays(
    rank: int, world_size: int, part_config: str, kind: str, has_cycles: bool, epochs: int
) -> tuple[list[set[str]], list[bool]]:
    """Returns, for each change of plan, what of the plan before is still there where Python looks for no cycles itself,
    and whether the loader looked for some.

    Args:
        has_cycles: Whether the model's code leaves some, with all of that in them.
    """
    g = PartitionedGraph.open(part_config)
    model = optimize(Case(kind=kind, num_layers=3).build(g.ndata["feat"].shape[1]))
    topology = uniform_topology(world_size, bandwidth_bytes_per_s=4e8)
    loader = FullGraphLoader(
        g, g.owned_nodes("train_mask"), 3, model=model, topology=topology, seed=5, autotune=AT_ONCE
    )
    watched: dict[str, weakref.ref[object]] = {}
    left: list[set[str]] = []
    searched: list[bool] = []
    give_back = loader_module.give_back_memory

    def note_search(*, thoroughly: bool) -> None:
        searched.append(thoroughly)
        give_back(thoroughly=thoroughly)

    def train() -> None:
        for input_nodes, ids, blocks in loader:
            if watched["ids"]() is not input_nodes:
                left.append({name for name, reference in watched.items() if reference() is not None})
            features = g.ndata["feat"][input_nodes]
            F.cross_entropy(model(blocks, features), g.ndata["label"][ids]).backward()
            results = [kept.result for kept in blocks[0].static_results._kept.values()]
            things = {"ids": input_nodes, "features": features, "block": blocks[-1]}
            things |= {f"kept {i}": result for i, result in enumerate(results) if result is not None}
            assert ("kept 0" in things) == (kind == "sage_mean")
            things |= {"structure": blocks[-1].structure, "edges": blocks[0].structure.indices}
            if has_cycles:
                ring: dict[str, object] = dict(things)
                ring["ring"] = ring
            watched.update({name: weakref.ref(thing) for name, thing in things.items()})

    watched["ids"] = weakref.ref(torch.empty(0))
    gc.collect()
    gc.disable()
    loader_module.give_back_memory = note_search  # type: ignore[assignment]
    try:
        with the_first_plan_is_the_fastest(loader):
            for _ in range(epochs):
                train()  # a script's own variables would keep a plan's blocks
                if loader.is_settled:
                    break
    finally:
        gc.enable()
        loader_module.give_back_memory = give_back
    assert loader.is_settled
    return left, searched


@pytest.mark.parametrize(
    ("kind", "has_cycles"), [("sage_mean", False), ("gat", False), ("dotgat", False), ("sage_mean", True)]
)
def test_nothing_of_a_plan_that_was_tried_is_left(kind: str, has_cycles: bool, partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    for left, searched in run_ranks(3, watch_what_stays, folder, kind, has_cycles, MOST_EPOCHS):
        assert len(left) >= 3, "the first plan and two changes"
        assert left == [set()] * len(left)
        assert searched == [has_cycles] * (len(left) - 1), "a search takes as long as several epochs"


@dataclass(kw_only=True)
class Held:
    """What a script that keeps its batches holds of plans that were replaced."""

    num_replaced: int
    left: set[str]
    """What is still there of any of them."""
    raised: dict[str, str]
    """By what was done with the blocks, what the error said."""
    text: str


def hold_batches(rank: int, world_size: int, part_config: str, is_tuned: bool) -> Held:
    g = PartitionedGraph.open(part_config)
    model = optimize(Case(kind="sage_mean", num_layers=3).build(g.ndata["feat"].shape[1]))
    loader = FullGraphLoader(
        g,
        g.owned_nodes("train_mask"),
        3,
        model=model if is_tuned else None,
        topology=uniform_topology(world_size, bandwidth_bytes_per_s=4e8),
        seed=5,
        autotune=AT_ONCE if is_tuned else False,
    )
    batches: list[tuple[torch.Tensor, torch.Tensor, list[Any]]] = []
    watched: list[dict[str, weakref.ref[object]]] = []

    def train(batch: tuple[torch.Tensor, torch.Tensor, list[Any]]) -> None:
        input_nodes, ids, blocks = batch
        features = g.ndata["feat"][input_nodes]
        F.cross_entropy(model(blocks, features), g.ndata["label"][ids]).backward()
        if not batches or batches[-1][0] is not input_nodes:
            (kept,) = (kept.result for kept in blocks[0].static_results._kept.values() if kept.result is not None)
            things = {"features": features, "kept": kept, "structure": blocks[-1].structure}
            things |= {"edges": blocks[0].structure.indices, "graph": blocks[1]._block}
            watched.append({name: weakref.ref(thing) for name, thing in things.items()})
            batches.append(batch)

    with the_first_plan_is_the_fastest(loader) if is_tuned else contextlib.nullcontext():
        for _ in range(MOST_EPOCHS):
            for batch in loader:
                train(batch)
            if loader.is_settled and len(batches) > 1:
                break
    raised = {}
    input_nodes, _, blocks = batches[0]
    uses: dict[str, Callable[[], object]] = {
        "model": lambda: model(blocks, torch.zeros(len(input_nodes), g.ndata["feat"].shape[1], dtype=torch.float64)),
        "fields": lambda: blocks[0].srcdata,
        "sizes": lambda: blocks[-1].num_dst_nodes(),
        "copy": lambda: blocks[0].to("cpu"),
        "anything": lambda: blocks[0].whatever,
    }
    for name, use in uses.items():
        try:
            use()
        except BlockError as error:
            raised[name] = str(error)
    for batch in loader:
        train(batch)  # the errors leave nothing behind
    return Held(
        num_replaced=len(batches) - 1,
        left={name for of_plan in watched[:-1] for name, reference in of_plan.items() if reference() is not None},
        raised=raised,
        text=repr(blocks),
    )


@pytest.mark.parametrize("is_tuned", [True, False])
def test_batches_that_a_script_holds_keep_nothing_of_a_replaced_plan(
    is_tuned: bool, partitions: PartitionStore
) -> None:
    """A list of batches made before the loop, or a variable that outlives it, kept one plan beside another; and the old
    blocks went on to be used as if they were the loader's.
    """
    for held in run_ranks(3, hold_batches, partitions.get("power_law", power_law(), 3), is_tuned):
        assert held.num_replaced >= (2 if is_tuned else 1)
        assert held.left == set()
        assert set(held.raised) == {"model", "fields", "sizes", "copy", "anything"}
        for message in held.raised.values():
            assert "of a plan that was replaced" in message
            assert "take the blocks, and the ids, that the loader yields in each epoch" in message
        assert "replaced" in held.text


def call_after_training(rank: int, world_size: int, part_config: str) -> list[bool]:
    """Returns, for a module and a model on a graph of DGL's, whether both give what they gave before."""
    g = PartitionedGraph.open(part_config)
    linear, graph = nn.Linear(2, 2).double(), dgl.rand_graph(9, 30)
    stock = dgl.nn.SAGEConv(3, 2, "mean").double()
    x, rows = torch.ones(3, 2, dtype=torch.float64), torch.randn(9, 3, dtype=torch.float64)
    expected = linear(x), stock(graph, rows)

    def train() -> None:
        model = optimize(Case(kind="sage_mean", num_layers=2).build(g.ndata["feat"].shape[1]))
        model.compile(backend="eager")
        topology = uniform_topology(world_size)
        loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, topology=topology, seed=5, autotune=False)
        ids_of_plans = []
        for _ in range(3):
            for input_nodes, ids, blocks in loader:
                F.cross_entropy(model(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][ids]).backward()
                ids_of_plans.append(input_nodes)
        assert ids_of_plans[0] is not ids_of_plans[1], "the plan was replaced"

    torch._dynamo.reset()
    train()
    found = linear(x), stock(graph, rows)
    torch._dynamo.reset()
    return [torch.equal(*pair) for pair in zip(expected, found, strict=True)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_modules_are_called_for_no_step_of_a_replaced_plan(world_size: int, partitions: PartitionStore) -> None:
    """Dynamo's cache held the first step when the loader and its later steps were gone: whatever module was called
    then raised that its blocks are of a replaced plan.
    """
    folder = partitions.get("power_law", power_law(), world_size)
    assert run_ranks(world_size, call_after_training, folder) == [[True, True]] * world_size


def empty_batches(rank: int, world_size: int, part_config: str) -> list[float]:
    g = PartitionedGraph.open(part_config)
    model = Case(kind="sage_mean", num_layers=3).build(g.ndata["feat"].shape[1])
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 3, plan=[torch.arange(0)] * 3, seed=5)
    losses = []
    for _ in range(3):
        for input_nodes, ids, blocks in loader:
            layers = [blocks.pop(0) for _ in range(3)]  # a model that takes its blocks one by one does this
            losses.append(F.cross_entropy(model(layers, g.ndata["feat"][input_nodes]), g.ndata["label"][ids]).item())
    return losses


def test_the_list_of_blocks_belongs_to_the_script(partitions: PartitionStore) -> None:
    """It was the loader's own, whose next epoch then had no blocks."""
    for losses in run_ranks(2, empty_batches, partitions.get("power_law", power_law(), 2)):
        assert losses == [losses[0]] * 3


def drop_loaders(
    rank: int, world_size: int, part_config: str, kind: str, is_held: bool, strategy: str
) -> list[set[str]]:
    """Returns, for each of three loaders that the script dropped, what of it is there while Python looks for no cycles.

    Args:
        is_held: Whether the script still holds one block.
    """
    g = PartitionedGraph.open(part_config)
    model = optimize(Case(kind=kind, num_layers=3, dropout=0.5).build(g.ndata["feat"].shape[1]))
    topology = uniform_topology(world_size, bandwidth_bytes_per_s=4e8)
    held: list[Any] = []

    def train() -> dict[str, weakref.ref[object]]:
        loader = FullGraphLoader(
            g, g.owned_nodes("train_mask"), 3, model=model, topology=topology, seed=5, strategy=strategy
        )
        for _ in range(2):
            for input_nodes, ids, blocks in loader:
                logits = model(blocks, g.ndata["feat"][input_nodes])
                F.cross_entropy(logits, g.ndata["label"][ids]).backward()
        held[:] = blocks[1:2] if is_held else []
        things: dict[str, object] = {"loader": loader, "ids": input_nodes, "first block": blocks[0]}
        things |= {"step": loader._step, "structure": blocks[0].structure}
        if strategy == "depcomm":  # received rows have a structure of their own
            assert all(block._split is not None for block in blocks[1:])
            things |= {f"split block {number}": block._split for number, block in enumerate(blocks[1:], 2)}
        return {name: weakref.ref(thing) for name, thing in things.items()}

    gc.collect()
    gc.disable()
    try:
        return [{name for name, reference in train().items() if reference() is not None} for _ in range(3)]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("kind", "is_held", "strategy"),
    [
        *(("sage_mean", False, "hybrid"), ("gat", True, "hybrid"), ("dotgat", False, "hybrid")),
        *(("sage_mean", False, "depcomm"), ("gat", False, "depcomm")),
        *(
            pytest.param(*slow, "hybrid", marks=pytest.mark.slow)
            for slow in (("sage_mean", True), ("gat", False), ("dotgat", True))
        ),
    ],
)
def test_a_loader_that_is_dropped_is_gone_at_once(
    kind: str, is_held: bool, strategy: str, partitions: PartitionStore
) -> None:
    """It held itself by its step, so a script with a loader for each epoch held several plans."""
    folder = partitions.get("power_law", power_law(), 3)
    expected = {"step"} if is_held else set()  # a block that is held still draws the same masks on all ranks
    assert run_ranks(3, drop_loaders, folder, kind, is_held, strategy) == [[expected] * 3] * 3


def use_batch_of_no_loader(rank: int, world_size: int, part_config: str, is_kept: bool) -> list[torch.Tensor]:
    g = PartitionedGraph.open(part_config)
    model = optimize(Case(kind="sage_mean", dropout=0.5).build(g.ndata["feat"].shape[1]))
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=[torch.arange(0)] * 2, seed=5)
    input_nodes, ids, blocks = next(iter(loader))
    if not is_kept:
        gone = weakref.ref(loader)
        del loader
        assert gone() is None
    loss = F.cross_entropy(model(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][ids])
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def test_a_batch_outlives_its_loader(partitions: PartitionStore) -> None:
    """As `next(iter(loader))` gives it of a loader that nobody keeps, with the masks and the weight of the loss."""
    folder = partitions.get("power_law", power_law(), 3)
    kept, dropped = (run_ranks(3, use_batch_of_no_loader, folder, is_kept) for is_kept in (True, False))
    for of_kept, of_dropped in zip(kept, dropped, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(of_kept, of_dropped, strict=True))
