# SPDX-License-Identifier: Apache-2.0
"""What this process read from other machines, and what its halo store answered instead."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(kw_only=True, slots=True)
class ReadCounts:
    """Running sums of one process; sampler processes have their own."""

    remote_rows: int = 0
    """Node and edge rows pulled from other machines."""
    remote_bytes: int = 0
    """Of those rows."""
    held_rows: int = 0
    """Rows of other machines that the store answered."""
    remote_sampling_requests: int = 0
    """Messages asking other machines for neighbours."""
    remote_seeds: int = 0
    """Vertices in those messages."""
    held_seeds: int = 0
    """Vertices of other machines whose neighbours were drawn here."""
    fill_rows: int = 0
    """Rows fetched once to be held."""
    fill_bytes: int = 0
    """Bytes of rows and in-edge lists fetched once."""
    fill_seeds: int = 0
    """Vertices whose in-edge lists were fetched once, to be held or to decide by."""

    def to_json(self) -> dict[str, int]:
        return asdict(self)


COUNTS = ReadCounts()
"""The one set of counters of this process."""


def read_counts() -> dict[str, int]:
    """Returns this process's counters by name; see `ReadCounts`."""
    return COUNTS.to_json()


def reset_read_counts() -> None:
    """Sets all counters of this process to zero."""
    for name in COUNTS.to_json():
        setattr(COUNTS, name, 0)
