# SPDX-License-Identifier: Apache-2.0
"""Planning leaves the script's process as it was, and loaders of one graph do not plan with each other's rates."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import random
import threading
import weakref
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as functional
from torch import Tensor, nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph, infer
from dgl_hybrid.errors import ExchangeError
from dgl_hybrid.exchange.approximate import Approximation
from dgl_hybrid.exchange.closure import LevelSets
from dgl_hybrid.graph.optimize import optimize
from dgl_hybrid.planner import ModelTimes, PlannerConfig, Topology, uniform_topology
from dgl_hybrid.training import planning
from dgl_hybrid.training.planning import PlanMaker
from dgl_hybrid.training.timed_epochs import TimedEpochs
from tests.helpers.exactness import Case
from tests.helpers.graphs import NUM_FEATURES, power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks


class Unsteady(nn.Module):
    """Draws from every generator that a script may draw from, as to skip a layer now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Case(kind="gcn_both", dropout=0.5).build(NUM_FEATURES)
        self.num_calls = 0

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        out: Tensor = self.model(blocks, x)
        return out * (1.0 + 1e-9 * (random.random() + float(np.random.rand()) + float(torch.rand(()))))


def plan_and_compare(rank: int, world_size: int, part_config: str, is_timed: bool) -> dict[str, bool]:
    """Returns which generators planning left as they were."""
    g = PartitionedGraph.open(part_config)
    model = Unsteady()
    g.topology = uniform_topology(world_size)  # as if it had been measured before
    topology = None if is_timed else uniform_topology(world_size)
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, model=model, topology=topology, seed=3)
    assert loader.outcome is not None
    return {
        "python": random.getstate() == of_python,
        "numpy": all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), of_numpy, strict=True)),
        "torch": torch.equal(torch.get_rng_state(), of_torch),
    }


def test_planning_draws_from_no_generator_of_the_script(partitions: PartitionStore) -> None:
    """The copies that are traced and timed did, and ranks, which time as often as they can, then went apart."""
    folder = partitions.get("power_law", power_law(), 2)
    for is_timed in (False, True):
        for unchanged in run_ranks(2, plan_and_compare, folder, is_timed):
            assert unchanged == {"python": True, "numpy": True, "torch": True}, f"timed: {is_timed}"


class Annealed(nn.Module):
    """Lowers a temperature in every forward, which it keeps on the class: copies have it in common."""

    temperature = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.model = Case(kind="gcn_both").build(NUM_FEATURES)

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        Annealed.temperature *= 0.5
        out: Tensor = self.model(blocks, x)
        return out * Annealed.temperature


def anneal(rank: int, world_size: int, part_config: str, is_given: bool) -> list[float]:
    """Returns the temperature after planning, each of three epochs, and an inference."""
    Annealed.temperature = 1.0
    g = PartitionedGraph.open(part_config)
    model = optimize(Annealed())
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, model=model if is_given else None)
    found = [Annealed.temperature]
    for input_nodes, _, blocks in itertools.chain(loader, loader, loader):
        model(blocks, g.ndata["feat"][input_nodes]).sum().backward()
        found.append(Annealed.temperature)
    infer(model, g, 2)
    return [*found, Annealed.temperature]


@pytest.mark.parametrize("is_given", [True, False])
def test_planning_changes_nothing_outside_of_the_model(is_given: bool, partitions: PartitionStore) -> None:
    """Rank 0 checks that rows are kept apart, and lowered the temperature four times while the others trained by 1."""
    for found in run_ranks(3, anneal, partitions.get("power_law", power_law(), 3), is_given):
        assert found == [1.0, 0.5, 0.25, 0.125, 0.0625]


def plan_side_by_side(rank: int, world_size: int, part_config: str) -> tuple[list[float], int]:
    """Returns the bandwidths that loaders of one graph planned with (given, measured, given, measured before), and how
    often they measured.
    """
    g = PartitionedGraph.open(part_config)
    model = Case(kind="gcn_both").build(NUM_FEATURES)
    probes: list[Topology] = []

    def measure(*args: object, **options: object) -> Topology:
        probes.append(uniform_topology(world_size, bandwidth_bytes_per_s=3e9))
        return probes[-1]

    found = []
    with mock.patch.object(planning, "probe", measure):
        for given in (1e6, None, 2e6, None):
            topology = None if given is None else uniform_topology(world_size, bandwidth_bytes_per_s=given)
            loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, model=model, topology=topology, seed=3)
            assert loader.outcome is not None
            used = loader.outcome.plan.topology
            assert used is not None
            found.append(used.bandwidth_bytes_per_s[0][1])
    return found, len(probes)


