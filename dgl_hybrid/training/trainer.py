# SPDX-License-Identifier: Apache-2.0
"""One rank's part in a training run: open, plan, train, evaluate exactly, report."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid.datasets import check_features
from dgl_hybrid.errors import CheckpointError, DatasetError, PlanError
from dgl_hybrid.exchange.approximate import join_approximations
from dgl_hybrid.graph.optimize import optimize
from dgl_hybrid.partition.manifest import partition_digest
from dgl_hybrid.planner import DependencyPlan, PlannerConfig, RunRows, chunk_rows_within, load_plan, save_plan
from dgl_hybrid.training.checkpoint import Checkpoints, ModelFacts, Progress
from dgl_hybrid.training.config import TrainConfig, TrainJob
from dgl_hybrid.training.epoch_clock import EpochClock, EpochTimes
from dgl_hybrid.training.graph_facts import SPLITS, facts_of_graph
from dgl_hybrid.training.inference import evaluating
from dgl_hybrid.training.loader import FullGraphLoader
from dgl_hybrid.training.metrics import count_correct
from dgl_hybrid.training.models import build_model
from dgl_hybrid.training.partitioned_graph import PartitionedGraph
from dgl_hybrid.training.report import Accuracy, EpochReport, LayerReport, TrainReport
from dgl_hybrid.training.resident_memory import current_rss_bytes, peak_rss_bytes

_logger = logging.getLogger(__name__)

OnEpoch = Callable[[int, EpochReport, Accuracy | None], None]
"""Called on every rank after each epoch: epochs done, its report, and the accuracy if it was just measured."""


def train(job: TrainJob, *, on_epoch: OnEpoch | None = None, save_plan_in: str | Path | None = None) -> TrainReport:
    """Trains on the graph of a partition folder. Collective: every rank calls it with the same job.

    Initial weights depend on the seed and the model alone, so that runs of any strategy and number of ranks compare.
    A run that is resumed with the same options goes on as it would have without the break, dropout masks included, but
    for rounding; plans are made anew. Another learning rate or weight decay is taken, and a warning says so.

    Args:
        job: What to train.
        on_epoch: Called after each epoch.
        save_plan_in: Folder in which every rank saves the best plan that is known by the end.
    Returns:
        The report of the whole run, the same on every rank; of a resumed one, from where it went on.
    Raises:
        PartitionError, DatasetError, PlanError, BlockError, CheckpointError, ValueError: On every rank, whichever found
            the fault.
    """
    with contextlib.closing(TrainingRun(job)) as run:
        return _train(run, on_epoch, save_plan_in)


def _train(run: TrainingRun, on_epoch: OnEpoch | None, save_plan_in: str | Path | None) -> TrainReport:
    job, config, loader = run.job, run.config, run.loader
    evaluator = Evaluator(
        run.g,
        job.model.num_layers,
        loader.device,
        chunk_rows=_chunk_rows_of_evaluations(run),
        planner=job.strategy.planner_config(),
    )
    epochs: list[EpochReport] = []
    measured: list[Accuracy] = []
    trial_epochs = 0
    first_epoch = 1
    has_diverged = False
    unsaved: str | None = None
    if run.progress is not None:
        measured.append(run.progress.best)
        first_epoch = run.progress.accuracy.epoch + 1
    for epoch in range(first_epoch, config.epochs + 1):
        epochs.append(run.run_epoch())
        if not has_diverged and not math.isfinite(epochs[-1].loss):
            has_diverged = True
            if run.g.rank() == 0:  # all know: it is the loss of the whole graph
                _logger.warning(
                    "the loss of epoch %d is %s: weights are of no use from here on. Try a smaller --lr (it is %g)",
                    epoch,
                    epochs[-1].loss,
                    config.lr,
                )
        if loader.is_trying:
            trial_epochs = epoch - first_epoch + 1
        last = epoch == config.epochs
        accuracy = None
        if last or (config.eval_every and epoch % config.eval_every == 0):
            accuracy = evaluator.measure(run.model, epoch)
            measured.append(accuracy)
            if run.checkpoints is not None:
                progress = Progress(
                    accuracy=accuracy,
                    best=_best(measured),
                    loader=loader.state_dict(),
                    approximate=run.approximate,
                )
                try:
                    run.checkpoints.save(progress)
                except CheckpointError as error:
                    if not last:
                        raise
                    unsaved = str(error)  # what the whole run has found is not lost with it
        if on_epoch is not None:
            on_epoch(epoch, epochs[-1], accuracy)
    plan = loader.best_plan or run.plan
    if save_plan_in is not None:
        save_plan_of(job, run.g, plan, save_plan_in)
    communicator = run.g.communicator
    by_rank = communicator.gather_ints([peak_rss_bytes(), run.base_rss_bytes, int(loader.sets.by_locality)])
    name: str = communicator.broadcast_json(plan.strategy)  # ranks' own may differ
    return TrainReport(
        # A saved plan tells of the strategy by its name alone: "hybrid@1" of hybrid.
        strategy=job.strategy.strategy if job.strategy.plan is None else name.partition("@")[0],
        ranks=communicator.world_size,
        model=job.model.model,
        dataset=job.dataset,
        dtype=config.dtype,
        epochs=tuple(epochs),
        layers=run.layers_by(run.number_of(plan)),
        best=_best(measured),
        final=measured[-1],
        peak_rss_bytes=tuple(row[0] for row in by_rank),
        base_rss_bytes=tuple(row[1] for row in by_rank),
        gradient_bytes=sum(p.numel() * p.element_size() for p in run.model.parameters() if p.requires_grad),
        predicted_epoch_s=plan.estimate.epoch_s if plan.estimate is not None else None,
        chosen_plan=name,
        chunk_rows=None if run.approximate is not None else plan.chunk_rows,
        stayed_plan=run.number_of(plan),
        trial_epochs=trial_epochs,
        first_epoch=first_epoch,
        rows_by_locality=tuple(bool(row[2]) for row in by_rank),
        approximate=run.approximate,
        unsaved=unsaved,
    )


class TrainingRun:
    """One rank's part of a run, an epoch at a time: the graph, a model, its loader. Collective, as `train` is.

    Attributes:
        g: This rank's part of the graph.
        model: It trains; on one rank and several.
        progress: Where a run that is resumed goes on; None: from the beginning.
        approximate: What training steps exchange approximately, or did before the run was resumed.
        base_rss_bytes: What the process held before the graph was opened.
    """

    def __init__(self, job: TrainJob) -> None:
        torch.manual_seed(job.training.seed)
        self.base_rss_bytes = current_rss_bytes()
        self.g = open_graph(job)
        self.job = replace(job, num_classes=count_classes(job, self.g))
        self.model = build(self.job, self.g)
        self.config = config = job.training
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        self.checkpoints = _open_checkpoints(self.job, self.g, self.model, self._optimizer)
        self.progress = _resume(self.checkpoints, config) if self.checkpoints is not None else None
        before = None if self.progress is None else self.progress.approximate
        self.approximate = join_approximations(before, config.approximate)
        try:
            self.loader, self._first_plan = make_loader(self.job, self.g, self.model)
            if self.progress is not None:
                self.loader.load_state_dict(self.progress.loader)
        except BaseException:
            self.close()
            raise
        if self.progress is not None and config.approximate not in (None, "bf16") and self.g.rank() == 0:
            _logger.warning(
                "approximate rows (%s) begin anew with --resume: weights are not those of a run without a break",
                config.approximate,
            )
        communicator = self.g.communicator
        self._wrapped: nn.Module = self.model
        if communicator.transport is not None:
            self._wrapped = nn.parallel.DistributedDataParallel(self.model)
        self._clock = EpochClock(communicator, job.model.num_layers, self.loader.device)
        self._counts: dict[int, Sequence[tuple[int, int]]] = {}
        self._times: dict[int, EpochTimes] = {}
        """Both by number of the plan."""
        self._last_plan: int | None = None
        self._plans: list[weakref.ref[DependencyPlan]] = []
        """That epochs have run by; those of before a drift, with the ids they cache, are gone."""

    def close(self) -> None:
        """Lets another run go on from this one's checkpoints, in this process too. Not collective."""
        if self.checkpoints is not None:
            self.checkpoints.release()

    @property
    def plan(self) -> DependencyPlan:
        """This rank's plan, by which the last epoch ran; before the first, by which that will."""
        return self._first_plan if self.loader.outcome is None else self.loader.outcome.plan

    def run_epoch(self) -> EpochReport:
        """Trains one epoch and returns what it took, the same on every rank. Collective."""
        self._wrapped.train()
        self._clock.start()
        loss = _step(self.g, self.loader, self._wrapped, self._optimizer)
        times = self._clock.stop()
        number = self.number_of(self.plan)
        if number is None:
            number = len(self._plans)
            self._plans.append(weakref.ref(self.plan))
            self._counts[number] = count_dependencies(self.loader)
        if self._last_plan == number or number not in self._times:  # the first after a change also fetches features
            self._times[number] = times
        self._last_plan = number
        return _epoch_report(self.g, loss, times, number)

    def layers_by(self, plan: int | None) -> tuple[LayerReport, ...]:
        """Returns what a plan's epochs cache, receive and send, layer by layer, the same on every rank.

        Args:
            plan: Its number; None, or of none that has run: the last epoch's.

        Raises:
            RuntimeError: There was no epoch.
        """
        if self._last_plan is None:
            raise RuntimeError("no epoch has been trained")
        number = self._last_plan if plan is None else plan
        return _layer_reports(self._counts[number], self._times[number])

    def number_of(self, plan: DependencyPlan) -> int | None:
        """Returns which of the plans that epochs have run by this is, from 0; None: of none.

        Ranks change plans together, so that it is the same on all of them; names of plans need not be.
        """
        return next((number for number, known in enumerate(self._plans) if known() is plan), None)


