# SPDX-License-Identifier: Apache-2.0
"""What this cluster can do: measured rates, with the date and the machine they were measured on."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from dataclasses import asdict, dataclass

from ..errors import PlanError

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Rates of one rank's device and of the links between ranks. Matrices are `[from_rank][to_rank]`."""

    dense_flops_per_s: float
    """Dense matrix product."""
    row_bytes_per_s: float
    """Elementwise work, bytes read and written."""
    gather_bytes_per_s: tuple[tuple[int, float], ...]
    """Gather-aggregate rate over in-edges as (row width in bytes, bytes gathered per second), widths ascending."""
    latency_s: Matrix
    """(P, P): time of an all-to-all that carries next to nothing."""
    bandwidth_bytes_per_s: Matrix
    """(P, P): rate of each pair while all pairs transfer at once, as in training."""
    allreduce_latency_s: float = 0.0
    allreduce_bytes_per_s: float = 1e9
    overlaps: bool = False
    """Rows travel while the device computes; not where moving them is the processor's own work (shared memory)."""
    device: str = "cpu"
    date: str = ""
    machine: str = ""

    def __post_init__(self) -> None:
        world_size = len(self.latency_s)
        for name, matrix in (("latency_s", self.latency_s), ("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s)):
            if world_size < 1 or len(matrix) != world_size or any(len(row) != world_size for row in matrix):
                raise ValueError(
                    f"{name} must be {world_size} by {world_size} (got rows of {[len(r) for r in matrix]})"
                )
        widths = [width for width, _ in self.gather_bytes_per_s]
        if not widths or widths != sorted(set(widths)) or widths[0] < 1:
            raise ValueError(f"gather_bytes_per_s must have ascending positive widths (got {widths})")
        rates = [self.dense_flops_per_s, self.row_bytes_per_s, self.allreduce_bytes_per_s]
        rates += [rate for _, rate in self.gather_bytes_per_s]
        rates += [rate for row in self.bandwidth_bytes_per_s for rate in row]
        if not all(math.isfinite(rate) and rate > 0 for rate in rates):
            raise ValueError(f"rates must be positive and finite (got {min(rates)} .. {max(rates)})")
        latencies = [self.allreduce_latency_s, *(x for row in self.latency_s for x in row)]
        if not all(math.isfinite(x) and x >= 0 for x in latencies):
            raise ValueError("latencies must be finite and not negative")

    @property
    def world_size(self) -> int:
        """P."""
        return len(self.latency_s)

    def gather_rate(self, width_bytes: float) -> float:
        """Returns the gather-aggregate rate in bytes/s for rows of `width_bytes`, interpolated over log(width)."""
        table = self.gather_bytes_per_s
        if width_bytes <= table[0][0]:
            return table[0][1]
        for (low, low_rate), (high, high_rate) in itertools.pairwise(table):
            if width_bytes <= high:
                share = math.log(width_bytes / low) / math.log(high / low)
                return low_rate + share * (high_rate - low_rate)
        return table[-1][1]

    def to_json(self) -> dict[str, object]:
        """Returns a dictionary that `json.dumps` takes."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, object]) -> Topology:
        """Reads what `to_json` wrote.

        Raises:
            PlanError: a field is missing or has the wrong type.
        """
        try:
            fields = dict(data)
            fields["gather_bytes_per_s"] = tuple((int(w), float(r)) for w, r in data["gather_bytes_per_s"])  # type: ignore[attr-defined]
            for name in ("latency_s", "bandwidth_bytes_per_s"):
                fields[name] = tuple(tuple(float(x) for x in row) for row in data[name])  # type: ignore[attr-defined]
            return cls(**fields)  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"the stored topology cannot be read ({error}); probe the cluster again") from error

    def digest(self) -> str:
        """Short fingerprint of the measured numbers."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]


def uniform_topology(
    world_size: int,
    *,
    bandwidth_bytes_per_s: float = 1e9,
    latency_s: float = 1e-4,
    dense_flops_per_s: float = 1e11,
    row_bytes_per_s: float = 8e9,
    gather_bytes_per_s: float = 1e10,
    overlaps: bool = False,
    machine: str = "assumed",
) -> Topology:
    """Builds a topology with one rate for every pair: for planning a cluster that is not at hand, and for tests."""
    ranks = range(world_size)
    return Topology(
        dense_flops_per_s=dense_flops_per_s,
        row_bytes_per_s=row_bytes_per_s,
        gather_bytes_per_s=((64, gather_bytes_per_s), (4096, gather_bytes_per_s)),
        latency_s=tuple(tuple(0.0 if i == j else latency_s for j in ranks) for i in ranks),
        bandwidth_bytes_per_s=tuple(tuple(bandwidth_bytes_per_s for _ in ranks) for _ in ranks),
        allreduce_latency_s=latency_s,
        allreduce_bytes_per_s=bandwidth_bytes_per_s,
        overlaps=overlaps,
        machine=machine,
    )
