# SPDX-License-Identifier: Apache-2.0
"""`dgl-hybrid plan`: plans without training, saves the plans, and says why."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from dataclasses import fields
from pathlib import Path

from dgl_hybrid.cli.common import RunConfig, add_common_options, make_results_folder, print_config
from dgl_hybrid.cli.options import add_config_options, resolve
from dgl_hybrid.cli.tables import make_console, print_plan
from dgl_hybrid.cli.train import make_job
from dgl_hybrid.launch.local import run_local
from dgl_hybrid.launch.step_bar import step_bar
from dgl_hybrid.launch.workspace import DataConfig, PartitionConfig, check_existing_partition, prepare_partition
from dgl_hybrid.training.config import ModelConfig, StrategyConfig, TrainConfig

CONFIGS = (DataConfig, PartitionConfig, ModelConfig, StrategyConfig, TrainConfig, RunConfig)
WITHOUT = {
    "plan": "plans are made here, not read; choose where new ones go with --out",
    "checkpoint": "nothing is trained here",
    "resume": "nothing is trained here",
}
"""Fields that are no options here, and why."""
_DECIDING = (("heads", "dropout"), ("cache_ratio", "memory_budget"), ("dtype", "device", "approximate"))
"""Fields of a model, a strategy and training that decide a plan, besides those that always name its folder."""
_TRAINING_ONLY = "No effect on a plan; known so that the words of `train` are understood."
TEXTS = {
    "out": "Folder for the plans; plans/ beside the partition if not given.",
    "eval_every": _TRAINING_ONLY,
    "epochs": _TRAINING_ONLY,
    "lr": _TRAINING_ONLY,
    "weight_decay": _TRAINING_ONLY,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds this command's options."""
    add_common_options(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--explain", type=int, metavar="VERTEX", help="say why, for a vertex by its id in the original graph"
    )
    which.add_argument("--explain-global", type=int, metavar="VERTEX", help="the same, by its id after partitioning")
    add_config_options(parser, CONFIGS, without=WITHOUT, texts=TEXTS)


def folder_name(model: ModelConfig, strategy: StrategyConfig, training: TrainConfig) -> str:
    """Names a plan by the options that decide it: of two plans that differ in one, neither takes the other's place."""
    others = [
        f"-{name}-{value:.12g}" if isinstance(value, float) else f"-{name}-{value}"
        for config, names in zip((model, strategy, training), _DECIDING, strict=True)
        for name in names
        if (value := getattr(config, name)) != _default(config, name)
    ]
    return f"{model.model}-{model.num_layers}x{model.hidden}-{strategy.strategy}{''.join(others)}"


def _default(config: object, name: str) -> object:
    return next(field.default for field in fields(config) if field.name == name)  # type: ignore[arg-type]


def run(args: argparse.Namespace) -> int:
    """Plans, saves to --out (by default beside the partition), and prints the report."""
    configs = resolve(args, CONFIGS, without=WITHOUT)
    if args.print_config:
        return print_config(configs, as_line=args.json)
    data, partition, model, strategy, training, options = configs
    check_existing_partition(data, partition)
    with step_bar(not args.json) as on_step:
        prepared = prepare_partition(data.for_model(model.model), partition, on_step=on_step)
    job = make_job(prepared, model, strategy, training)
    default = prepared.part_config.parent / "plans" / folder_name(model, strategy, training)
    make_results_folder(options.out)
    out: Path | None = Path(options.out) if options.out is not None else default
    if options.out is None and not _may_be_made(default):
        out = None
    explain = args.explain if args.explain is not None else args.explain_global
    result = run_local(
        "plan",
        {
            "job": job.to_json(),
            "out": None if out is None else str(out.absolute()),
            "explain": explain,
            "explain_is_global": args.explain_global is not None,
        },
        ranks=prepared.num_parts,
        threads=options.threads,
        verbose=args.verbose,
        timeout_s=training.exchange_timeout_s,
    )
    print_plan(result)
    saved = f"saved in {out}; train with --plan {shlex.quote(str(out))}"
    if out is None:
        saved = f"not saved: {default} cannot be written; name a folder with --out"
    make_console().print(saved, soft_wrap=True)
    if args.json:
        print(json.dumps({**result, "out": None if out is None else str(out)}))
    return 0


def _may_be_made(folder: Path) -> bool:
    """Whether plans can lie there: a partition may be kept in a folder that others own."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return os.access(existing, os.W_OK | os.X_OK)