def test_rates_that_one_loader_is_given_are_not_anothers(partitions: PartitionStore) -> None:
    """The first loader's assumed rates became those of the graph, and nothing was ever measured."""
    for found, num_probes in run_ranks(2, plan_side_by_side, partitions.get("power_law", power_law(), 2)):
        assert found == [1e6, 3e9, 2e6, 3e9]
        assert num_probes == 1, "measured once a process"


class FailsAt(nn.Module):
    """Runs when it is traced, and so many times when it is timed."""

    def __init__(self, num_calls: int | None) -> None:
        super().__init__()
        self.model = Case(kind="gcn_both").build(NUM_FEATURES)
        self.num_left = num_calls

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        if self.num_left is not None and is_timing.is_set():
            if self.num_left == 0:
                raise RuntimeError("this rank is out of luck")
            self.num_left -= 1
        out: Tensor = self.model(blocks, x)
        return out


is_timing = threading.Event()


def plan_with_one_that_fails(
    rank: int, world_size: int, part_config: str, failing_rank: int, num_calls: int
) -> list[bool]:
    """Returns, for each time that costs were modelled, whether by times of the model."""
    g = PartitionedGraph.open(part_config)
    model = FailsAt(num_calls if rank == failing_rank else None)
    timed: list[bool] = []
    inner = planning.time_model

    def time_model(*args: Any, **kwargs: Any) -> Any:
        is_timing.set()
        try:
            return inner(*args, **kwargs)
        finally:
            is_timing.clear()

    def note(*args: Any, **kwargs: Any) -> Any:
        timed.append(args[3] is not None)
        return cost_model(*args, **kwargs)

    cost_model = planning.cost_model
    with mock.patch.object(planning, "time_model", time_model), mock.patch.object(planning, "cost_model", note):
        loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, model=model, seed=3)
    assert loader.outcome is not None
    return timed


class Told:
    """A communicator of three ranks that hears what the other two say."""

    def __init__(self, others: list[list[float]]) -> None:
        self.others = others
        self.num_rounds = 0

    def gather_ints(self, values: list[int]) -> list[list[int]]:
        told = [[values[0], int(1e9 * times[self.num_rounds])] for times in self.others]
        self.num_rounds += 1
        return [values, *told]


def test_an_epoch_is_over_when_its_slowest_rank_is() -> None:
    """Each rank takes 1 s mostly, and in each round another one 1.5 s; the last rounds one of them sat out."""
    own = [0.0, 1.5, 1.0, 1.0, 1.0, 9.0, 9.0, 9.0, 9.0]
    others = [[0.0, 1.0, 1.5, 1.0, 1.5, 9.0, 9.0, 9.0, 9.0], [0.0, 1.0, 1.0, 1.5, 1.0, 0.0, 0.0, 0.0, 0.0]]
    rounds = TimedEpochs(Told(others))  # type: ignore[arg-type]
    for number, last_s in enumerate(own):
        assert rounds.any_wants_more(number < len(own) - 1, last_s) == (number < len(own) - 1)
    assert rounds.waiting_factors(1) == [pytest.approx(1.5 / 1.25)]
    assert TimedEpochs(Told([])).waiting_factors(2) == [1.0, 1.0]  # type: ignore[arg-type]
    # By turns of two orders: those of the second one were the slower ones of the same rank.
    assert rounds.waiting_factors(2) == [pytest.approx(1.5 / 1.25), pytest.approx(1.0)]
    times = ModelTimes(row_s=(1.0, 2.0), edge_s=(3.0,), fixed_s=4.0)
    assert times.scaled(1.5).epoch_s((1, 2), (3,)) == pytest.approx(1.5 * times.epoch_s((1, 2), (3,)))


@pytest.mark.parametrize(("name", "share"), [("int8", 0.25), ("bf16", 0.5), ("stale", 1.0), (None, 1.0)])
def test_rounded_rows_take_less_time_on_the_wire(name: str | None, share: float) -> None:
    approximation = None if name is None else Approximation.of(name)
    maker = PlanMaker(None, torch.arange(1), 2, PlannerConfig(), approximation=approximation)  # type: ignore[arg-type]
    assert maker._share_of_width(1 << 16, "float32") == pytest.approx(share, rel=1e-3)
    assert maker._share_of_width(2, "float32") == 1.0, "narrow ones travel as they are"


@pytest.mark.parametrize("num_calls", [0, 20, 32])
def test_a_rank_that_cannot_time_its_model_does_not_stop_the_others(num_calls: int, partitions: PartitionStore) -> None:
    """Whether it fails before, between or amid the rounds that ranks begin together."""
    folder = partitions.get("power_law", power_law(), 3)
    outcomes = run_ranks(3, plan_with_one_that_fails, folder, 1, num_calls)
    assert outcomes == [[False]] * 3


