# SPDX-License-Identifier: Apache-2.0
"""The exceptions this package raises for faults of a run; mistakes of a caller are `ValueError` and `TypeError`."""

from __future__ import annotations


class HybridError(Exception):
    """Base of every fault of a run: what was expected, what came, where, and what to do."""


class CompatError(HybridError):
    """The installed DGL, PyTorch or NumPy cannot be made to work together."""


class DatasetError(HybridError):
    """A dataset is missing, malformed or cannot be fetched."""


class PartitionError(HybridError):
    """A partition folder is missing, damaged or not of a kind that can be read."""


class PlanError(HybridError):
    """A plan cannot be made, read or applied."""


class CheckpointError(HybridError):
    """Trained weights are missing, damaged, of another model, or cannot be saved."""


class ExchangeError(HybridError):
    """Ranks disagree about what is to be exchanged, or a peer did not take part."""


class BlockError(HybridError):
    """A graph operation cannot be answered by a `LayerBlock`."""


class LaunchError(HybridError):
    """The processes of a run could not be started, or one of them died."""


class KernelError(HybridError):
    """A kernel of the ops cannot be compiled, loaded or launched."""
