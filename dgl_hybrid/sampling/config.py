# SPDX-License-Identifier: Apache-2.0
"""What the halo store may hold: strategy and budget, and how both reach processes that a job starts.

Imports nothing of DGL: launchers read it before any of that is loaded.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

Strategy = Literal["hybrid", "depcache", "depcomm"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)

ENABLE_VARIABLE = "DGL_HYBRID_ENABLE"
"""Set for every process of a job in which the plugin is on; holds a `HaloConfig` as JSON or as
`strategy:budget`, `1` for what the script says, or `0` or `off`."""
OFF_WORDS = ("0", "off")
"""Values of `ENABLE_VARIABLE` that leave the plugin out; named again in `dgl_hybrid` and `compat.startup`, which decide
by them whether this module is imported at all."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

_MOST_PER_CENT = 100
"""So few bytes hold nothing: who writes such a number means per cent, or has left out a unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Bytes that one process may hold of other machines' rows and in-edge lists, with what finds them: a trainer, with
    what it shares with its sampler processes, and each of these, with what it got. At most one field is set.
    """

    num_bytes: int | None = None
    share: float | None = None
    """Of the bytes of all node features of the graph."""
    is_auto: bool = False
    """A quarter of the memory that is free at the first read or loader, by the host's trainers and their samplers."""

    @property
    def is_unlimited(self) -> bool:
        return self.num_bytes is None and self.share is None and not self.is_auto


@dataclass(frozen=True, kw_only=True, slots=True)
class HaloConfig:
    """What `enable` was asked for.

    Raises:
        ValueError: An unknown strategy or a budget that cannot be read.
    """

    strategy: Strategy = "hybrid"
    """`hybrid` decides per vertex, `depcache` holds all that the loaders reach, `depcomm` reads as DistDGL does."""
    budget: str | int = "auto"
    """`auto`, `unlimited`, a share of the node features (`10%`), bytes (`256MB`, 268435456); of each process, trainers
    and their sampler processes. Counts with `hybrid` alone: `depcache` holds what it reaches, `depcomm` holds nothing.
    With sampler processes no more than a quarter of what is free in `/dev/shm`, for all trainers of a host together."""

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)} (got {self.strategy!r})")
        self.parsed_budget()

    def parsed_budget(self) -> Budget:
        """Returns the budget that holds: `depcache` has none."""
        budget = parse_budget(self.budget)
        return Budget() if self.strategy == "depcache" else budget

    def to_environment(self) -> str:
        """Returns the value of `ENABLE_VARIABLE` that makes other processes enable the same."""
        return json.dumps({"strategy": self.strategy, "budget": self.budget})

    @classmethod
    def from_environment(cls, value: str) -> HaloConfig:
        """Reads the value of `ENABLE_VARIABLE`; what it does not say has its default.

        Raises:
            ValueError: It is none that `read_environment` reads, or names no known strategy or budget.
        """
        return cls(**read_environment(value))


def read_environment(value: str) -> dict[str, Any]:
    """Returns what a value of `ENABLE_VARIABLE` other than off says: `strategy`, `budget`, both or, for `1`, nothing.

    Besides JSON there is `hybrid:10%`, for launchers that take no quotes and blanks.

    Raises:
        ValueError: It is none of these.
    """
    if value == "1":
        return {}
    strategy, colon, budget = value.strip().partition(":")
    if strategy in STRATEGIES:
        return {"strategy": strategy, "budget": budget} if colon else {"strategy": strategy}
    try:
        fields = json.loads(value)
    except json.JSONDecodeError:
        fields = None
    if not isinstance(fields, dict) or not set(fields) <= {"strategy", "budget"}:
        raise ValueError(
            f"{ENABLE_VARIABLE} must be 1, 0, a strategy ({', '.join(STRATEGIES)}) or off, one with its budget "
            f"(hybrid:10%), or a JSON object with strategy and budget (got {value!r})"
        )
    return fields


def parse_budget(text: str | int) -> Budget:
    """Reads a budget.

    Raises:
        ValueError: It is none of the forms that `HaloConfig.budget` lists.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return Budget(num_bytes=_not_too_few(text, text))
    if text == "auto":
        return Budget(is_auto=True)
    if text == "unlimited":
        return Budget()
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*|%)\s*", text if isinstance(text, str) else "", re.IGNORECASE)
    if match is not None and match[2] == "%":
        return Budget(share=float(match[1]) / 100)
    if match is not None and match[2].upper() in _UNITS:
        num_bytes = float(match[1]) * _UNITS[match[2].upper()]
        if num_bytes < 2**63:
            return Budget(num_bytes=_not_too_few(int(num_bytes), text))
    raise ValueError(
        f"budget must be 'auto', 'unlimited', a share such as '10%' or bytes such as '256MB' (got {text!r})"
    )


def _not_too_few(num_bytes: int, given: str | int) -> int:
    """Returns so many bytes.

    Raises:
        ValueError: They would hold nothing, and nobody would be told: a share was meant, or a unit forgotten.
    """
    if 0 < num_bytes <= _MOST_PER_CENT:
        raise ValueError(
            f"a budget of {num_bytes} bytes holds nothing (got {given!r}): a number without a unit is bytes. Write "
            f"'{num_bytes}%' for a share of the node features, '{num_bytes}MB' for megabytes, or 0 to hold nothing."
        )
    return num_bytes