def save_plan_of(job: TrainJob, g: PartitionedGraph, plan: DependencyPlan, folder: str | Path) -> None:
    """Saves this rank's plan for runs on the same partition. Collective.

    Raises:
        PlanError: On every rank: one of them cannot write.
    """
    with g.communicator.agreed():
        plan_to_save = replace(
            plan, partition_fingerprint=partition_digest(Path(job.part_config)), made_for=_model_of(job, g)
        )
        try:
            save_plan(plan_to_save, folder)
        except OSError as error:
            raise PlanError(
                f"the plan of rank {g.rank()} of {g.communicator.world_size} cannot be written to {folder}: {error}. "
                "Name a folder that can be written to, with space left."
            ) from error


def open_graph(job: TrainJob) -> PartitionedGraph:
    """Opens this rank's part in the job's dtype and checks what training relies on. Collective.

    Raises:
        PartitionError: Missing or damaged folder, or a number of ranks other than its parts.
        DatasetError: On every rank: fields missing or of another shape or kind, NaN features, labels out of range, or
            nothing to train on.
    """
    g = PartitionedGraph.open(job.part_config, timeout_s=job.training.exchange_timeout_s)
    dtype = getattr(torch, job.training.dtype)
    with g.communicator.agreed():
        missing = [name for name in ("feat", "label", *SPLITS) if name not in g.ndata]
        if missing:
            raise DatasetError(
                f"{job.part_config} has no node field {', '.join(missing)} (got {sorted(g.ndata)}); training needs "
                f"feat, label, {', '.join(SPLITS)}"
            )
        part = f"part {g.rank()} of {Path(job.part_config).name}"
        feat, label = g.ndata["feat"].local, _class_ids(g.ndata["label"].local, part)
        if feat.dim() != 2 or feat.is_complex():
            raise DatasetError(f"feat of {part} must be numbers of shape (N, F) (got {feat.dtype} {tuple(feat.shape)})")
        check_features(f"feat of {part}", feat)
        for split in SPLITS:
            mask = g.ndata[split].local
            if mask.dim() != 1:
                raise DatasetError(
                    f"{split} of {part} must have shape ({len(mask)},) (got {tuple(mask.shape)}): choose one of its "
                    "splits before the graph is partitioned"
                )
            chosen = label[g.ndata[split].local.bool()]
            if len(chosen) and int(chosen.min()) < 0:
                raise DatasetError(f"{split} of part {g.rank()} selects vertices without a label")
            if job.num_classes is not None and len(chosen) and int(chosen.max()) >= job.num_classes:
                raise DatasetError(f"labels must be below num_classes={job.num_classes} (got {int(chosen.max())})")
    if not any(count for (count,) in g.communicator.gather_ints([int(g.ndata["train_mask"].local.bool().sum())])):
        raise DatasetError(f"train_mask of {job.part_config} selects no vertex, so there is nothing to train on")
    g.ndata["feat"], g.ndata["label"] = feat.to(dtype), label
    return g


