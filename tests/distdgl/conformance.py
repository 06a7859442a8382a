# SPDX-License-Identifier: Apache-2.0
"""Runs inside every server and trainer of a job: compares what DistDGL answers with the graph before partitioning.

Each trainer writes one JSON: by check, how much was compared and what was wrong. All trainers run the same checks in
the same order, as many of them are collective. `test_conformance` starts the jobs and reads the files.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import traceback
from dataclasses import asdict
from pathlib import Path

import dgl
import torch
import torch.distributed as dist

from tests.distdgl.context import Context, Findings, NamedCheck
from tests.distdgl.data_checks import DATA_CHECKS
from tests.distdgl.hetero_checks import HETERO_CHECKS
from tests.distdgl.sampling_checks import SAMPLING_CHECKS
from tests.distdgl.write_checks import WRITE_CHECKS
from tests.helpers.distdgl import Truth

# The draws come first: a server's random numbers are then the same in every run. Writes come last: they change rows.
SUITES: dict[str, list[NamedCheck]] = {
    "homogeneous": [*SAMPLING_CHECKS, *DATA_CHECKS, *WRITE_CHECKS],
    "heterograph": HETERO_CHECKS,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("part_config")
    parser.add_argument("--truth", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plugin", action="store_true", help="the job was started with the plugin on")
    parser.add_argument("--checks", default="", help="comma-separated names; all if empty")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    # Every server has draws of its own: two that answer with the same ones would look biased.
    dgl.seed(1000 * (1 + int(os.environ.get("DGL_SERVER_ID", -1))) + args.seed)
    dgl.distributed.initialize(os.environ["DGL_IP_CONFIG"])
    dist.init_process_group("gloo")
    g = dgl.distributed.DistGraph("case", part_config=args.part_config)
    context = Context(
        g=g,
        truth=Truth.load(args.truth),
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        plugin=args.plugin,
        seed=args.seed,
    )
    wanted = set(filter(None, args.checks.split(",")))
    results: dict[str, object] = {}
    for check in SUITES[args.suite]:
        if (wanted and check.name not in wanted) or (check.needs_plugin and not args.plugin):
            continue
        print(f"check {check.name}", flush=True)  # the last line of a job that hangs
        findings, start = Findings(), time.perf_counter()
        try:
            check.run(context, findings)
        except Exception:
            findings.wrong.append(traceback.format_exc())
            print(f"check {check.name} failed:\n{findings.wrong[-1]}", flush=True)
        results[check.name] = asdict(findings) | {"seconds": round(time.perf_counter() - start, 3)}
        dist.barrier()
    result = {"rank": context.rank, "checks": results, "read_counts": read_counts(args.plugin)}
    (args.out / f"trainer-{context.rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def read_counts(plugin: bool) -> dict[str, int]:
    if not plugin:
        return {}
    import dgl_hybrid

    return dict(dgl_hybrid.read_counts())


if __name__ == "__main__":
    main()
