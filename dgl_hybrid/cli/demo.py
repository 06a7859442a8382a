# SPDX-License-Identifier: Apache-2.0
"""`dgl-hybrid demo`: one graph, one model, every way to treat dependencies, beside plain DGL and DistDGL."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from dgl_hybrid.cli.common import add_common_options, make_results_folder, print_config, versions
from dgl_hybrid.cli.options import add_config_options, resolve
from dgl_hybrid.cli.plots import draw_plans, draw_results
from dgl_hybrid.cli.tables import format_bytes, format_seconds, format_share, make_console
from dgl_hybrid.cli.train import make_job
from dgl_hybrid.errors import HybridError
from dgl_hybrid.launch.distdgl import NoEpochInTime, run_distdgl
from dgl_hybrid.launch.local import run_local
from dgl_hybrid.launch.step_bar import step_bar
from dgl_hybrid.launch.threads import threads_per_rank
from dgl_hybrid.launch.workspace import DataConfig, PartitionConfig, prepare_partition
from dgl_hybrid.planner.durable import write_durably
from dgl_hybrid.training.config import ModelConfig, StrategyConfig, TrainConfig, TrainJob
from dgl_hybrid.training.distdgl import FEWEST, OTHER_MODELS, DistDGLReport
from dgl_hybrid.training.report import DISTDGL, PLAIN_DGL, TrainReport

TIE = 1.04
"""Medians of turns of one plan differ by as much: 42.3 and 43.8 ms, where hybrid took depcomm's."""
STRATEGIES = ("depcache", "depcomm", "hybrid")


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """What is compared. Without dropout: plain DGL cannot be given our masks, so losses could not be compared."""

    data: str = "powerlaw"
    """The graph, as in `train`."""
    ranks: int = 2
    """Number of ranks; each gets the cores divided by it as threads, at least one."""
    model: str = "sage"
    """Kind of layer."""
    num_layers: int = 3
    """Number of layers."""
    hidden: int = 128
    """Width of the hidden layers."""
    epochs: int = 80
    """Epochs in float32, for bytes, memory, accuracy and trials of plans; times are of turns after them."""
    check_epochs: int = 5
    """Epochs in float64, for the digits that the loss agrees with plain DGL's."""
    distdgl: bool = True
    """Train with DistDGL, too: its servers and trainers on this host, full neighbourhoods, without the plugin."""
    seed: int = 0
    """Of the initial weights."""
    out: str = "demo_output"
    """Folder for the pictures, the measurements and the partition."""

    def __post_init__(self) -> None:
        """Checks every field."""
        if self.ranks < 1 or self.check_epochs < 1 or self.epochs < 2:
            raise ValueError(
                f"ranks and check_epochs must be at least 1, epochs at least 2 "
                f"(got {self.ranks}, {self.check_epochs}, {self.epochs})"
            )
        self.model_config()  # which checks its own

    def model_config(self) -> ModelConfig:
        """Returns the model."""
        return ModelConfig(model=self.model, num_layers=self.num_layers, hidden=self.hidden, dropout=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoRow:
    """One way to train: measured in float32, checked in float64."""

    measured: TrainReport
    digits: float
    """Decimal digits to which every loss of the float64 run equals plain DGL's; infinite where all bits do."""
    times_s: tuple[float, ...]
    """Of epochs by the plan that stayed, in turns with the other ways, after the run that was measured."""

    @property
    def epoch_time_s(self) -> float:
        """Their median."""
        return statistics.median(self.times_s)

    def to_json(self) -> dict[str, Any]:
        """Returns one line of `results.jsonl`."""
        digits = None if math.isinf(self.digits) else self.digits
        return {
            **self.measured.to_json(),
            "loss_digits": digits,
            "epoch_time_s": self.epoch_time_s,
            "turn_times_s": list(self.times_s),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class DistDGLRow:
    """DistDGL, or why there is none: it is code of others, and no reason to end."""

    job: TrainJob
    ranks: int
    report: DistDGLReport | None
    error: str | None = None
    is_late: bool = False
    """Whether there is none because no epoch was done in time, which is no failure."""
    digits: float | None = None
    """To which the loss at the initial weights equals plain DGL's, in float64; None where that was not compared."""

    @property
    def other_model(self) -> str | None:
        """Why its results are not plain DGL's, if they are not meant to be."""
        return OTHER_MODELS.get(self.job.model.model)

    def to_json(self) -> dict[str, Any]:
        """Returns one line of `results.jsonl`; `bytes_sent` is not counted by DistDGL."""
        report = self.report
        return {
            "strategy": DISTDGL,
            "ranks": self.ranks,
            "model": self.job.model.model,
            "dataset": self.job.dataset,
            "dtype": self.job.training.dtype,
            "error": self.error,
            "is_late": self.is_late,
            "epoch_time_s": None if report is None else report.epoch_time_s,
            **({} if report is None else report.to_json()),
            "loss_digits": None if self.digits is None or math.isinf(self.digits) else self.digits,
            "loss_is_compared": self.digits is not None,
            "other_model": self.other_model,
        }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds this command's options."""
    add_common_options(parser)
    add_config_options(parser, (DemoConfig,))


def run(args: argparse.Namespace) -> int:
    """Trains, prints one table, draws two pictures."""
    (config,) = resolve(args, (DemoConfig,))
    if args.print_config:
        return print_config((config,), as_line=args.json)
    console = make_console()
    start_s = time.monotonic()
    out = Path(config.out)
    make_results_folder(config.out)
    data = DataConfig(data=config.data).for_model(config.model)
    partition = PartitionConfig(ranks=config.ranks, workspace=str(out / "partitions"))
    model = config.model_config()
    training = TrainConfig(epochs=config.epochs, eval_every=0, seed=config.seed)
    console.print(f"partitioning {config.data} in {config.ranks} (METIS); graph: {data.changes()} ...")
    with step_bar(not args.json) as on_step:
        prepared = prepare_partition(data, partition, on_step=on_step)
    job = make_job(prepared, model, StrategyConfig(), training)
    cores = threads_per_rank(1)
    threads = threads_per_rank(config.ranks)
    console.print(f"plain DGL, one process, {cores} thread{'s' if cores > 1 else ''} ...")
    jobs = both_dtypes(job, config.check_epochs)
    reference = read_reports(
        run_local("reference", {"jobs": jobs, "data": data_record(data)}, ranks=1, verbose=args.verbose)
    )
    distdgl = None
    if config.distdgl:
        console.print(
            f"DistDGL, {config.ranks} trainers and servers, {threads} thread{'s' if threads > 1 else ''} each ..."
        )
        distdgl = try_distdgl(job, config.ranks, threads, initial_loss=reference[1].epochs[0].loss)
    trained = {PLAIN_DGL: reference}
    jobs_of_turns = {}
    for strategy in STRATEGIES:
        console.print(f"{strategy}, {config.ranks} ranks, {threads} thread{'s' if threads > 1 else ''} each ...")
        plans = str(out / "plans" / strategy)
        jobs = both_dtypes(replace(job, strategy=StrategyConfig(strategy=strategy)), config.check_epochs)
        reports = run_local(
            "train",
            {"jobs": jobs, "save_plans_in": [plans, None]},
            ranks=config.ranks,
            verbose=args.verbose,
            show_progress=not args.json,
        )
        trained[strategy] = read_reports(reports)
        jobs_of_turns[strategy] = replace(job, strategy=StrategyConfig(plan=plans)).to_json()
    console.print("all in turns, for times that compare ...")
    times_s = run_local(
        "turns",
        {"jobs": jobs_of_turns, "data": data_record(data), "threads": cores},
        ranks=config.ranks,
        verbose=args.verbose,
    )
    rows = [make_row(reports, reference, times_s[name]) for name, reports in trained.items()]
    records = [row.to_json() for row in rows]
    if distdgl is not None:
        records.insert(1, distdgl.to_json())
    lines = [json.dumps({**record, "cores": cores, "versions": versions()}) for record in records]
    results = out / "results.jsonl"
    pictures: list[Path] = []
    # What took minutes to measure is shown and kept, whichever of the following fails: a disk that is full by now costs
    # the files alone, a closed stdout what is printed, and what cannot be drawn the pictures.
    try:
        try:
            print_rows(rows, cores, distdgl)
        finally:
            write_durably(out, {results.name: ("\n".join(lines) + "\n").encode()})
        for draw in (draw_results, draw_plans):
            pictures += draw(results, out)
        console.print(
            f"{time.monotonic() - start_s:.0f} s; pictures: {', '.join(str(path) for path in pictures)}; "
            f"measurements: {results}",
            soft_wrap=True,
        )
    finally:
        if args.json:
            print(json.dumps({"runs": records, "pictures": [str(path) for path in pictures]}))
    return 0


def try_distdgl(job: TrainJob, ranks: int, threads: int, *, initial_loss: float) -> DistDGLRow:
    """Measures DistDGL; whatever goes wrong there becomes a line of its row."""
    try:
        report = run_distdgl(job, threads=threads)
    except NoEpochInTime as error:
        return DistDGLRow(job=job, ranks=ranks, report=None, error=str(error), is_late=True)
    except (HybridError, OSError, ValueError) as error:
        return DistDGLRow(job=job, ranks=ranks, report=None, error=" ".join(str(error).split()))
    row = DistDGLRow(job=job, ranks=ranks, report=report)
    if report.initial_loss is None or row.other_model is not None:
        return row
    return replace(row, digits=agreeing_digits([report.initial_loss], [initial_loss]))


def both_dtypes(job: TrainJob, check_epochs: int) -> list[dict[str, Any]]:
    """Returns the float32 job and the float64 check; the first is measured, so that its peak memory is its own."""
    check = replace(job, training=replace(job.training, dtype="float64", epochs=check_epochs))
    return [job.to_json(), check.to_json()]


def data_record(data: DataConfig) -> dict[str, Any]:
    """Returns the config as a task's payload holds it."""
    return {name: getattr(data, name) for name in ("data", "symmetric", "self_loops", "normalize_features")}


def read_reports(records: Sequence[dict[str, Any]]) -> list[TrainReport]:
    """Reads what a task returned."""
    return [TrainReport.from_json(record) for record in records]


def make_row(reports: Sequence[TrainReport], reference: Sequence[TrainReport], times_s: Sequence[float]) -> DemoRow:
    """Pairs a float32 report with the agreement of its float64 twin, and with times that compare."""
    losses = [epoch.loss for epoch in reports[1].epochs]
    digits = agreeing_digits(losses, [epoch.loss for epoch in reference[1].epochs])
    return DemoRow(measured=reports[0], digits=digits, times_s=tuple(times_s))


def agreeing_digits(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Returns to how many decimal digits the worst of some losses equals the expected one."""
    errors = [abs(a - b) / max(abs(b), 1e-300) for a, b in zip(losses, expected, strict=True)]
    if not all(error <= 1 for error in errors):  # also NaN, which `max` would pass over
        return 0.0
    worst = max(errors)
    return math.inf if worst == 0 else abs(math.log10(worst))  # of 1, no -0 digits


def print_rows(rows: Sequence[DemoRow], cores: int, distdgl: DistDGLRow | None = None) -> None:
    """Prints the comparison: plain DGL is the first of the rows, DistDGL comes after it."""
    console = make_console()
    base = rows[0].measured
    table = Table("strategy", title=f"{base.model}, {len(base.layers)} layers, on {base.dataset}", title_justify="left")
    for name in (
        "loss equals\nplain DGL to",
        "epoch\n(median)",
        "against\nplain DGL",
        "sent per\nepoch",
        "memory\nper rank",
        "cached rows\nby layer",
        "communicated\nrows by layer",
        "test\naccuracy",
    ):
        table.add_column(name, justify="right")
    fastest = min(row.epoch_time_s for row in rows[1:])
    for index, row in enumerate(rows):
        report = row.measured
        marker = " *" if index and row.epoch_time_s <= TIE * fastest else ""
        table.add_row(
            report.strategy + marker,
            name_digits(row.digits) if index else "-",
            format_seconds(row.epoch_time_s),
            f"{rows[0].epoch_time_s / row.epoch_time_s:.2f}x",
            format_bytes(report.steady_bytes_sent) if index else "-",
            format_bytes(added_memory(report)),
            " ".join(f"{layer.cached:,}" for layer in report.layers) if index else "-",
            " ".join(f"{layer.communicated:,}" for layer in report.layers) if index else "-",
            format_share(report.final.test),
        )
        if not index and distdgl is not None:
            table.add_row(*distdgl_cells(distdgl, row.epoch_time_s))
    console.print(table)
    hybrid, hybrid_s = next((row.measured, row.epoch_time_s) for row in rows if row.measured.strategy == "hybrid")
    predicted = "-" if hybrid.predicted_epoch_s is None else format_seconds(hybrid.predicted_epoch_s)
    console.print(
        f"* fastest of ours, or within 4 % of it. hybrid took {hybrid.chosen_plan}, predicted {predicted} an epoch.\n"
        f"Loss: worst of the float64 epochs. Time: float32, all in turns, plain DGL on {cores} threads, ranks share\n"
        "the same cores over loopback, where sending costs little: a real network favours caching more. Memory: peak\n"
        "of the largest rank above interpreter and libraries. Layer 1 reads raw features: its rows travel in the\n"
        "first epoch, what is made of them is kept.",
    )
    if distdgl is not None:
        # What an error says stays one line, however long.
        console.print(describe_distdgl(distdgl, hybrid_s), soft_wrap=distdgl.report is None)


def distdgl_cells(row: DistDGLRow, plain_s: float) -> tuple[str, ...]:
    """Returns its row of the table."""
    report = row.report
    if report is None:
        return (DISTDGL, "-", "no epoch" if row.is_late else "failed", *["-"] * 6)
    # The largest batch was tried first: a smaller one may need less.
    bound = "" if report.batch_size is None else "<= "
    return (
        DISTDGL,
        "other model" if row.other_model else "-" if row.digits is None else name_digits(row.digits),
        format_seconds(report.epoch_time_s),
        f"{plain_s / report.epoch_time_s:.2f}x",
        "-",
        bound + format_bytes(added_memory(report)),
        *["-"] * 3,
    )


def describe_distdgl(row: DistDGLRow, hybrid_s: float) -> str:
    """Returns what the table does not say of DistDGL."""
    report = row.report
    if report is None and row.is_late:
        return f"{row.error}: that limit is the demo's; whether DistDGL was slow or stuck is not known."
    if report is None:
        return f"DistDGL failed: {row.error}"
    size = "all seeds of a trainer" if report.batch_size is None else f"{report.batch_size:,} seeds"
    others = [
        f"{int(name):,}: {format_seconds(time_s)}" if name.isdecimal() else f"all: {format_seconds(time_s)}"
        for name, time_s in report.seconds_by_batch_size.items()
        if name != str(report.batch_size or "all")
    ] + [f"{given_up:,}: slower" for given_up in report.given_up]
    count = len(report.times_s)
    epochs = f"median of {count} epochs"
    if not report.has_warmed_up or count < FEWEST:
        epochs = "few epochs" if report.stopped else "few epochs: time was up"
    ratio = report.epoch_time_s / hybrid_s
    lines = [
        f"hybrid is {ratio:.1f} times as fast as DistDGL, which trains with full neighbourhoods by",
        f"batches of {size}{' (' + ', '.join(others) + ')' if others else ''}. DistDGL is timed by itself, before the",
        f"turns ({epochs}). Its loss is that at the initial weights, its memory a trainer's, without the servers'.",
    ]
    if row.other_model:
        lines.append(f"{row.other_model}.")
    if report.stopped:
        lines.append(f"It ended before it was done: {report.stopped}.")
    return "\n".join(lines)


def name_digits(digits: float) -> str:
    """E.g. 14 digits."""
    return "every digit" if math.isinf(digits) else f"{digits:.0f} digits"


def added_memory(report: TrainReport | DistDGLReport) -> int:
    """Returns what the largest rank held above interpreter and libraries."""
    return max(p - b for p, b in zip(report.peak_rss_bytes, report.base_rss_bytes, strict=True))