def _class_ids(label: Tensor, part: str) -> Tensor:
    """Returns labels as (N,) int64, -1 or what else is below 0 for none; OGB's are (N, 1).

    Raises:
        DatasetError: They are no class ids.
    """
    if label.is_floating_point() or label.is_complex() or label.numel() != len(label) or label.dim() > 2:
        raise DatasetError(
            f"label of {part} must be integers of shape ({len(label)},) (got {label.dtype} {tuple(label.shape)}); "
            "multi-label and regression targets are for a script of your own, with FullGraphLoader"
        )
    return label.reshape(-1).to(torch.int64)


def count_classes(job: TrainJob, g: PartitionedGraph) -> int:
    """Returns the job's number of classes, else one more than the largest label of any rank. Collective."""
    num_classes = job.num_classes
    if num_classes is None:
        label = g.ndata["label"].local
        num_classes = 1 + max(row[0] for row in g.communicator.gather_ints([int(label.max()) if len(label) else -1]))
    return max(num_classes, 1)


def build(job: TrainJob, g: PartitionedGraph) -> nn.Module:
    """Builds the job's model for the graph's widths, optimised, on this rank's device. Collective.

    Raises:
        ValueError: On every rank: one of them has no GPU where the job wants one.
    """
    device = choose_device(job, g)
    model = build_model(
        job.model.model,
        int(g.ndata["feat"].shape[1]),
        job.model.hidden,
        count_classes(job, g),
        job.model.num_layers,
        dropout=job.model.dropout,
        heads=job.model.heads,
        seed=job.training.seed,
        dtype=getattr(torch, job.training.dtype),
    )
    return optimize(model.to(device))


