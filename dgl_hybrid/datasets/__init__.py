# SPDX-License-Identifier: Apache-2.0
"""Graphs to train on: generated, from `.npz` files, from DGL and from OGB."""

from __future__ import annotations

from dgl_hybrid.datasets.dataset import GraphDataset, check_features
from dgl_hybrid.datasets.npz import load_npz
from dgl_hybrid.datasets.powerlaw import PowerLawConfig, generate_powerlaw
from dgl_hybrid.datasets.registry import list_datasets, load_dataset

__all__ = [
    "GraphDataset",
    "PowerLawConfig",
    "check_features",
    "generate_powerlaw",
    "list_datasets",
    "load_dataset",
    "load_npz",
]
