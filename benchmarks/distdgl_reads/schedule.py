# SPDX-License-Identifier: Apache-2.0
"""What one DistDGL job measures, as its command line carries it, and how its rank 0 reports."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

MODES = ("off", "depcomm", "unlimited", "10%")
"""`off`: DistDGL as it is; `depcomm`: the plugin counts and holds nothing; `unlimited`: it holds all that is reached;
`10%`: it decides within a tenth of the bytes of the node features, per trainer."""
TIMED_MODES = ("off", "unlimited", "10%")
MARK = "@distdgl_reads "
"""Begins the lines that are for the starting process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The measurements of one job: one graph in one number of parts."""

    graph_name: str
    num_classes: int
    fanouts: tuple[tuple[int, ...], ...]
    batch_size: int = 1000
    hidden: int = 64
    seed: int = 0
    count_epochs: int = 3
    rates_bits_per_s: tuple[int, ...] = ()
    """Rates of the links under which epochs are timed; none: nothing is timed."""
    rounds: int = 2
    """Passes over the modes, one after the other, so that what slows the machine for a while slows all of them."""
    epochs: int = 2
    """Measured in each pass and mode, after one that is not."""
    count_modes: tuple[str, ...] = MODES
    timed_modes: tuple[str, ...] = TIMED_MODES
    answers: str = ""
    """Folder in which the starting process answers requests to shape the links."""

    @property
    def num_epochs(self) -> int:
        """All epochs of the job."""
        timed = len(self.rates_bits_per_s) * self.rounds * len(self.timed_modes) * (1 + self.epochs)
        return len(self.fanouts) * (len(self.count_modes) * self.count_epochs + timed)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        fields = json.loads(text)
        fields["fanouts"] = tuple(tuple(fanout) for fanout in fields["fanouts"])
        for name in ("rates_bits_per_s", "count_modes", "timed_modes"):
            fields[name] = tuple(fields[name])
        return cls(**fields)


def write_message(kind: str, **content: Any) -> str:
    """Returns the line that carries a message."""
    return MARK + json.dumps({"kind": kind, **content})


def read_message(line: str) -> dict[str, Any] | None:
    """Returns the message of a line, None if it is an ordinary one."""
    if not line.startswith(MARK):
        return None
    message: dict[str, Any] = json.loads(line.removeprefix(MARK))
    return message