def choose_device(job: TrainJob, g: PartitionedGraph) -> torch.device:
    """Returns where this rank trains; with "cuda" it is the process's current device from then on. Collective.

    Raises:
        ValueError: On every rank: one of them has no GPU.
    """
    device = torch.device(job.training.device)
    with g.communicator.agreed():
        if device.type == "cuda":
            if not torch.cuda.is_available():
                raise ValueError(
                    f"device cuda needs a GPU and a PyTorch built for it on every rank (rank {g.rank()} has PyTorch "
                    f"{torch.__version__} and sees no GPU): train on cpu, or see dgl-hybrid doctor"
                )
            # What torchrun and `launch` say of this machine; without either, ranks are taken to be of one.
            local_rank = int(os.environ.get("LOCAL_RANK", g.rank()))
            device = torch.device("cuda", local_rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
    return device


def _open_checkpoints(
    job: TrainJob, g: PartitionedGraph, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Checkpoints | None:
    folder = job.training.checkpoint
    if folder is None:
        return None
    facts = ModelFacts.of(job, int(g.ndata["feat"].shape[1]))
    return Checkpoints(
        folder,
        g.communicator,
        model,
        optimizer,
        facts,
        job.dataset,
        graph=facts_of_graph(g, facts.num_classes),
        seed=job.training.seed,
        may_change={"lr": job.training.lr, "weight_decay": job.training.weight_decay},
    )


def _resume(checkpoints: Checkpoints, config: TrainConfig) -> Progress | None:
    """Returns where the run goes on; None for a new one, which overwrites nothing. Collective."""
    try:
        if not config.resume:
            checkpoints.make_folder()
            checkpoints.refuse_to_overwrite()
            return None
        progress = checkpoints.restore()
        checkpoints.make_folder()
        if progress.accuracy.epoch >= config.epochs:
            raise CheckpointError(
                f"{config.checkpoint} has done {progress.accuracy.epoch} epochs, and --epochs is {config.epochs}, all "
                "of them together: give more"
            )
        return progress
    except BaseException:
        checkpoints.release()
        raise


def _model_of(job: TrainJob, g: PartitionedGraph) -> dict[str, str | int | float]:
    """Returns what decides over what a plan may rely on: what the first layer keeps, which levels are whole, how many
    bytes a row has.
    """
    model = job.model
    facts: dict[str, str | int | float] = {
        "model": model.model,
        "hidden": model.hidden,
        "in_feats": int(g.ndata["feat"].shape[1]),
        "dropout": "some" if model.dropout else "none",
        "dtype": job.training.dtype,
    }
    return facts | ({"heads": model.heads} if model.model in ("gat", "gatv2") else {})


def make_loader(job: TrainJob, g: PartitionedGraph, model: nn.Module) -> tuple[FullGraphLoader, DependencyPlan]:
    """Makes the train loader and the plan it follows: made now, or read from the job's folder of plans. Collective.

    Raises:
        PlanError: On every rank: no plan fits, or the saved one is damaged, for another model or partition, or over the
            memory budget.
    """
    plan: DependencyPlan | None = None
    if job.strategy.plan is not None:
        with g.communicator.agreed():
            plan = load_plan(
                job.strategy.plan,
                g.rank(),
                world_size=g.communicator.world_size,
                num_layers=job.model.num_layers,
                partition_fingerprint=partition_digest(Path(job.part_config)),
                made_for=_model_of(job, g),
            )
    loader = FullGraphLoader(
        g,
        g.owned_nodes("train_mask"),
        job.model.num_layers,
        next(model.parameters()).device,
        model=None if plan is not None else model,
        planner=job.strategy.planner_config(),
        plan=plan,
        seed=job.training.seed,
        approximate=job.training.approximate,
    )
    if plan is None:
        assert loader.outcome is not None
        plan = loader.outcome.plan
    return loader, plan


class Evaluator:
    """Measures the accuracy on all labelled nodes, exactly, whatever the train loader's plan.

    Its loader lives beside the train loader; everything is communicated in it, in messages of `chunk_rows` if the train
    loader's memory budget asks for it.

    Args:
        planner: Of the train loader: where memory is scarce for one of the two, it is for the process.
    """

    def __init__(
        self,
        g: PartitionedGraph,
        num_layers: int,
        device: torch.device | None = None,
        *,
        chunk_rows: int | None = None,
        planner: PlannerConfig | None = None,
    ) -> None:
        self._graph = g
        masks = torch.stack([g.ndata[split].local.bool() for split in SPLITS])
        nothing = torch.empty(0, dtype=torch.int64)
        self._loader = FullGraphLoader(
            g,
            g.nodes.owned()[masks.any(0)],
            num_layers,
            device,
            plan=[nothing] * num_layers,
            seed=0,
            chunk_rows=chunk_rows,
            planner=planner,
        )
        own = self._loader.num_seeds
        self._labels = g.ndata["label"][self._loader.seeds][:own]
        self._splits = torch.zeros(len(SPLITS), own, dtype=torch.bool)
        if own:
            self._splits = masks[:, self._loader.seeds[:own].cpu() - g.nodes.start]
        self._splits = self._splits.to(self._loader.device)

    def measure(self, model: nn.Module, epoch: int) -> Accuracy:
        """Returns the same on every rank; leaves the model in the mode it was in. Collective."""
        with evaluating(model), torch.no_grad():
            for input_nodes, _, blocks in self._loader:
                logits = model(blocks, self._graph.ndata["feat"][input_nodes])
        rows = logits[: len(self._labels)]
        if rows.shape[1] == 1:  # of a graph with one class; `count_correct` takes one column for a yes or no
            rows = F.pad(rows, (0, 1), value=-math.inf)
        counts = torch.stack([count_correct(rows, self._labels, split) for split in self._splits]).double()
        val = self._splits[SPLITS.index("val_mask")]
        val_loss = F.cross_entropy(rows[val].double(), self._labels[val], reduction="sum")
        sums = self._graph.communicator.sum_(torch.cat([counts.flatten(), val_loss[None]]))
        right, total = sums[:-1].view_as(counts).unbind(1)
        shares = (right / total).tolist()  # 0 / 0 is NaN: a split without nodes
        mean_loss = float(sums[-1] / total[SPLITS.index("val_mask")])
        if self._graph.is_memory_scarce:
            self._graph.communicator.drop_free_memory()  # of exchanges that training has none of
        return Accuracy(epoch=epoch, train=shares[0], val=shares[1], test=shares[2], val_loss=mean_loss)


def _chunk_rows_of_evaluations(run: TrainingRun) -> int | None:
    """Returns how many received rows at a time an evaluation may hold; the same on every rank.

    A plan that fits the memory budget by caching says nothing of evaluations, which communicate everything.
    """
    plan, budget = run.plan, run.job.strategy.memory_budget
    if plan.chunk_rows is not None or budget is None or plan.trace is None:
        return plan.chunk_rows
    return chunk_rows_within(plan.trace, budget)


def _step(g: PartitionedGraph, loader: FullGraphLoader, model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    for input_nodes, seeds, blocks in loader:
        logits = model(blocks, g.ndata["feat"][input_nodes])
        loss = F.cross_entropy(logits, g.ndata["label"][seeds])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # This rank's share of the global mean; a borrowed seed weighs nothing.
    return loss.detach() * (loader.loss_weight / g.communicator.world_size)


def _best(measured: Sequence[Accuracy]) -> Accuracy:
    """The one of least validation loss; the last where there are no validation nodes, or all losses are NaN.

    Loss, not accuracy: of a few hundred validation nodes many epochs classify equally many, and the first of these is
    often one that is far from done.
    """
    known = [accuracy for accuracy in measured if not math.isnan(accuracy.val_loss)]
    if not known:
        return measured[-1]
    return min(known, key=lambda accuracy: (accuracy.val_loss, accuracy.epoch))


def _epoch_report(g: PartitionedGraph, loss: Tensor, times: EpochTimes, plan: int) -> EpochReport:
    shares = [row[0] for row in g.communicator.gather_floats([float(loss)])]
    return EpochReport(
        loss=math.fsum(shares),
        time_s=times.time_s,
        bytes_sent=sum(times.forward_bytes) + sum(times.backward_bytes),
        compute_s=times.compute_s,
        exchange_s=times.exchange_s,
        wait_s=times.wait_s,
        plan=plan,
    )


def _layer_reports(counts: Sequence[tuple[int, int]], times: EpochTimes) -> tuple[LayerReport, ...]:
    return tuple(
        LayerReport(
            layer=layer,
            cached=cached,
            communicated=communicated,
            forward_bytes=forward_bytes,
            backward_bytes=backward_bytes,
        )
        for layer, ((cached, communicated), forward_bytes, backward_bytes) in enumerate(
            zip(counts, times.forward_bytes, times.backward_bytes, strict=True), start=1
        )
    )


def rows_as_run(loader: FullGraphLoader) -> RunRows:
    """Returns which rows of other ranks this one computes and receives by the plan that runs; no borrowed seeds."""
    sets = loader.sets
    is_replica = ~sets.owned
    is_replica[: sets.sizes[-1]] = False  # seeds; those of other ranks are borrowed
    return RunRows(
        computed=tuple(sets.rows_global[:size][is_replica[:size]] for size in sets.sizes[: sets.num_layers]),
        received=tuple(structure.exchange.recv_global for structure in sets.layers),
    )


def count_dependencies(loader: FullGraphLoader) -> Sequence[tuple[int, int]]:
    """Returns `(cached, communicated)` rows for every layer, all ranks together. Collective.

    A borrowed seed is no cached row: its rank computes it, whatever the plan, to have something to compute.
    """
    run = rows_as_run(loader)
    here = [len(ids) for of_layer in zip(run.computed, run.received, strict=True) for ids in of_layer]
    by_rank = loader.communicator.gather_ints(here)
    total = [sum(row[k] for row in by_rank) for k in range(len(here))]
    return list(zip(total[::2], total[1::2], strict=True))
