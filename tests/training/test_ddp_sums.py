# SPDX-License-Identifier: Apache-2.0
"""DDP sums its gradients through the memory of the host, and they are those that it sums over its process group."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import dgl.nn as dglnn
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

from dgl_hybrid import FullGraphLoader, PartitionedGraph
from dgl_hybrid.errors import ExchangeError
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.connect import create_communicator
from dgl_hybrid.exchange.shared_memory_transport import SharedMemoryTransport
from dgl_hybrid.training import ddp_sums
from tests.helpers.graphs import NUM_CLASSES, NUM_FEATURES, power_law
from tests.helpers.hosts import on_hosts
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks, stay_away, tell_who_stays_away

DDP = nn.parallel.DistributedDataParallel
NUM_STEPS = 4
Gradients = list[list[Tensor]]


class Model(nn.Module):
    """Two layers, an embedding, and, if asked for, a layer that nobody uses."""

    def __init__(self, *, is_sparse: bool = False, has_unused: bool = False, embeds_first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(8)
        if embeds_first:  # the last bucket: they are ready from the last parameter to the first
            self.of_class = nn.Embedding(5, NUM_CLASSES, sparse=is_sparse).double()
        self.first = dglnn.SAGEConv(NUM_FEATURES, 8, "mean", activation=torch.tanh).double()
        self.second = dglnn.SAGEConv(8, NUM_CLASSES, "mean").double()
        if not embeds_first:
            self.of_class = nn.Embedding(5, NUM_CLASSES, sparse=is_sparse).double()
        self.unused = nn.Linear(3, 3).double() if has_unused else None

    def forward(self, blocks: Any, x: Tensor, seeds: Tensor) -> Tensor:
        out: Tensor = self.second(blocks[1], self.first(blocks[0], x)) + self.of_class(seeds % 5)
        return out


def train(
    g: PartitionedGraph,
    model: nn.Module,
    *,
    num_steps: int = NUM_STEPS,
    before: Callable[[int], Any] = lambda step: contextlib.nullcontext(),
) -> Gradients:
    """Returns the gradients of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=[g.nodes.owned()[:0]] * 2)
    found: Gradients = []
    for step in range(num_steps):
        for inputs, seeds, blocks in loader:
            with before(step):
                loss = F.cross_entropy(model(blocks, g.ndata["feat"][inputs], seeds), g.ndata["label"][seeds])
                loss.backward()  # type: ignore[no-untyped-call]
        found.append([x.grad.to_dense().clone() for x in model.parameters() if x.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    return found


def flat(gradients: Gradients) -> list[Tensor]:
    return list(itertools.chain.from_iterable(gradients))


def hooks_of(model: DDP) -> list[str]:
    return [hook.__qualname__ for hook, _ in model._comm_hooks]


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "small buckets": ({}, {"bucket_cap_mb": 1e-4}),
    "views": ({}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}),
    "unused": ({"has_unused": True}, {"find_unused_parameters": True}),
    "static graph": ({"has_unused": True}, {"static_graph": True}),
    "sparse": ({"is_sparse": True}, {}),
    "sparse at last": ({"is_sparse": True, "embeds_first": True}, {}),
}


def run_both(rank: int, world_size: int, part_config: str, way: str) -> tuple[Gradients, Gradients, list[str]]:
    of_model, of_ddp = WAYS[way]
    g = PartitionedGraph.open(part_config)
    model = DDP(Model(**of_model), **of_ddp)
    found = train(g, model)
    with mock.patch.object(ddp_sums.DdpSums, "note"):
        # DDP itself divides sparse gradients in place, and with them the dense ones that share their memory.
        alone = DDP(Model(**(of_model | {"is_sparse": False})), **of_ddp)
        expected = train(g, alone)
    assert hooks_of(alone) == []
    return found, expected, hooks_of(model)


