# SPDX-License-Identifier: Apache-2.0
"""`dgl-hybrid train`: partitions where needed, trains on local ranks, or on those that torchrun has started."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from dgl_hybrid.cli.common import RunConfig, add_common_options, make_results_folder, print_config, write_results
from dgl_hybrid.cli.options import add_config_options, resolve
from dgl_hybrid.cli.tables import print_training
from dgl_hybrid.errors import CheckpointError
from dgl_hybrid.launch.local import run_local
from dgl_hybrid.launch.step_bar import step_bar
from dgl_hybrid.launch.workspace import (
    DataConfig,
    PartitionConfig,
    PreparedGraph,
    check_existing_partition,
    prepare_partition,
)
from dgl_hybrid.training.config import ModelConfig, StrategyConfig, TrainConfig, TrainJob
from dgl_hybrid.training.report import TrainReport

CONFIGS = (DataConfig, PartitionConfig, ModelConfig, StrategyConfig, TrainConfig, RunConfig)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds this command's options."""
    add_common_options(parser)
    add_config_options(parser, CONFIGS)


def run(args: argparse.Namespace) -> int:
    """Trains and prints the report."""
    configs = resolve(args, CONFIGS)
    if args.print_config:
        return print_config(configs, as_line=args.json)
    data, partition, model, strategy, training, options = configs
    check_existing_partition(data, partition)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from dgl_hybrid.cli.torchrun import train_under_torchrun

        report = train_under_torchrun(configs)
        if report is None:
            return 0
    else:
        make_results_folder(options.out)
        with step_bar(not args.json) as on_step:
            prepared = prepare_partition(data.for_model(model.model), partition, on_step=on_step)
        job = make_job(prepared, model, strategy, training)
        reports = run_local(
            "train",
            {"jobs": [job.to_json()]},
            ranks=prepared.num_parts,
            threads=options.threads,
            verbose=args.verbose,
            show_progress=not args.json,
            timeout_s=training.exchange_timeout_s,
        )
        report = TrainReport.from_json(reports[0])
    result: dict[str, Any] = report.to_json()
    try:
        print_training(report, "" if partition.partition else data.for_model(model.model).changes())
        if args.json:
            print(json.dumps(result), flush=True)
    finally:
        # Last, and in any case: a disk that is full by now costs the files alone, a closed stdout what is printed.
        write_results(options.out, configs, result)
    if report.unsaved is not None:  # an error all the same, after what there is to tell
        raise CheckpointError(report.unsaved)
    return 0


def make_job(prepared: PreparedGraph, model: ModelConfig, strategy: StrategyConfig, training: TrainConfig) -> TrainJob:
    """Returns what ranks are told."""
    return TrainJob(
        part_config=str(prepared.part_config),
        dataset=prepared.dataset,
        num_classes=prepared.num_classes,
        model=model,
        strategy=strategy,
        training=training,
    )
