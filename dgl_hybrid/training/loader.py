# SPDX-License-Identifier: Apache-2.0
"""`FullGraphLoader`: yields the whole graph as exact blocks, once an epoch, where a DistDGL script sampled batches."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import torch
from dgl.distributed import DistGraph
from torch import Tensor, nn

from dgl_hybrid.exchange.approximate import agree_on_approximation
from dgl_hybrid.exchange.closure import LevelSets, settle_seeds
from dgl_hybrid.exchange.locality import RowOrder, check_row_order
from dgl_hybrid.graph.call_template import CallTemplate
from dgl_hybrid.graph.layer_block import LayerBlock
from dgl_hybrid.graph.static_results import StaticResults
from dgl_hybrid.ops.cpu.compiler import give_back_compiler
from dgl_hybrid.ops.cpu.memory import keep_freed_memory, stop_keeping_freed_memory
from dgl_hybrid.ops.devices import device_of
from dgl_hybrid.planner import DependencyPlan, PlannerConfig, Topology
from dgl_hybrid.planner.config import STRATEGIES
from dgl_hybrid.training import session
from dgl_hybrid.training.call_watch import CallWatch
from dgl_hybrid.training.dist_graph import TransportName
from dgl_hybrid.training.last_epoch import LastEpoch, check_same_masks
from dgl_hybrid.training.loader_arguments import (
    IGNORED,
    cached_of,
    check_autotune,
    check_budget,
    check_device,
    check_model,
    config_of,
    dense_below_of,
    keeps_first_layer,
    num_layers_of,
    sampler_of,
    seed_ids,
    sums_first_of,
)
from dgl_hybrid.training.loss import REDUCTIONS, Reduction, check_reduction, find_loss_weight
from dgl_hybrid.training.memory import FreeMemory, give_back_memory
from dgl_hybrid.training.partitioned_graph import PartitionedGraph, as_partitioned
from dgl_hybrid.training.plan_blocks import BlockBuilder, Layout, PlanBlocks
from dgl_hybrid.training.plan_choice import PlanChoice
from dgl_hybrid.training.plan_trials import SHARE
from dgl_hybrid.training.planning import PlanMaker, PlanOutcome, TraceError
from dgl_hybrid.training.prefetch import Prefetch
from dgl_hybrid.training.seen_calls import SeenCalls
from dgl_hybrid.training.step import Step

_logger = logging.getLogger(__name__)

Batch = tuple[Tensor, Tensor, list[LayerBlock]]

_MANY_EDGES = 1 << 16
_SEED_STRIDE = 0x9E3779B97F4A7C15
"""Between the seeds of loaders that are not given any; odd, so that none comes twice. A script that makes a loader in
every epoch would train the same subnetwork for ever."""


class FullGraphLoader:
    """Yields `(input_nodes, seeds, blocks)` once per epoch, as `DistNodeDataLoader` does once per batch.

    The model, its `dgl.nn` layers, DDP, the optimizer and the loss stay as they are; outputs and gradients equal those
    of single-process full-graph training. `seeds` are this rank's: a seed given to a rank that does not own it is moved
    to its owner, so take labels by the `seeds` that are yielded.

    Construction and every `iter` are collective: all ranks make the same loaders and iterate them in the same order.

    Args:
        g: A running `DistGraph`, or the graph as this rank sees it (`PartitionedGraph`).
        nids: (n,) global ids of this rank's seeds, or a bool mask over its own nodes.
        sampler: A DGL neighbour sampler, for its number of layers and its `prefetch_*` fields, or that number. Fanouts
            are not used: every neighbour is.
        device: Where blocks and prefetched fields go. A script that moves them itself, in every epoch, trains as well,
            but nothing is kept from epoch to epoch then.
        graph_sampler: The sampler by DGL's name for it.
        model: The model, if it exists already and is called as `model(blocks, x)`. Without it the first epoch runs
            with everything communicated; the plan is made at the second, from the call that was seen, and so that other
            models which used the blocks in that epoch can go on (a teacher's attention needs in-edges that the first
            layer of a student whose sums are kept does not; if the student is given here: `keep_static=False`).
        strategy: "hybrid" (if nothing else is given), "depcache", "depcomm", "neutronstar", "greedy" or "ratio".
        planner: All options of the planner, the strategy too.
        topology: Measured or assumed rates to plan with; None probes these ranks, once for a graph that was opened.
        plan: A plan made before (`dgl-hybrid plan`), or the ids to cache at each level; nothing is planned then.
        loss_reduction, loss_denominator: How the script reduces its loss, if it is not a mean over `seeds`: see
            `find_loss_weight`.
        seed: Of dropout masks, the same on all ranks; None takes rank 0's `torch.initial_seed()` for a graph's first
            loader, and for each further one another that follows from it.
        row_order: Of the rows a rank holds, within those of equal highest level: "id" (ascending global id), "locality"
            (clusters of vertices that read each other), or "auto": by locality on large graphs on the ranks where that
            shares clearly more reads. Alike on all ranks. It is kept with parts that `partition_graph` writes; of
            other folders the first loader of a graph looks for it, which takes 13 to 33 s for a million vertices of a
            rank (see `partition/local_order.py`). Results differ in the order of sums over rows alone.
        autotune: With strategy "hybrid": epochs begin by the plan that is predicted fastest; the pure plans, up to two
            more hybrids and NeutronStar's then take turns of four epochs, those near the fastest, or predicted to be,
            of five or ten more (short epochs are timed more often, for half of what a change of plans takes), and the
            one that measured fastest stays; within 2 % of it, or as much as turns of one plan differ (5 % at most), a
            pure plan or NeutronStar's. Changing a plan takes as long as many epochs, so True lets trials take a tenth
            of the time trained so far; a number is another share, `math.inf` has them all at once, for benchmarks (24
            to 84 epochs with six candidates, short ones up to 216), False none. `is_settled` says when they are over;
            plans are made and tried anew when epochs drift. Seeds keep their order; the input nodes that are yielded
            change with the plan, so read by them in every epoch.
        keep_static: Keep what the first layer aggregates from the graph's own fields, made once instead of every epoch;
            costs its bytes. Recognised by identity: a model that applies dropout to its input features, or copies them,
            gains nothing.
        approximate: Exchange less, approximately, in training steps: "bf16" or "int8" (narrower rows and gradients),
            "stale" (those of the epoch before), "stale+bf16" or "stale+int8"; see `exchange/approximate.py`. The same
            on all ranks. None is exact, and so is everything that needs no gradient, whatever is given here.
        overlap: Sums, means and fused attention over rows held here run while received rows travel, forward and
            backward; over a network so do products of optimised layers that need nothing received
            (`graph/products_beside.py`). The same result in another order of sums.
        chunk_rows: Sums, means and fused attention receive rows in messages of so many at most, each used and dropped
            before the next but one leaves: for graphs whose received rows do not fit. Attention fetches them again for
            its backward. None: all of a layer's rows in one message.
        partial_sums: Sums and means without weights may travel instead of their sources, whichever are fewer (a minimum
            vertex cover, found when a layer first trains). None: where rows go over a network, not through memory.
        transport: What carries rows between the trainers of a `DistGraph`: "collective" (torch.distributed, which the
            script has initialised), "shared_memory" (of the one host they all run on), "auto" (the latter between
            trainers of one host, the former between hosts) or "kvstore" (DistDGL's servers); None means "auto".
        timeout_s: How long the trainers of a `DistGraph` wait for each other, in planning too; None: what
            `init_process_group(timeout=)` was given, or ten minutes (see `create_communicator`). The same on all ranks.
        **dataloader_kwargs: What `DistNodeDataLoader` takes besides (batch_size, shuffle, drop_last, …): there is one
            batch, so they have no effect.

    Raises:
        ValueError: On all ranks, for seeds out of range or empty everywhere, an unknown strategy or approximation, or
            a strategy other than the planner's; for a sampler with `prob`, `mask` or another `edge_dir`, for
            `chunk_rows` beside `approximate`, and where ranks make loaders that differ.
        TypeError: Arguments of another type, unknown ones, or neither or both of `sampler` and `graph_sampler`.
        PlanError: On all ranks, if a given plan does not fit the graph, the number of layers or the memory budget, no
            plan fits that, or `model` cannot be run on the made-up blocks that it is planned by.
        BlockError: On all ranks, if `model` would not be exact on blocks.
    """

    def __init__(
        self,
        g: PartitionedGraph | DistGraph,
        nids: Tensor,
        sampler: Any = None,
        device: torch.device | str | None = None,
        *,
        graph_sampler: Any = None,
        model: nn.Module | None = None,
        strategy: str | None = None,
        planner: PlannerConfig | None = None,
        topology: Topology | None = None,
        plan: DependencyPlan | Sequence[Tensor] | None = None,
        loss_reduction: Reduction = "mean",
        loss_denominator: float | None = None,
        seed: int | None = None,
        row_order: RowOrder = "auto",
        autotune: bool | float = True,
        keep_static: bool = True,
        approximate: str | None = None,
        overlap: bool = True,
        chunk_rows: int | None = None,
        partial_sums: bool | None = None,
        transport: TransportName | None = None,
        timeout_s: float | None = None,
        **dataloader_kwargs: Any,
    ) -> None:
        g = as_partitioned(g, transport, timeout_s=timeout_s)
        self.graph = g
        self.communicator = g.communicator
        with self.communicator.agreed("the making of a FullGraphLoader"):
            unknown = sorted(set(dataloader_kwargs) - IGNORED)
            if unknown:
                raise TypeError(f"FullGraphLoader got an unknown argument {unknown[0]!r}")
            sampler = sampler_of(sampler, graph_sampler)
            self.device = device_of("cpu" if device is None else device)
            self.num_layers = num_layers_of(sampler)
            self.prefetch = Prefetch.from_sampler(sampler)
            """Which fields the blocks come with."""
            self.prefetch.shapes(g)  # they are there: ranks read them together
            config = config_of(strategy, planner)
            forced = None if plan is None else cached_of(plan, self.num_layers, g)
            check_budget(plan, config.memory_budget_bytes)
            check_device(self.device, self.communicator.transport)
            sums_first = sums_first_of(plan, self.num_layers)
            local_seeds = seed_ids(nids, g)
            check_row_order(row_order)
            check_model(model)
            if chunk_rows is not None and (not 1 <= chunk_rows <= 10**18 or chunk_rows != int(chunk_rows)):
                raise ValueError(f"chunk_rows must be an integer from 1 to 10^18 or None (got {chunk_rows!r})")
            check_autotune(autotune)
            check_reduction(loss_reduction, loss_denominator)
        self.approximation = agree_on_approximation(approximate, self.communicator)
        """What is approximated; None: nothing, outputs and gradients are those of the full graph."""
        if self.approximation is not None and self.communicator.rank == 0:
            _logger.info("exchanges of training steps are %s: results are not exact", self.approximation)
        self._keep_static = keep_static
        self._trial_share = (SHARE if autotune else 0.0) if isinstance(autotune, bool) else float(autotune)
        if partial_sums is None:
            partial_sums = self.communicator.backend != "shared_memory"
        self._check_alike(
            {
                "layers": self.num_layers,
                "plan given": forced is not None,
                "model given": model is not None,
                "keep_static": keep_static,
                "autotune, in millionths": round(1e6 * min(self._trial_share, 1e6)),
                "overlap": overlap,
                "chunk_rows": chunk_rows or 0,
                "partial_sums": partial_sums,
                "strategy": STRATEGIES.index(config.strategy),
                f"row_order (of {', '.join(get_args(RowOrder))})": get_args(RowOrder).index(row_order),
                "loss_reduction": REDUCTIONS.index(loss_reduction),
                "on a GPU": int(self.device.type == "cuda"),
                "a memory budget given": config.memory_budget_bytes is not None,
                "rates given": topology is not None,
                "prices": len(config.prices),
                "chunk_rows of the plan": (plan.chunk_rows or 0) if isinstance(plan, DependencyPlan) else 0,
                "first layer of the plan kept": keep_static and keeps_first_layer(plan),
                "sums_first of the plan, bit by layer": sum(is_first << i for i, is_first in enumerate(sums_first)),
            }
        )
        if self.approximation is not None and chunk_rows is not None:
            raise ValueError(
                f"chunk_rows={chunk_rows} is not possible with approximate={approximate!r}: approximate rows are "
                f"received all at once. Give one of the two."
            )
        self._runs_on = self._find_device(model)
        with self.communicator.agreed():
            g.places.find(row_order)  # once for a graph, so before anything is timed that may be done again
        seeds, num_borrowed = settle_seeds(self.communicator, g.nodes, local_seeds)
        self.num_seeds = len(seeds) - num_borrowed
        """Seeds this rank's loss is taken over; 0 if the one it computes is borrowed."""
        self._weight = find_loss_weight(
            self.communicator, self.num_seeds, reduction=loss_reduction, denominator=loss_denominator
        )
        self.loss_weight = self._weight.value
        """What the gradient of this rank's loss is multiplied by; 0 on a rank without seeds of its own."""
        given_seed = (torch.initial_seed() + _SEED_STRIDE * g.num_loaders) % 2**62 if seed is None else seed
        g.num_loaders += 1
        # Shares that differ by less than is told apart above would still begin turns at different epochs.
        self.seed, self._trial_share = self.communicator.broadcast_json([int(given_seed), self._trial_share])
        maker = PlanMaker(
            g,
            seeds,
            self.num_layers,
            config,
            topology,
            num_borrowed=num_borrowed,
            keep_static=keep_static,
            row_order=row_order,
            device=self._runs_on,
            overlap=overlap,
            approximation=self.approximation,
            partial_sums=partial_sums
            and chunk_rows is None
            and not (self.approximation is not None and self.approximation.is_stale),
        )
        self._builder = BlockBuilder(
            g,
            seeds,
            num_borrowed,
            device=self.device,
            row_order=row_order,
            approximation=self.approximation,
            overlap=overlap,
            chunk_rows=None if chunk_rows is None else int(chunk_rows),
            partial_sums=partial_sums,
        )
        self._built: PlanBlocks | None = None
        self._choice = PlanChoice(
            self.communicator,
            maker,
            SeenCalls(model),
            num_layers=self.num_layers,
            share=self._trial_share,
            is_fixed=forced is not None,
            given=plan if isinstance(plan, DependencyPlan) else None,
        )
        self._watch = CallWatch(g, self._choice.calls, self.prefetch, self.num_layers)
        self.has_memory_budget = config.memory_budget_bytes is not None
        g.loaders.add(self)
        self._steps_done = 0
        self._is_cast_otherwise = False
        self._is_new = True
        self._epoch_ns = self._change_ns = 0
        # How memory is freed is the process's: a loader without a budget (of `infer`, say) is not to undo another's.
        self._free_memory = FreeMemory(at_once=lambda: g.is_memory_scarce)
        if g.is_memory_scarce:
            stop_keeping_freed_memory()  # which a loader without a budget has had it do, maybe
        else:
            keep_freed_memory()  # before planning, which times the model as epochs will run it
        if forced is not None:
            # Bare ids say nothing of batch norm, so every level holds every owned node: right for any model.
            self._build(
                Layout(
                    cached=forced,
                    dense_below=dense_below_of(plan, self.num_layers),
                    chunk_rows=plan.chunk_rows if isinstance(plan, DependencyPlan) else None,
                    sums_first=sums_first,
                    owners_aggregate=keep_static and keeps_first_layer(plan),
                )
            )
        elif model is not None:
            with self.communicator.agreed():
                template = CallTemplate.of_convention(
                    g.ndata, self.prefetch.shapes(g), self._runs_on.type, is_static=self._runs_on == self.device
                )
            try:
                outcome = self._choice.plan(model, template)
            except TraceError as error:
                raise TraceError(
                    f"{error}. Called was model(blocks, x), with x like the field that prefetch_node_feats names, or "
                    f"one of a usual name. Name the field there; where the script calls its model otherwise, leave "
                    f"`model=` out: the first epoch shows how."
                ) from error
            self._follow(outcome)
        else:
            if config.memory_budget_bytes is not None and self.communicator.rank == 0:
                _logger.warning(
                    "the memory budget is kept from the second epoch on, when it is known how the model is called: in "
                    "the first one everything is communicated at once. Give model= to keep it in all"
                )
            self._build(Layout(cached=[seeds[:0]] * self.num_layers, dense_below=self.num_layers))

    def _check_alike(self, options: dict[str, int]) -> None:
        """Raises on every rank, if ranks give loaders of different kinds. Collective."""
        kinds = self.communicator.gather_ints([int(value) for value in options.values()])
        for rank, kind in enumerate(kinds):
            if kind != kinds[0]:
                differing = ", ".join(
                    f"{name} is {ours} on rank 0 and {theirs} on rank {rank}"
                    for name, ours, theirs in zip(options, kinds[0], kind, strict=True)
                    if ours != theirs
                )
                raise ValueError(f"every rank must make the same loader: {differing}")

    def _find_device(self, model: nn.Module | None) -> torch.device:
        """Returns where the model will run, as far as can be told before it is called. Collective, if it is given.

        Blocks on the CPU of a model on a GPU are for the script to move.
        """
        if model is None or self.device.type == "cuda":
            return self.device
        device = next((parameter.device for parameter in model.parameters()), self.device)
        are_on_gpus = self.communicator.gather_ints([int(device.type == "cuda")])
        return device if all(is_on_gpu for (is_on_gpu,) in are_on_gpus) else self.device

    # ---------------------------------------------------------------- plan and build

    def _follow(self, outcome: PlanOutcome | None) -> None:
        """Builds what was decided for; None: what there is stays. Collective."""
        if outcome is None:
            return
        plan = outcome.plan
        start_ns = time.perf_counter_ns()
        self._build(
            Layout(
                cached=list(plan.cached),
                dense_below=outcome.dense_below,
                chunk_rows=plan.chunk_rows,
                sums_first=sums_first_of(plan, self.num_layers),
                owners_aggregate=self._keep_static and keeps_first_layer(plan),
            )
        )
        self._change_ns = time.perf_counter_ns() - start_ns

    @property
    def outcome(self) -> PlanOutcome | None:
        """The plan that runs, and why; None until one was made for the model, and if a plan was given."""
        return self._choice.outcome

    @property
    def best_plan(self) -> DependencyPlan | None:
        """This rank's plan that is the fastest known so far: that of `outcome`, unless it only has its turn; or the one
        that was given. None: none was made, and bare ids or nothing given.
        """
        return self._choice.best_plan

    @property
    def is_settled(self) -> bool:
        """Whether the plan stays from now on: it is made, and trials are over."""
        return self._choice.is_settled

    @property
    def is_in_trials(self) -> bool:
        """Whether plans take turns, and more of them are to be built."""
        return self._choice.is_in_trials

    @property
    def is_trying(self) -> bool:
        """Whether this epoch's plan runs to be measured, or there is none yet; not whether it is the best one known."""
        return self._choice.is_trying

    @property
    def _current(self) -> PlanBlocks:
        """What epochs run on now.

        Raises:
            RuntimeError: A change of plans was interrupted, which has left nothing.
        """
        if self._built is None:
            raise RuntimeError("a change of plans was interrupted and has left no blocks: make the loader anew")
        return self._built

    @property
    def sets(self) -> LevelSets:
        """Which rows this rank computes at each level, and where it gets the others from."""
        return self._current.sets

    @property
    def blocks(self) -> list[LayerBlock]:
        """One a layer, first layer first: those that are yielded."""
        return self._current.blocks

    @property
    def input_nodes(self) -> Tensor:
        """(|C_0|,) int64 global ids of the rows that the model reads, as they are yielded."""
        return self._current.input_nodes

    @property
    def seeds(self) -> Tensor:
        """(|C_L|,) int64 global ids of the rows that the model returns, as they are yielded."""
        return self._current.seeds

    def _build(self, layout: Layout) -> None:
        """Puts the blocks of another plan in the place of those that are there. Collective."""
        is_first = self._built is None
        self._let_go()
        self._is_new, self._has_drawn = True, False
        if self.approximation is not None and layout.chunk_rows is not None and self.communicator.rank == 0:
            _logger.warning(
                "the plan fits the memory budget with rows received %d at a time, but those that are %s are received "
                "all at once",
                layout.chunk_rows,
                self.approximation,
            )
        # Plans may change as an evaluation in inference mode begins; later steps save ids and masks for their backward.
        with torch.inference_mode(False), torch.no_grad():
            built = self._builder.build(layout, seed=self.seed, keeps_static=self._keep_static)
            self._free_memory.watch([block.static_results for block in built.blocks])
            self.prefetch.fill(self.graph, built.blocks)
        self._built = built
        self._leave_memory(thoroughly=is_first)  # planning leaves cycles; those of an earlier plan are gone

    def _let_go(self) -> None:
        """Drops what the last plan ran on, so that there are never the blocks, reads and buffers of two plans."""
        if self._built is None:
            return
        self._free_memory.watch(())
        structures = self._built.retire(self.graph)
        self._built = None
        self.__dict__.pop("_step", None)
        self.communicator.drop_free_memory()
        # It goes back so that the next plan does not lie scattered between what is left. To look for cycles takes as
        # long as several epochs, and there is none in what is ours: a layer of the user's may make some.
        give_back_memory(thoroughly=any(structure() is not None for structure in structures))

    def _leave_memory(self, *, thoroughly: bool) -> None:
        """Ends what lies ready for exchanges like the last ones; of many edges, what was freed is to go back too, of
        few only when that is asked for.
        """
        self.communicator.drop_free_memory()
        self._free_memory.leave(thoroughly=thoroughly, is_little=self._current.num_edges < _MANY_EDGES)

    def give_back_memory(self) -> None:
        """Hands memory that planning, building and first epochs have freed back to the system now, and leaves raw rows
        on disk (in the folder for temporary files, unless that lies in memory) of which only what a first layer made of
        them is read. They stay the tensors that they are.

        The loader does so by itself: at once where the planner has a memory budget, else when what it costs (the next
        epoch faults in anew what it takes) is a twentieth of the time since then.
        """
        self._free_memory.give_back()

    # ---------------------------------------------------------------- resuming

    def state_dict(self) -> dict[str, int]:
        """Returns what a checkpoint needs for dropout to go on as it would have: steps that drew masks, and the seed.

        The same on every rank, between epochs. The plan is not in it: give `plan=` to keep it.
        """
        step: Step | None = self.__dict__.get("_step")
        has_drawn = step is not None and step.num_random_calls > 0
        return {"steps": self._steps_done + has_drawn, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on where `state_dict` was taken; every rank does so, between epochs.

        Raises:
            ValueError: If this is not what `state_dict` returns.
        """
        is_state = set(state) == {"steps", "seed"} and all(isinstance(value, int) for value in state.values())
        if not is_state or state["steps"] < 0:  # any integer is a seed
            raise ValueError(f"expected what FullGraphLoader.state_dict returns: steps and seed (got {dict(state)!r})")
        self._steps_done, self.seed = state["steps"], state["seed"]
        self.__dict__.pop("_step", None)

    # ---------------------------------------------------------------- iteration

    def __len__(self) -> int:
        return 1

    def __repr__(self) -> str:
        exchange = "exact" if self.approximation is None else str(self.approximation)
        return (
            f"FullGraphLoader({self.num_layers} layers, {self.num_seeds} seeds on rank {self.communicator.rank} of "
            f"{self.communicator.world_size}, {exchange})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> FullGraphLoader:
        """A copy of a model that holds its loader holds this one, as one that holds its graph does."""
        return self

    def __iter__(self) -> Iterator[Batch]:
        """Yields the epoch's only batch. Collective: every rank iterates.

        Raises:
            RuntimeError: A change of plans was interrupted, which has left no blocks.
            BlockError: On all ranks, in the second epoch, if the model that the first one has shown is not exact on
                blocks.
            PlanError: Likewise, if no plan fits the memory budget.
        """
        self._agree_on_last_epoch()
        self.prefetch.fill(self.graph, self.blocks)
        if self._is_cast_otherwise or self._choice.needs_call:
            self._follow(self._choice.plan_for_call())
        if self.is_settled:
            self._forget_how_it_was_planned()
        self._free_memory.give_back_if_cheap()
        previous: Step | None = self.__dict__.get("_step")
        if previous is not None:
            previous.is_replaced = True
        del previous  # this frame stays for an epoch, and the step with it, which may hold keys of all edges
        step = Step(
            communicator=self.communicator,
            level_sizes=self.sets.sizes,
            owned=self.sets.owned,
            blocks=self.blocks,
            node_keys=self._current.node_keys,
            edge_keys=self._current.edge_keys,
            is_first_draw=not self._has_drawn,
            loss_weight=self._weight,
            seed=self.seed,
            num_vertices=self.graph.num_nodes(),
            number=self._steps_done,
            with_gradients=torch.is_grad_enabled(),
            on_call=self._watch.outermost,
            on_inner_call=self._watch.inner,
        )
        # Costs a small gather at every exchange of the first epoch only.
        self.communicator.cross_check = self._is_new or self.communicator.always_cross_check
        is_first, self._is_new = self._is_new, False
        session.follow(step, self.blocks)
        self.graph.follow(step)
        self._step = step
        start_ns = self._now_ns()
        try:
            yield self.input_nodes, self.seeds, list(self.blocks)
        except GeneratorExit:
            # A script that leaves its loop, or takes the batch by `next`, has ended its epoch, too.
            step.is_left = True
            self._note_epoch(step, start_ns)
            raise
        # Its blocks may be held for longer. Who has not used any takes the batch out of the loop (`list(loader)`), as
        # by `next`, to train on it now; not amid an epoch of another loader.
        if step.runs_on is None and not session.is_amid_another(step):
            step.is_left = True
        else:
            step.is_over = True
        self.communicator.settle()  # stale rows of this epoch travelled until here
        self._note_epoch(step, start_ns)
        if is_first:
            # Fetching features and making what is kept took more than stays.
            self._leave_memory(thoroughly=False)
        give_back_compiler()  # also of a kernel that a later epoch was the first to need

    def _forget_how_it_was_planned(self) -> None:
        """Drops the structure of the halo, of which only plans ask, and none is made before epochs slow down; not while
        plans of another loader take turns (this one may only evaluate): each change would fetch it again.
        """
        self._choice.forget_basis()
        is_needed = any(loader.is_in_trials for loader in self.graph.loaders)
        if self.graph.in_edges.num_fetched_edges and not is_needed:
            self.graph.in_edges.forget_fetched()
            self._leave_memory(thoroughly=True)

    def _now_ns(self) -> int:
        # The time of the work, not of its launches; also of epochs that are only watched, for drift.
        if self._runs_on.type == "cuda" and (self._choice.trials is not None or not self.is_settled):
            torch.cuda.synchronize(self._runs_on)
        return time.perf_counter_ns()

    def _note_epoch(self, step: Step, start_ns: int) -> None:
        self._note_device(step)
        if step.was_trained:  # an evaluation, or a look at the batch, says nothing of an epoch
            took_ns = self._now_ns() - start_ns
            if step.has_gone_back:  # nor does an evaluation that leaves gradients on
                self._epoch_ns = took_ns
            self._free_memory.take_back_rows()

    def _note_device(self, step: Step) -> None:
        if step.runs_on is None:
            return
        self._runs_on = step.runs_on
        if step.runs_on != self.device and not self.graph.is_told_of_moves and self.communicator.rank == 0:
            self.graph.is_told_of_moves = True
            _logger.warning(
                "the script moves its blocks from %s to %s in every epoch, with their fields, and nothing is kept from "
                "epoch to epoch then. Give FullGraphLoader(..., device=) that device",
                self.device,
                step.runs_on,
            )

    def _agree_on_last_epoch(self) -> None:
        """Tells all ranks of the last epoch, and acts on what any or all of them have to say. Collective."""
        kept = [block.static_results for block in self.blocks]
        written = self.graph.find_writes()
        was_changed = self._keep_static and any(results.was_changed for results in kept)
        step: Step | None = self.__dict__.get("_step")
        has_drawn = step is not None and step.num_random_calls > 0
        if step is not None and step.has_gone_back and not self._epoch_ns and not self.is_settled:
            self._choice.say_untimed()
        choice = self._choice
        told = LastEpoch(
            epoch_ns=self._epoch_ns,
            was_changed=was_changed,
            has_drawn=has_drawn,
            change_ns=self._change_ns,
            is_called_otherwise=choice.is_called_otherwise,
            num_written=len(written),
            steps_done=self._steps_done,
            seed=self.seed % 2**63,
            has_other_call=choice.calls.has_other,
            dense_below=0 if step is None else step.dense_below,
            normed_below=0 if step is None else step.normed_below,
            is_on_gpu=self._runs_on.type == "cuda",
            are_not_all=kept[0].are_not_all,
            num_asked=tuple(results.take_num_asked() for results in kept),
        ).gather(self.communicator)
        check_same_masks(told)
        choice.maker.dense_below = max(choice.maker.dense_below, *(of_rank.dense_below for of_rank in told))
        choice.normed_below = max(choice.normed_below, *(of_rank.normed_below for of_rank in told))
        choice.maker.needs_in_edges |= any(of_rank.are_not_all for of_rank in told)
        if len({of_rank.is_on_gpu for of_rank in told}) == 1:  # or ranks would not probe together
            choice.maker.device = self._runs_on
        is_written = any(of_rank.num_written for of_rank in told)
        if is_written:
            self.graph.spread_writes(written)
        self._is_cast_otherwise = all(of_rank.is_called_otherwise for of_rank in told)
        self._epoch_ns = 0
        # An evaluation, or a look at the batch, leaves the masks of the next steps what they are without it.
        any_has_drawn = any(of_rank.has_drawn for of_rank in told)
        self._has_drawn |= any_has_drawn
        self._steps_done += any_has_drawn
        if any(of_rank.was_changed for of_rank in told):
            for results in kept:
                results.clear()
        elif is_written:  # maybe into other fields alone, as predictions are in every epoch
            for results in kept:
                results.drop_all_but(self.graph.hands_out_still)
        if self._keep_static:
            self._check_same_kept([of_rank.num_asked for of_rank in told], kept)
        del step, kept  # a change of plan drops what they hold
        if all(of_rank.has_other_call for of_rank in told):
            self._follow(choice.check_other_models())
        if choice.trials is not None and all(of_rank.epoch_ns for of_rank in told):
            self._change_ns = 0
            epoch_ns, change_ns = max(x.epoch_ns for x in told), max(x.change_ns for x in told)
            self._follow(choice.after_epoch(epoch_ns / 1e9, change_ns / 1e9))

    def _check_same_kept(self, asked: Sequence[tuple[int, ...]], kept: Sequence[StaticResults]) -> None:
        """Keeps nothing any more, on all ranks, if they differ in what they would keep: who has a result does not take
        part in the exchange that makes it.
        """
        other = next((rank for rank, of_rank in enumerate(asked) if of_rank != asked[0]), None)
        if other is None:
            return
        self._keep_static = self._choice.maker.keep_static = False
        for results in kept:
            results.stop()
        if self.communicator.rank == 0:
            _logger.warning(
                "rank 0 of %d made %d results of the loader's own features in the last epoch and rank %d %d, which "
                "would be kept: some ranks copy or transform features before their first layer and others do not. "
                "Nothing is kept from now on. Do so on all ranks or on none, or give keep_static=False",
                self.communicator.world_size,
                sum(asked[0]),
                other,
                sum(asked[other]),
            )
