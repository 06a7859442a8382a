# SPDX-License-Identifier: Apache-2.0
"""One rank: trains the jobs of a file one after the other; rank 0 leaves the reports."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from dgl_hybrid.training.config import TrainJob
from dgl_hybrid.training.trainer import train


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    reports = [
        train(TrainJob.from_json(job)).to_json() for job in json.loads((folder / "jobs.json").read_text("utf-8"))
    ]
    if dist.get_rank() == 0:
        (folder / "reports.json").write_text(json.dumps(reports), "utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