def test_ranks_that_can_time_their_models_plan_by_that(partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    assert run_ranks(3, plan_with_one_that_fails, folder, -1, 0) == [[True]] * 3


def plan_as_a_peer_ends(rank: int, world_size: int, part_config: str) -> tuple[str, list[str]]:
    """Returns the error, and what was said before it."""
    g = PartitionedGraph.open(part_config)
    inner, messages, handler = TimedEpochs.any_wants_more, list[str](), logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]

    def any_wants_more(self: TimedEpochs, wants_more: bool, last_s: float) -> bool:
        inner(self, wants_more, last_s)
        raise ExchangeError("a peer has ended")

    logging.getLogger("dgl_hybrid").addHandler(handler)
    try:
        with mock.patch.object(TimedEpochs, "any_wants_more", any_wants_more):
            FullGraphLoader(g, g.owned_nodes("train_mask"), 2, model=FailsAt(None), seed=3)
    except ExchangeError as error:
        return str(error), messages
    finally:
        logging.getLogger("dgl_hybrid").removeHandler(handler)
    return "no error", messages


def test_a_peer_that_ends_as_models_are_timed_is_no_fault_of_the_model(partitions: PartitionStore) -> None:
    """Ranks said that the model could not be timed, with the error of the exchange, beside what ended the job."""
    folder = partitions.get("power_law", power_law(), 3)
    assert run_ranks(3, plan_as_a_peer_ends, folder) == [("a peer has ended", [])] * 3


class Talking(nn.Module):
    """Adds up something of its own over the ranks in its forward, by torch.distributed; calls a model or layers."""

    def __init__(self, way: str, calls: str) -> None:
        super().__init__()
        self.model = Case(kind="gcn_both").build(NUM_FEATURES)
        self.way, self.calls = way, calls

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        out: Tensor = (self.model if self.calls == "a model" else self.model.forward)(blocks, x)
        count = torch.ones((), dtype=x.dtype)
        if self.way == "all_reduce":
            dist.all_reduce(count)
        elif self.way == "barrier":
            dist.barrier()
        elif self.way == "all_gather_object":
            counts = [0] * dist.get_world_size()
            dist.all_gather_object(counts, 1)
            count = torch.tensor(sum(counts))
        elif self.way == "functional":
            count = functional.all_reduce(count)
        return out / count


def plan_for_one_that_talks(
    rank: int, world_size: int, part_config: str, way: str, calls: str
) -> tuple[list[float], list[str]]:
    """Returns the sums of three epochs' outputs, and what was said."""
    g = PartitionedGraph.open(part_config)
    model, messages = Talking(way, calls), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dgl_hybrid.training").addHandler(handler)
    loader = FullGraphLoader(g, g.owned_nodes(), 2, topology=uniform_topology(world_size))
    sums = []
    for _ in range(3):
        for input_nodes, _, blocks in loader:
            out = model(blocks, g.ndata["feat"][input_nodes])
            out.square().mean().backward()
            sums.append(float(out.detach().square().sum()))
    assert (loader.outcome is None) == (calls == "layers")
    infer(model, g, 2)
    logging.getLogger("dgl_hybrid.training").removeHandler(handler)
    return sums, messages


@pytest.mark.parametrize("way", ["all_reduce", "barrier", "all_gather_object", "functional"])
def test_a_model_that_talks_to_other_ranks_is_not_run_on_one(way: str, partitions: PartitionStore) -> None:
    """The rank that traced alone waited for the others, which waited for its trace."""
    for sums, messages in run_ranks(
        2, plan_for_one_that_talks, partitions.get("power_law", power_law(), 2), way, "layers", timeout=60.0
    ):
        assert sums == [sums[0]] * 3
        assert "calls torch.distributed" in messages[0]
        assert "no plan is made and nothing checked, everything stays as it is" in messages[0]


def test_a_plan_is_made_for_what_a_model_calls_that_talks_to_other_ranks(partitions: PartitionStore) -> None:
    outcomes = run_ranks(2, plan_for_one_that_talks, partitions.get("power_law", power_law(), 2), "barrier", "a model")
    for rank, (sums, messages) in enumerate(outcomes):
        assert sums == pytest.approx([sums[0]] * 3, rel=1e-12)
        said = [message for message in messages if "stands for it" in message]
        assert len(said) == (rank == 0)
        assert all("Talking could not be run" in message and "calls torch.distributed" in message for message in said)


