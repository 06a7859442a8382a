# SPDX-License-Identifier: Apache-2.0
"""The life of a server or trainer of DistDGL that `launch.distdgl` measures.

Started as `python -m dgl_hybrid.launch.distdgl_part FOLDER`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import dgl_hybrid  # noqa: F401  mends DGL before anything imports it

# isort: split
import dgl
import torch
import torch.distributed as dist

from dgl_hybrid.launch.job import write_json


def main(folder: Path) -> None:
    """Serves, or trains and leaves the report in the job's folder."""
    dgl.distributed.initialize(os.environ["DGL_IP_CONFIG"])  # a server stays in here until the trainers are done
    # Only now: servers need neither of them.
    from dgl_hybrid.training.config import TrainJob
    from dgl_hybrid.training.distdgl import DistDGLReport, measure_distdgl

    task = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    torch.set_num_threads(task["threads"])
    dgl.utils.set_num_threads(task["threads"])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A file: PyTorch's TCP stores listen on all interfaces.
    store = dist.FileStore(str(folder / "store"), world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)

    def write(report: DistDGLReport) -> None:
        if rank == 0:
            write_json(folder / "report.json", report.to_json())

    job = TrainJob.from_json(task["job"])
    measure_distdgl(job, task["graph_name"], on_report=write, skips_largest=task["skips_largest"])
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
