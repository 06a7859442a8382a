# SPDX-License-Identifier: Apache-2.0
"""Hybrid dependency management for GNN training beside DGL and DistDGL, sampled and on the full graph.

Importing this package mends DGL for the PyTorch and NumPy at hand (`dgl_hybrid.compat`) and imports nothing heavy; the
public names below are loaded at first use.
"""

from __future__ import annotations

import os
from importlib import import_module

from dgl_hybrid.compat import install
from dgl_hybrid.compat.hook import after_dgl_import, waits_for_dgl

__version__ = "0.1.0"

# Public name -> module it lives in. Loaded at first use: `import dgl_hybrid` is cheap in launchers and servers.
_EXPORTS: dict[str, str] = {
    "FullGraphLoader": "dgl_hybrid.training.loader",
    "PartitionedGraph": "dgl_hybrid.training.partitioned_graph",
    "PlannerConfig": "dgl_hybrid.planner",
    "average_gradients": "dgl_hybrid.training.gradients",
    "disable": "dgl_hybrid.sampling.switch",
    "enable": "dgl_hybrid.sampling.switch",
    "global_accuracy": "dgl_hybrid.training.metrics",
    "global_f1": "dgl_hybrid.training.metrics",
    "global_mean": "dgl_hybrid.training.metrics",
    "global_roc_auc": "dgl_hybrid.training.metrics",
    "held_bytes": "dgl_hybrid.sampling.switch",
    "infer": "dgl_hybrid.training.inference",
    "load_dataset": "dgl_hybrid.datasets",
    "load_model": "dgl_hybrid.training.checkpoint",
    "load_partition": "dgl_hybrid.partition",
    "op_counts": "dgl_hybrid.ops.op_counts",
    "optimize": "dgl_hybrid.graph.optimize",
    "partition_graph": "dgl_hybrid.partition",
    "read_counts": "dgl_hybrid.sampling.counts",
    "reset_op_counts": "dgl_hybrid.ops.op_counts",
    "reset_read_counts": "dgl_hybrid.sampling.counts",
    "restore": "dgl_hybrid.graph.optimize",
    "route_ops": "dgl_hybrid.ops.routing",
}

# Packages that are reached by their names, as in `dgl_hybrid.planner.load_plan`. Loaded at first use.
_PACKAGES = frozenset(("datasets", "errors", "exchange", "graph", "launch", "ops", "partition", "planner", "training"))

__all__ = ["__version__", *sorted(_EXPORTS)]

install()


def _enable_as_parent() -> None:
    import_module("dgl_hybrid.sampling.switch").enable_from_environment()


# Set by `enable` and by launchers for all processes of a job.
if os.environ.get("DGL_HYBRID_ENABLE", "") not in ("", "0", "off"):
    after_dgl_import(_enable_as_parent)


def __getattr__(name: str) -> object:
    """Loads a public name or package at its first use."""
    if name not in _PACKAGES and name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if waits_for_dgl():
        # The plugin is turned on as soon as DGL is there, for which it needs modules of this package whole: not in the
        # midst of the first of them that happens to import DGL.
        import_module("dgl")
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")  # which binds it here
    value: object = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS, *_PACKAGES})