def plan_over_links(rank: int, world_size: int, part_config: str) -> dict[str, Any]:
    """Returns what rank `rank` proposed, what it told the others, and what all predict together."""
    g = PartitionedGraph.open(part_config)
    seen: dict[str, Any] = {}
    inner, gather_json = planning.propose_plans, g.communicator.gather_json

    def propose(*args: Any) -> Any:
        candidates = inner(*args)
        seen.update(links_s=candidates[-1].links_s, alone=candidates[-1].estimate)
        return candidates

    def gather(value: Any, *, what: str = "") -> Any:
        if isinstance(value, list) and value and isinstance(value[0], dict) and "comm_s" in value[0]:
            seen["told"] = len(value), json.dumps(value).count(",")
        return gather_json(value, what=what)

    model = Case(kind="gcn_both").build(NUM_FEATURES)
    topology = uniform_topology(world_size, bandwidth_bytes_per_s=1e6, overlaps=True)
    with (
        mock.patch.object(planning, "propose_plans", propose),
        mock.patch.object(g.communicator, "gather_json", gather),
    ):
        loader = FullGraphLoader(g, g.owned_nodes(), 2, model=model, strategy="depcomm", topology=topology, seed=3)
    assert loader.outcome is not None
    return {**seen, "together": loader.outcome.plan.estimate}


def test_links_that_send_for_longer_than_they_receive_count(partitions: PartitionStore) -> None:
    """Each owner learns of what it sends, and no rank of what others send each other."""
    told = set()
    for num_parts in (2, 4):
        results = run_ranks(num_parts, plan_over_links, partitions.get("power_law", power_law(), num_parts))
        links_s = np.stack([result["links_s"] for result in results])
        assert all(result["together"] == results[0]["together"] for result in results)
        expected = []
        for rank, result in enumerate(results):
            beyond = links_s[:, rank].sum(axis=0) - links_s[rank].sum(axis=0)
            comm_s = np.array(result["alone"].comm_s) + np.maximum(beyond, 0.0).sum(axis=1)
            assert results[0]["together"].ranks[rank].comm_s == pytest.approx(comm_s.tolist(), rel=1e-12)
            expected.append(beyond)
        assert (np.array(expected) > 0).any()
        told |= {result["told"] for result in results}
    assert len(told) == 1, "alike for any number of ranks"


def plan_knowing_less(rank: int, world_size: int, part_config: str, config: PlannerConfig) -> int:
    """Returns how many in-edges of other ranks' vertices planning fetched."""
    g = PartitionedGraph.open(part_config)
    model = Case(kind="gat", num_layers=3, dropout=0.5).build(NUM_FEATURES)
    num_fetched = []
    inner = planning.propose_plans

    def propose(*args: Any) -> Any:
        num_fetched.append(g.in_edges.num_fetched_edges)
        return inner(*args)

    with mock.patch.object(planning, "propose_plans", propose):
        topology = uniform_topology(world_size)
        FullGraphLoader(g, g.owned_nodes(), 3, model=model, planner=config, topology=topology, seed=3)
    return num_fetched[0]


def test_planning_fetches_what_its_strategy_can_use(partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 4)
    assert run_ranks(4, plan_knowing_less, folder, PlannerConfig(strategy="depcomm")) == [0] * 4
    limited = run_ranks(4, plan_knowing_less, folder, PlannerConfig(max_halo_edges=40))
    every = run_ranks(4, plan_knowing_less, folder, PlannerConfig())
    assert all(0 < some <= 40 < many for some, many in zip(limited, every, strict=True))


def cut_without_sets(rank: int, world_size: int, part_config: str) -> list[bool]:
    """Whether the structure that the model was timed on was still there when plans were looked for."""
    g = PartitionedGraph.open(part_config)
    model = Case(kind="gcn_both").build(NUM_FEATURES)
    made: list[weakref.ref[LevelSets]] = []
    are_there: list[bool] = []
    close, propose = planning.close_levels, planning.propose_plans

    def close_and_note(*args: Any, **options: Any) -> LevelSets:
        sets = close(*args, **options)
        made.append(weakref.ref(sets))
        return sets

    def look(*args: Any) -> Any:
        gc.collect()  # timing leaves cycles
        are_there.extend(reference() is not None for reference in made)
        return propose(*args)

    with (
        mock.patch.object(planning, "close_levels", close_and_note),
        mock.patch.object(planning, "propose_plans", look),
    ):
        FullGraphLoader(g, g.owned_nodes("train_mask"), 2, model=model, seed=3)
    return are_there


def test_what_a_model_was_timed_on_is_gone_when_plans_are_looked_for(partitions: PartitionStore) -> None:
    assert run_ranks(2, cut_without_sets, partitions.get("power_law", power_law(), 2)) == [[False], [False]]
