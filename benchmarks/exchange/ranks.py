# SPDX-License-Identifier: Apache-2.0
"""Ranks that measure something together: processes of this host, one thread each."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dgl_hybrid.partition.signals import ending_signals_raise

Records = list[dict[str, Any]]


@ending_signals_raise()  # through the finally clause, which ends the ranks
def measure_by_ranks(measure: Callable[..., Records], world_size: int, *arguments: object) -> Records:
    """Returns what rank 0 returns of `measure(*arguments)`, which all ranks call at once."""
    with tempfile.TemporaryDirectory(prefix="exchange_") as folder:
        context = mp.spawn(  # type: ignore[no-untyped-call]
            _work, (world_size, folder, measure, arguments), nprocs=world_size, join=False
        )
        try:
            while not context.join():
                pass
        finally:
            for process in context.processes:
                process.terminate()
            for process in context.processes:
                process.join()
        records: Records = json.loads(_records_in(folder).read_text("utf-8"))
        return records


def _work(
    rank: int, world_size: int, folder: str, measure: Callable[..., Records], arguments: tuple[object, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    records = measure(*arguments)
    if rank == 0:
        _records_in(folder).write_text(json.dumps(records), "utf-8")
    dist.destroy_process_group()


def _records_in(folder: str) -> Path:
    return Path(folder) / "records.json"