@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gradients_are_those_of_ddp(world_size: int, way: str, partitions: PartitionStore) -> None:
    results = run_ranks(world_size, run_both, partitions.get("power_law", power_law(), world_size), way)
    for found, expected, hooks in results:
        assert hooks == (["_sum_bucket"] if world_size > 1 else [])
        assert len(found) == len(expected) == NUM_STEPS
        for here, there, first in zip(flat(found), flat(expected), flat(results[0][0]), strict=True):
            assert torch.equal(here, first), "all ranks get the same bits"
            if world_size <= 2 and "sparse" not in way:
                assert torch.equal(here, there)
            else:
                torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-15)


class Otherwise(nn.Module):
    """A parameter of a bucket of its own, whose gradient comes before those of the layers on even ranks only.

    By what rank 0 has seen in the first step, DDP sums it first in the second one.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.model, self.rank = Model(), rank
        self.scale = nn.Parameter(torch.ones(NUM_CLASSES, dtype=torch.float64))

    def forward(self, blocks: Any, x: Tensor, seeds: Tensor) -> Tensor:
        # Of nodes that wait for nothing more, a backward pass runs the one first that was made last.
        scale = self.scale * 2 if self.rank % 2 == 1 else None
        out: Tensor = self.model(blocks, x, seeds)
        scale = self.scale * 2 if scale is None else scale
        return out * scale


def run_otherwise(rank: int, world_size: int, part_config: str) -> tuple[Gradients, list[str], list[str]]:
    g = PartitionedGraph.open(part_config, communicator=create_communicator(timeout_s=60.0))
    order: list[str] = []
    model = DDP(Otherwise(rank), bucket_cap_mb=1e-5)
    model.module.scale.register_post_accumulate_grad_hook(lambda _: order.append("scale"))
    start = Communicator.start_exchange

    def noting(communicator: Communicator, *args: Any, **options: Any) -> Any:
        if options.get("backward"):
            order.append("exchange")
        return start(communicator, *args, **options)

    with mock.patch.object(Communicator, "start_exchange", noting):
        found = train(g, model, num_steps=2)
    return found, order, hooks_of(model)


def test_ranks_may_come_to_sums_and_exchanges_in_another_order(partitions: PartitionStore) -> None:
    results = run_ranks(3, run_otherwise, partitions.get("power_law", power_law(), 3))
    for rank, (found, order, hooks) in enumerate(results):
        assert hooks == ["_sum_bucket"]
        assert order == (["scale", "exchange"] if rank % 2 == 0 else ["exchange", "scale"]) * 2
        assert all(torch.equal(a, b) for a, b in zip(flat(found), flat(results[0][0]), strict=True))


class Checkpointed(nn.Module):
    """Has a backward pass inside of another: the last bucket is ready in the inner one, others are in the outer."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.first = Model(), nn.Linear(NUM_FEATURES, NUM_FEATURES).double()

    def forward(self, blocks: Any, x: Tensor, seeds: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        x = checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=True)  # type: ignore[no-untyped-call]
        out: Tensor = self.model(blocks, x, seeds)
        return out


def run_checkpointed(rank: int, world_size: int, part_config: str, is_static: bool) -> tuple[Gradients, Gradients]:
    g = PartitionedGraph.open(part_config)
    found = train(g, model := DDP(Checkpointed(), bucket_cap_mb=1e-4, static_graph=is_static))
    assert hooks_of(model) == ["_sum_bucket"]
    with mock.patch.object(ddp_sums.DdpSums, "note"):
        return found, train(g, DDP(Checkpointed(), bucket_cap_mb=1e-4, static_graph=is_static))


@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_buckets_of_passes_inside_of_others(world_size: int, is_static: bool, partitions: PartitionStore) -> None:
    """DDP waits in the inner one for all of them, for ever if those of the outer one were summed at its end."""
    part_config = partitions.get("power_law", power_law(), world_size)
    for found, expected in run_ranks(world_size, run_checkpointed, part_config, is_static):
        for here, there in zip(flat(found), flat(expected), strict=True):
            torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-15)


