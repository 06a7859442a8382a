# SPDX-License-Identifier: Apache-2.0
"""How a plan is to be made."""

from __future__ import annotations

from dataclasses import dataclass

STRATEGIES = ("hybrid", "greedy", "neutronstar", "depcache", "depcomm", "ratio")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerConfig:
    """Options of `make_plan` and `propose_plans`."""

    strategy: str = "hybrid"
    """One of `STRATEGIES`."""
    cache_ratio: float = 0.5
    """`ratio` only: share of the read dependencies of each level to compute here, the cheapest first."""
    memory_budget_bytes: float | None = None
    """Bytes the halo rows of all levels may hold on this rank (received and computed); None: no limit."""
    max_cut_arcs: int = 20_000_000
    """Past this many arcs the hybrid plan comes from the greedy instead of the minimum cut."""
    prices: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0)
    """Factors on the cost of receiving that `propose_plans` sweeps."""
    max_sweep_edges: int = 20_000_000
    """Past this many in-edges between halo vertices only one hybrid plan is proposed, at the measured prices. The
    search for a plan within a memory budget goes over so many altogether, but makes ten plans in any case."""
    max_halo_edges: int = 50_000_000
    """In-edges of halo vertices that a rank's planning looks at, 130 to 160 bytes each while it lasts. Vertices past
    these are received above level 0. What owned vertices read comes before what that would read in turn, and vertices
    with few in-edges before those with many. Strategy depcomm looks at none."""

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"unknown strategy (got {self.strategy!r}); choose one of {', '.join(STRATEGIES)}")
        for name in ("cache_ratio", "memory_budget_bytes", "max_cut_arcs", "max_sweep_edges", "max_halo_edges"):
            value = getattr(self, name)
            is_number = not isinstance(value, str) and hasattr(value, "__float__")  # NumPy's and PyTorch's, too
            if not is_number and not (value is None and name == "memory_budget_bytes"):
                raise TypeError(f"{name} must be a number (got {value!r})")
        if not 0.0 <= self.cache_ratio <= 1.0:
            raise ValueError(f"cache_ratio must lie in 0..1 (got {self.cache_ratio})")
        budget = self.memory_budget_bytes
        if budget is not None and not (0 <= budget < float("inf")):
            raise ValueError(
                f"memory_budget_bytes must be finite and not negative, or None for no limit (got {budget})"
            )
        if self.max_cut_arcs < 0:
            raise ValueError(f"max_cut_arcs must not be negative (got {self.max_cut_arcs})")
        if self.max_sweep_edges < 0:
            raise ValueError(f"max_sweep_edges must not be negative (got {self.max_sweep_edges})")
        if self.max_halo_edges < 0:
            raise ValueError(f"max_halo_edges must not be negative (got {self.max_halo_edges})")
        if not self.prices or not all(0 <= price < float("inf") for price in self.prices):
            raise ValueError(f"prices must be at least one factor, finite and not negative (got {self.prices})")
