# SPDX-License-Identifier: Apache-2.0
"""Makes a plan for a model on a partitioned graph: trace, probe, problem, candidates, and a choice all ranks share."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dgl_hybrid.errors import ExchangeError, HybridError, PlanError
from dgl_hybrid.exchange.approximate import Approximation
from dgl_hybrid.exchange.closure import LevelSets, close_levels
from dgl_hybrid.exchange.locality import RowOrder
from dgl_hybrid.exchange.partial_sums import MIN_SAVING, count_least_rows
from dgl_hybrid.exchange.problem import build_plan_problem
from dgl_hybrid.exchange.row_codecs import is_encoded
from dgl_hybrid.graph.call_template import CallTemplate
from dgl_hybrid.graph.model_copy import left_as_it_was
from dgl_hybrid.graph.model_timing import time_model
from dgl_hybrid.graph.op_rates import InEdgeSum
from dgl_hybrid.graph.trace import TraceResult, trace_model
from dgl_hybrid.planner import (
    LEAST_GAIN,
    Candidate,
    DependencyPlan,
    EpochEstimate,
    ItemCosts,
    ModelTimes,
    ModelTrace,
    PlannerConfig,
    PlanProblem,
    RankEstimate,
    Topology,
    WorkCounts,
    choose_plan,
    chunk_rows_within,
    cost_model,
    find_worth_trying,
    least_bytes_in_chunks,
    propose_orders,
    propose_plans,
    unsplit_layers,
)
from dgl_hybrid.planner.probe import Alone, probe
from dgl_hybrid.training import session
from dgl_hybrid.training.dropout import replicated_dropout
from dgl_hybrid.training.partitioned_graph import PartitionedGraph
from dgl_hybrid.training.timed_epochs import TimedEpochs

_logger = logging.getLogger(__name__)


class TraceError(PlanError):
    """The model could not be traced, so its costs are not known."""


_IN_CHUNKS = ("hybrid", "depcomm")
"""Strategies that receive rows in messages where no plan fits the memory budget."""


@dataclass(frozen=True, kw_only=True)
class TracedCall:
    """What all ranks know of a model and of how it is called."""

    trace: ModelTrace
    dense_below: int
    """Levels below this one are needed with every vertex."""
    template: CallTemplate
    """The call as it was traced, with this rank's tensors."""


@dataclass(frozen=True, kw_only=True)
class PlanBasis:
    """What a rank's plan can be explained by."""

    problem: PlanProblem
    costs: ItemCosts


@dataclass(frozen=True, kw_only=True)
class PlanOutcome:
    """A rank's plan with what it was made from."""

    plan: DependencyPlan
    candidates: tuple[DependencyPlan, ...]
    """What is worth trying in real epochs, in the same order on every rank: `plan`, hybrids of another choice, and the
    pure plans, unless they are over the memory budget. Of a strategy other than "hybrid" `plan` alone."""
    basis: PlanBasis | None
    """What it was made from; a loader lets go of it once epochs run by a plan that stays."""
    dense_below: int

    @property
    def predicted_epoch_s(self) -> float:
        """Seconds of the slowest rank, exchange and compute together."""
        return _predicted_s(self.plan)

    @property
    def predicted_s(self) -> list[float]:
        """The same of each candidate."""
        return [_predicted_s(plan) for plan in self.candidates]


def _predicted_s(plan: DependencyPlan) -> float:
    return plan.estimate.epoch_s if plan.estimate is not None else float("nan")


def with_dense_below(plan: DependencyPlan, dense_below: int) -> DependencyPlan:
    """Returns a plan whose trace says that levels below this one are needed with every vertex, whoever has found that
    out: a plan is all that a later run is given.
    """
    trace = plan.trace
    if trace is None or dense_below == 0 or trace.layers[dense_below - 1].mixes_rows:
        return plan
    layers = list(trace.layers)
    layers[dense_below - 1] = replace(layers[dense_below - 1], mixes_rows=True)
    return replace(plan, trace=replace(trace, layers=tuple(layers)))