def run_two_models(rank: int, world_size: int, part_config: str, is_together: bool) -> Gradients | str:
    """Two models of one shape; the last rank comes to them in another order."""
    g = PartitionedGraph.open(part_config, communicator=create_communicator(timeout_s=60.0))
    models = [DDP(Otherwise(0), process_group=dist.new_group(), bucket_cap_mb=1e-4) for _ in range(2)]
    models[1].module.load_state_dict({name: 2 * value for name, value in models[0].module.state_dict().items()})
    # Everything is cached: exchanges of layers would tell that ranks are not in the same place.
    loader, found = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, strategy="depcache"), []
    for step in range(3):
        for inputs, seeds, blocks in loader:
            losses = {}
            is_other = step == 2 and rank == world_size - 1
            for number in (1, 0) if is_other else (0, 1):
                models[number].zero_grad()
                out = models[number](blocks, g.ndata["feat"][inputs], seeds)
                losses[number] = F.cross_entropy(out, g.ndata["label"][seeds])
            try:
                if is_together:
                    (losses[0] + losses[1]).backward()
                else:
                    for loss in losses.values():
                        loss.backward()
            except ExchangeError as error:
                return str(error)
        found.append([x.grad.clone() for model in models for x in model.parameters() if x.grad is not None])
    return found


def test_ranks_may_come_to_models_of_one_pass_in_another_order(partitions: PartitionStore) -> None:
    results = run_ranks(3, run_two_models, partitions.get("power_law", power_law(), 3), True)
    for found in results:
        assert len(found) == 3
        for here, there in zip(flat(found), flat(results[0]), strict=True):
            assert torch.equal(here, there)
        torch.testing.assert_close(found[2], found[0], rtol=1e-12, atol=1e-15)  # no step was taken


def test_passes_of_models_in_another_order_are_not_mixed(partitions: PartitionStore) -> None:
    """DDP itself would wait for ever: each has a process group of its own."""
    for message in run_ranks(3, run_two_models, partitions.get("power_law", power_law(), 3), False):
        assert "ranks are not in the same place: rank 0 of 3 sums" in message
        assert "(DDP's gradients: model 0, bucket 0), rank 2 sums" in message
        assert "(DDP's gradients: model 1, bucket 0)" in message


def run_accumulating(rank: int, world_size: int, part_config: str) -> list[Gradients]:
    """Steps without sums, then one that sums what has come together."""
    g, found = PartitionedGraph.open(part_config), []
    for is_ours in (True, False):
        with contextlib.nullcontext() if is_ours else mock.patch.object(ddp_sums.DdpSums, "note"):
            model = DDP(Model())
            kept = mock.patch.object(torch.optim.SGD, "zero_grad")
            with kept:
                found.append(
                    train(g, model, before=lambda step: model.no_sync() if step % 2 == 0 else contextlib.nullcontext())  # noqa: B023
                )
    return found


def test_steps_without_sums(partitions: PartitionStore) -> None:
    for found, expected in run_ranks(2, run_accumulating, partitions.get("power_law", power_law(), 2)):
        for here, there in zip(flat(found), flat(expected), strict=True):
            assert torch.equal(here, there)


def run_left_alone(rank: int, world_size: int, part_config: str, why: str) -> list[str]:
    hosts: Sequence[int] | None = [0, 1] if why == "hosts" else None
    with on_hosts(rank, hosts):
        communicator = create_communicator(transport="collective" if why == "transport" else "auto")
    g = PartitionedGraph.open(part_config, communicator=communicator)
    group = [dist.new_group([one]) for one in range(world_size)][rank] if why == "a group of its own" else None
    model = DDP(Model(), process_group=group)
    if why == "a hook":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    if why == "a built-in hook":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    if why == "a hook of one rank" and rank == 1:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    if why == "evaluation":
        with torch.no_grad():
            for inputs, seeds, blocks in FullGraphLoader(g, g.owned_nodes("train_mask"), 2):
                model(blocks, g.ndata["feat"][inputs], seeds)
    else:
        train(g, model)
    return hooks_of(model)


