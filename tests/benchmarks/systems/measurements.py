# SPDX-License-Identifier: Apache-2.0
"""Lines of measurements that were never made, and the smallest job, for the tests beside this file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.systems.grid import Cell
from benchmarks.systems.job import Job
from benchmarks.systems.measure import Settings

SETTINGS = Settings(rounds=5).to_json()
MACHINE = {"cores": 2, "arch": "x86_64", "system": "Linux 1", "libc": "glibc 2.36"}
HEADLINE = [
    *("vs_distdgl_full_median", "vs_distdgl_full_min", "vs_best_pure_min", "vs_best_pure_max"),
    *("vs_neutronstar_min", "vs_neutronstar_max", "vs_sar_median", "vs_sar_min"),
    *("vs_dgl_one_rank_gcn_sage_median", "vs_dgl_one_rank_gat_median"),
    *("predicted_error_median", "predicted_error_max"),
]


def make_line(cell: Cell, system: str, seconds: float | None, **changes: Any) -> dict[str, Any]:
    return {
        "bench": "systems",
        "metric": "epoch_time",
        "unit": "s",
        "cell": cell.key,
        "dataset": cell.dataset,
        "run": "run1",
        "code": "code1",
        "git_sha": "abc",
        "dirty": False,
        "settings": SETTINGS,
        "config": cell.to_json(),
        "variant": system,
        "status": "ok" if seconds is not None else "failed",
        "error": None if seconds is not None else "it broke | here",
        "p20": seconds and 0.9 * seconds,
        "p50": seconds,
        "p80": seconds and 1.2 * seconds,
        "predicted": None,
        "cpu_s": 0.1,
        "compute_s": 0.1,
        "exchange_s": None,
        "wait_s": None,
        "floor_s": 0.01,
        "prepare_s": 3.0,
        "sent_bytes": None,
        "wire_bytes": 2e6,
        "peak_rss_bytes": [10**8, 2 * 10**8],
        "machine": MACHINE,
        "machine_rates": {"copy_bytes_per_s": 1e10, "flops": 1e11},
        "versions": {"python": "3.11", "torch": "2.13", "dgl": "2.1"},
        "allocator_variables": {"MALLOC_MMAP_MAX_": "0"},
        "load_before": 0.5,
        **changes,
    }


TWO = Cell(graph="products")
ONE_SAGE, ONE_GAT = replace(TWO, ranks=1), replace(TWO, ranks=1, model="gat")
SHAPED = replace(TWO, model="gcn", network="1gbit")


def tiny_job(system: str) -> Job:
    return Job(
        system=system,
        part_config="none.json",
        graph_name="none",
        data={},
        num_nodes=9,
        feat_dim=4,
        num_classes=2,
        num_train=3,
        model="gat",
        num_layers=2,
        hidden=8,
        world_size=2,
        threads=1,
    )