class PlanMaker:
    """Plans for one set of seeds.

    Args:
        g: The graph as this rank sees it.
        seeds: From `settle_seeds`.
        num_layers: Of the model.
        config: Strategy and limits.
        num_borrowed: How many of the seeds another rank owns.
        topology: Measured before, or assumed: prices come from the trace and its rates. None probes the ranks now, once
            a process, and times the model on them.
        keep_static: Whether blocks keep what they make of static tensors.
        row_order: Of the rows of the blocks that are built later.
        overlap: Whether blocks will split layers by source, where that can be done.
        partial_sums: Whether sums may then travel instead of their sources.
        approximation: What training exchanges in place of rows. Narrower ones take less time on the wire; those of the
            epoch before are charged like others, though nobody waits for them.
        device: Where the model runs, so where rates are measured.
    """

    def __init__(
        self,
        g: PartitionedGraph,
        seeds: Tensor,
        num_layers: int,
        config: PlannerConfig,
        topology: Topology | None = None,
        *,
        num_borrowed: int = 0,
        keep_static: bool = True,
        row_order: RowOrder = "id",
        overlap: bool = True,
        partial_sums: bool = False,
        approximation: Approximation | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._graph, self._seeds, self._num_layers, self._config = g, seeds, num_layers, config
        self._num_borrowed, self._row_order = num_borrowed, row_order
        self._overlap, self._partial_sums = overlap, partial_sums
        self.keep_static = keep_static
        self._given_topology, self._approximation = topology, approximation
        self.dense_below = 0
        """Levels below this one hold every vertex, whatever the trace of the model says."""
        self.needs_in_edges = False
        """Whether something else than the model that is planned for reads the in-edges of layer 1: vertices that are
        cached there have them then, whatever the trace says, and are priced as if what they sum up were not kept."""
        self.device = torch.device(device)
        """Of the same type on all ranks."""

    @property
    def memory_budget_bytes(self) -> float | None:
        """What plans are to keep to."""
        return self._config.memory_budget_bytes

    @property
    def measures_rates(self) -> bool:
        """Whether plans are made from rates measured here, which may change, and not from given ones."""
        return self._given_topology is None

    def forget_rates(self) -> None:
        """Has the ranks probed again for the next plan: they are no longer what they were."""
        self._graph.topology = None

    def make(self, model: nn.Module, template: CallTemplate, *, is_trained: bool = True) -> PlanOutcome:
        """Traces the model on rank 0 and plans on every rank. Collective.

        Args:
            model: The user's.
            template: How it is called.
            is_trained: If it was only evaluated so far, a pure plan comes without measured times, which could change no
                more than the order of products, and do not where counts tell it.

        Raises:
            BlockError: On all ranks, if the model cannot be run on blocks exactly.
            PlanError: On all ranks, if no plan fits the memory budget.
        """
        traced = self.trace(model, template)
        trace, dense_below, template = traced.trace, traced.dense_below, traced.template
        sets = self._sets_of_depcomm(dense_below)
        shares = self._sent_shares(trace, sets)
        orders = self._orders_of_products(model, template, trace, sets, shares)
        narrow = trace
        if self.needs_in_edges:
            narrow, *orders = [
                replace(order, layers=(replace(order.layers[0], keeps_result=False), *order.layers[1:]))
                for order in (narrow, *orders)
            ]
        trace, times = orders[0], None
        times_of_orders: list[ModelTimes] = []
        is_known = not is_trained and self._config.strategy in ("depcache", "depcomm") and len(orders) == 1
        if self._given_topology is None and not is_known:
            times_of_orders = self.time(model, template, orders, sets) or []
            if times_of_orders:
                trace, times = self._fastest(orders[: len(times_of_orders)], times_of_orders, sets, shares)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what measuring took is of other sizes than what training will ask for
        del sets  # all in-edges of this rank: to find the plan takes most memory
        try:
            return self.make_from_trace(trace, dense_below=dense_below, times=times, sent_shares=shares)
        except PlanError:
            if self._config.memory_budget_bytes is None or trace.sums_first == narrow.sums_first:
                raise
        # Rows that are summed first are wider. Which order is faster is measured anew in each run; whether a budget is
        # enough must not depend on that, nor how many bytes the error says are.
        _logger.info("no plan fits the memory budget with sums before products: they come after them")
        known = zip(orders, times_of_orders, strict=False)
        times = next((of_order for order, of_order in known if order.sums_first == narrow.sums_first), None)
        return self.make_from_trace(narrow, dense_below=dense_below, times=times, sent_shares=shares)

    def trace(self, model: nn.Module, template: CallTemplate) -> TracedCall:
        """Traces the model on rank 0: its costs, and below which level every vertex is needed. Collective.

        What the call may mean is tried in turn, until the model runs.

        Raises:
            BlockError: On all ranks, if the model cannot be run on blocks exactly.
            TraceError: On all ranks, if it cannot be run on made-up blocks.
        """
        communicator = self._graph.communicator
        traced: TraceResult | None = None
        with communicator.agreed(), session.paused(), left_as_it_was(model):
            if communicator.rank != 0:
                # The first optimizer or disabled function imports it, a second of work that rank 0 does here, too: the
                # others would begin with it when that is done.
                importlib.import_module("torch._dynamo")
            else:
                traced, template = self._first_that_runs(model, template.readings())
        record = None if traced is None else {"trace": traced.trace.to_json(), "dense_below": traced.dense_below}
        shared = communicator.broadcast_json(None if record is None else {**record, "levels": template.levels()})
        return TracedCall(
            trace=ModelTrace.from_json(shared["trace"]),
            dense_below=max(int(shared["dense_below"]), self.dense_below),
            template=template.at_levels(shared["levels"]),
        )

    def _first_that_runs(self, model: nn.Module, readings: Sequence[CallTemplate]) -> tuple[TraceResult, CallTemplate]:
        """Returns the trace of the first of these calls that can be made, and that call."""
        why = ""
        for number, reading in enumerate(readings):
            try:
                return self._trace_here(model, reading), reading
            except HybridError:
                raise
            except Exception as error:
                why = why or f"{type(error).__name__}: {error}"  # of the likeliest
                if number + 1 == len(readings):
                    raise TraceError(
                        f"{type(model).__name__} could not be run on the small blocks that a plan's costs are measured "
                        f"on ({why})"
                    ) from error
        raise AssertionError("a call has a reading")

    def _trace_here(self, model: nn.Module, template: CallTemplate, sums_first: Sequence[bool] = ()) -> TraceResult:
        return trace_model(
            model,
            template,
            self._num_layers,
            dropout=_example_dropout,
            keep_static=self.keep_static,
            sums_first=sums_first,
        )

    def _sent_shares(self, trace: ModelTrace, sets: LevelSets) -> list[list[float]]:
        """Finds how many rows travel for each row received, with everything communicated. Collective.

        Plans that cache some rows communicate others, and which sums save most depends on those: this is the price of
        an average row.

        Returns:
            (L, P) by layer and owner; 1 where rows travel as they are, less where they are rounded.
        """
        communicator = self._graph.communicator
        shares = [[1.0] * communicator.world_size for _ in sets.layers]
        for index, (layer, structure) in enumerate(zip(trace.layers, sets.layers, strict=True)):
            is_trained = layer.operand_bytes_bwd > 0 and not layer.keeps_result
            if not (self._partial_sums and self._overlap and layer.can_sum_apart and is_trained):
                continue
            with communicator.agreed():
                least, plain = count_least_rows(structure), structure.exchange.recv_counts
            told = communicator.gather_ints([sum(least), sum(plain)])
            if sum(row[0] for row in told) <= (1.0 - MIN_SAVING) * sum(row[1] for row in told):
                shares[index] = [few / many if many else 1.0 for few, many in zip(least, plain, strict=True)]
        widths = [self._share_of_width(layer.operand_width, trace.dtype) for layer in trace.layers]
        return [[width * share for share in row] for width, row in zip(widths, shares, strict=True)]

    def _share_of_width(self, width: int, dtype_name: str) -> float:
        """Returns how many of the bytes of a row travel in training."""
        codec = None if self._approximation is None else self._approximation.codec
        dtype: torch.dtype = getattr(torch, dtype_name)
        if codec is None or not is_encoded(codec, width, dtype):
            return 1.0
        return codec.row_bytes(width) / (width * dtype.itemsize)

    def _orders_of_products(
        self,
        model: nn.Module,
        template: CallTemplate,
        trace: ModelTrace,
        sets: LevelSets,
        sent_shares: Sequence[Sequence[float]],
    ) -> list[ModelTrace]:
        """Lets layers sum before they multiply where that is cheaper, as rank 0 finds it. Collective.

        Returns:
            With the order that counts find cheapest, and maybe with another one that is to be timed beside it.
        """
        communicator, num_layers = self._graph.communicator, self._num_layers
        topology = self._topology()
        owned = [int(sets.owned[:size].sum()) for size in sets.sizes]
        edges = [layer.num_edges for layer in sets.layers]
        received = _received(sets, sent_shares)
        by_rank = communicator.gather_ints([*owned, *edges, *received])
        totals = [sum(column) for column in zip(*by_rank, strict=True)]
        counts = WorkCounts(
            rows=tuple(totals[: num_layers + 1]),
            edges=tuple(totals[num_layers + 1 : 2 * num_layers + 1]),
            received=tuple(totals[2 * num_layers + 1 :]),
        )

        def trace_with(sums_first: Sequence[bool]) -> ModelTrace:
            return self._trace_here(model, template, sums_first).trace

        orders: tuple[ModelTrace, ...] = ()
        with communicator.agreed(), session.paused(), left_as_it_was(model):
            if communicator.rank == 0:
                try:
                    orders = propose_orders(trace, trace_with, topology, counts)
                except HybridError:
                    raise
                except Exception as error:  # it could be traced once: memory, say, has become scarce
                    _logger.warning("other orders of products are not tried (%s: %s)", type(error).__name__, error)
                    orders = (trace,)
        told = communicator.broadcast_json([order.to_json() for order in orders])
        return [ModelTrace.from_json(order) for order in told]

    def _fastest(
        self,
        orders: Sequence[ModelTrace],
        times: Sequence[ModelTimes],
        sets: LevelSets,
        sent_shares: Sequence[Sequence[float]],
    ) -> tuple[ModelTrace, ModelTimes]:
        """Returns the order in which all ranks together take the shortest, and this rank's times of it; the first if
        none is clearly faster. Collective.
        """
        communicator, edges = self._graph.communicator, tuple(layer.num_edges for layer in sets.layers)
        if len(orders) == 1:
            return orders[0], times[0]
        topology, received = self._topology(), _received(sets, sent_shares)
        own_s = []
        for order, of_order in zip(orders, times, strict=True):
            prices = cost_model(order, topology, communicator.rank, of_order).receive_s
            others = max(communicator.world_size - 1, 1)
            exchanged_s = sum(count * sum(of_row) / others for count, of_row in zip(received, prices, strict=True))
            own_s.append(of_order.epoch_s(tuple(sets.sizes), edges) + exchanged_s)
        by_rank = communicator.gather_ints([int(1e9 * seconds) for seconds in own_s])
        totals = [sum(column) for column in zip(*by_rank, strict=True)]
        best = min(range(len(orders)), key=totals.__getitem__)
        if totals[best] > (1.0 - LEAST_GAIN) * totals[0]:
            best = 0
        _logger.info("orders of products took %s ms", ", ".join(f"{total / 1e6:.1f}" for total in totals))
        return orders[best], times[best]

    def time(
        self, model: nn.Module, template: CallTemplate, orders: Sequence[ModelTrace], sets: LevelSets
    ) -> list[ModelTimes] | None:
        """Times orders of the model's products on every rank, all ranks at once. Collective.

        Returns:
            Of each order; if one cannot be timed on a rank, of the first alone; None if that cannot be either. As many
            on every rank.
        """
        communicator = self._graph.communicator
        nodes = self._graph.nodes
        num_owned = max(nodes.stop - nodes.start, 1)
        own_rows = torch.where(sets.owned, sets.rows_global - nodes.start, sets.rows_global % num_owned)
        communicator.barrier()
        times: list[ModelTimes] | None = None
        together = TimedEpochs(communicator)
        with session.paused(), left_as_it_was(model):
            try:
                times = time_model(
                    model,
                    template,
                    sets,
                    orders,
                    dropout=_example_dropout,
                    keep_static=self.keep_static,
                    own_rows=own_rows,
                    any_wants_more=together.any_wants_more,
                )
            except ExchangeError:
                raise  # a rank has ended: there is nobody left to plan with
            except Exception as error:  # it could be traced, so there are prices, only less good ones
                _logger.warning("%s could not be timed (%s: %s)", type(model).__name__, type(error).__name__, error)
        together.sit_out()
        are_known = communicator.gather_ints([int(times is not None)])
        if times is None or not all(known for (known,) in are_known):
            return self.time(model, template, orders[:1], sets) if len(orders) > 1 else None
        factors = together.waiting_factors(len(orders))
        return [of_order.scaled(factor) for of_order, factor in zip(times, factors, strict=True)]

    def _sets_of_depcomm(self, dense_below: int) -> LevelSets:
        g = self._graph
        return close_levels(
            g.communicator,
            g.nodes,
            g.in_edges,
            self._seeds,
            self._num_borrowed,
            [self._seeds[:0]] * self._num_layers,
            dense_below=dense_below,
            row_order=self._row_order,
            places=g.places,
        )

    def _topology(self) -> Topology:
        """Probes the ranks unless that was done for such devices, or rates were given. Collective."""
        g, communicator = self._graph, self._graph.communicator
        if self._given_topology is not None:
            return self._given_topology
        if g.topology is None or g.topology.device != self.device.type:
            links = communicator.lend("the probe of this cluster")
            measured = probe(links or Alone(), device=self.device, aggregate=InEdgeSum())
            g.topology = replace(measured, overlaps=communicator.moves_in_background)
        return g.topology

    def make_from_trace(
        self,
        trace: ModelTrace,
        *,
        dense_below: int,
        times: ModelTimes | None = None,
        sent_shares: Sequence[Sequence[float]] | None = None,
    ) -> PlanOutcome:
        """Plans for a trace that all ranks hold, and for what each of them timed and counted. Collective."""
        g, communicator = self._graph, self._graph.communicator
        if not self._overlap:
            trace = replace(trace, layers=tuple(replace(layer, can_split=False) for layer in trace.layers))
        topology = self._topology()
        problem = build_plan_problem(
            communicator,
            g.nodes,
            g.in_edges,
            g.partition.in_degrees,
            self._seeds,
            self._num_layers,
            dense_below=dense_below,
            inputs_are_free=trace.layers[0].keeps_result,
            # Who computes nothing itself need not know what that would take.
            max_halo_edges=0 if self._config.strategy == "depcomm" else self._config.max_halo_edges,
        )
        with communicator.agreed():
            if topology.world_size != communicator.world_size:
                raise PlanError(
                    f"the topology is of {topology.world_size} ranks, and {communicator.world_size} are running: "
                    f"give one of as many, or none, and these are measured"
                )
            costs = cost_model(trace, topology, communicator.rank, times, sent_shares)
            candidates = propose_plans(problem, costs, self._config)
        by_rank = self._estimates_by_rank(candidates)
        chunk_rows = self._chunk_rows(trace, by_rank)
        if chunk_rows is not None:
            chosen, worth_trying = len(candidates) - 1, [len(candidates) - 1]  # depcomm
            _logger.info("no plan fits the memory budget: rows are received in messages of %d", chunk_rows)
        else:
            with communicator.agreed():
                is_chunked = self._config.strategy in _IN_CHUNKS
                chosen = choose_plan(
                    by_rank,
                    chunked_bytes=least_bytes_in_chunks(trace) if is_chunked else None,
                    unsplit=unsplit_layers(trace) if is_chunked else (),
                )
            worth_trying = find_worth_trying(by_rank, chosen) if self._config.strategy == "hybrid" else [chosen]
        plans = [
            with_dense_below(
                replace(
                    candidates[index].plan,
                    estimate=EpochEstimate(ranks=tuple(estimates[index] for estimates in by_rank)),
                    trace=trace,
                    topology=topology,
                    chunk_rows=chunk_rows,
                ),
                dense_below,
            )
            for index in worth_trying
        ]
        if self._config.strategy == "hybrid":
            _logger.info("chose %s of %d candidates", plans[0].strategy, len(candidates))
        return PlanOutcome(
            plan=plans[0],
            candidates=tuple(plans),
            basis=PlanBasis(problem=problem, costs=costs),
            dense_below=dense_below,
        )

    def _estimates_by_rank(self, candidates: Sequence[Candidate]) -> list[list[RankEstimate]]:
        """Returns what every rank predicts for itself, in the order of its candidates. Collective.

        Owners are told for how long they send first, each by every receiver, so that of all pairs of ranks nobody holds
        more than its own.
        """
        communicator = self._graph.communicator
        one_each = [1] * communicator.world_size
        received_s = torch.stack([torch.from_numpy(candidate.links_s) for candidate in candidates], dim=1)
        sent_s = communicator.exchange(received_s, one_each, one_each)
        own = [
            candidate.estimate.with_sending(received_s[:, at].numpy(), sent_s[:, at].numpy())
            for at, candidate in enumerate(candidates)
        ]
        return [
            [RankEstimate.from_json(record) for record in records]
            for records in communicator.gather_json([estimate.to_json() for estimate in own])
        ]

    def _chunk_rows(self, trace: ModelTrace, by_rank: list[list[RankEstimate]]) -> int | None:
        """Returns in messages of how many rows everything is communicated, if no plan fits otherwise. Collective.

        None: some plan fits, or none would in chunks either, as a rank's budget is too small or a layer needs all rows.
        """
        budget = self._config.memory_budget_bytes
        rows = None
        if budget is not None and self._config.strategy in _IN_CHUNKS:
            rows = chunk_rows_within(trace, budget)
        least = min(row[0] for row in self._graph.communicator.gather_ints([rows or 0]))
        fitting = [all(of_rank[i].fits for of_rank in by_rank) for i in range(len(by_rank[0]))]
        return least if least and not any(fitting) else None


def _received(sets: LevelSets, sent_shares: Sequence[Sequence[float]]) -> list[int]:
    """Returns (L,) how many rows travel to this rank for each layer, with everything communicated."""
    return [
        round(sum(share * count for share, count in zip(shares, layer.exchange.recv_counts, strict=True)))
        for shares, layer in zip(sent_shares, sets.layers, strict=True)
    ]


def _example_dropout(x: Tensor) -> Tensor:
    return replicated_dropout(x, 0.5, torch.arange(len(x), device=x.device), seed=0, step=0, call_index=0)