@pytest.mark.parametrize(
    ("why", "hooks"),
    [
        *(("transport", []), ("hosts", []), ("evaluation", []), ("a group of its own", [])),
        ("a hook", ["allreduce_hook"]),
        ("a built-in hook", []),
    ],
)
def test_what_is_left_as_it_is(why: str, hooks: list[str], partitions: PartitionStore) -> None:
    results = run_ranks(2, run_left_alone, partitions.get("power_law", power_law(), 2), why)
    assert results == [hooks, hooks]


def test_a_hook_on_one_rank_alone_is_agreed_on(partitions: PartitionStore) -> None:
    results = run_ranks(2, run_left_alone, partitions.get("power_law", power_law(), 2), "a hook of one rank")
    assert results == [[], ["allreduce_hook"]]


def run_beyond(rank: int, world_size: int, part_config: str) -> dict[str, Any]:
    """What scripts do with a model besides: two of them, copies, files, other batches, after the loader is gone."""
    g = PartitionedGraph.open(part_config)
    model, other = DDP(Model()), DDP(Model())
    train(g, model, num_steps=2)
    train(g, other, num_steps=2)
    train(g, model, num_steps=1)  # another loader
    found: dict[str, Any] = {"hooks": [hooks_of(model), hooks_of(other)]}
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    read: Any = torch.load(file, weights_only=False)  # of this test alone
    copied = copy.deepcopy(other)
    found["alike"] = all(
        torch.allclose(a, b, rtol=1e-12)
        for one, again in ((model, read), (other, copied))
        for a, b in zip(flat(train(g, one, num_steps=2)), flat(train(g, again, num_steps=2)), strict=True)
    )
    found["of copies"] = [one._get_ddp_logging_data()["comm_hook"] for one in (read, copied)]
    del g
    for one in (model, other):  # without blocks
        one.zero_grad()
        one.module.of_class(torch.tensor([rank])).sum().backward()
    plain = DDP(nn.Linear(2, 1).double())
    plain(torch.full((1, 2), float(rank)).double()).sum().backward()
    found["without us"] = hooks_of(plain)
    return found


def test_models_are_saved_and_copied_as_ever(partitions: PartitionStore) -> None:
    for found in run_ranks(3, run_beyond, partitions.get("power_law", power_law(), 3)):
        assert found == {
            "hooks": [["_sum_bucket"]] * 2,
            "without us": [],
            "alike": True,
            "of copies": ["_sum_bucket"] * 2,
        }


def run_lost(rank: int, world_size: int, part_config: str) -> str:
    communicator = create_communicator(transport="shared_memory")
    g = PartitionedGraph.open(part_config, communicator=communicator)
    model = DDP(Model())
    train(g, model, num_steps=2)
    # From here on: what is compiled before takes longer on one rank than on another.
    assert isinstance(communicator.transport, SharedMemoryTransport)
    communicator.transport._timeout_s = 2.0
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=[g.nodes.owned()[:0]] * 2)
    inputs, seeds, blocks = next(iter(loader))
    loss = F.cross_entropy(model(blocks, g.ndata["feat"][inputs], seeds), g.ndata["label"][seeds])
    try:
        if rank == 1:
            loss = (loss.detach().requires_grad_() * 2).sum()  # it takes part in the exchanges of no backward pass
            stay_away(rank, world_size)
        loss.backward()  # type: ignore[no-untyped-call]
    except ExchangeError as error:
        tell_who_stays_away(rank)
        return str(error)
    return "no error"


def test_who_does_not_come_to_the_sum_is_named(partitions: PartitionStore) -> None:
    messages = run_ranks(3, run_lost, partitions.get("power_law", power_law(), 3))
    for rank in (0, 2):
        assert f"did not complete on rank {rank} of 3: rank 1 did not take part" in messages[rank]
