# SPDX-License-Identifier: Apache-2.0
"""What one rank has to decide: its halo vertices, their structure, and what its own vertices read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import PlanError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanProblem:
    """Planning problem of one rank. H halo vertices in ascending global id; levels 0..L-1 are what layers 1..L read.

    `halo_global` must hold every halo in-neighbour of an expandable vertex, so that positions in `in_halo` exist.
    """

    rank: int
    world_size: int
    num_layers: int
    halo_global: Tensor
    """(H,) int64 ascending global ids."""
    owner: Tensor
    """(H,) int64 owning rank, never `rank`."""
    in_degree: Tensor
    """(H,) int64 in the full graph."""
    expandable: Tensor
    """(H,) bool: the complete in-edge list is known here, so the vertex may be computed at levels >= 1."""
    in_indptr: Tensor
    """(H + 1,) int64."""
    in_halo: Tensor
    """(Eh,) int32 positions in `halo_global`: halo in-neighbours of each expandable vertex. Those this rank owns are
    free and left out; duplicates and the vertex itself do no harm."""
    demand: Tensor
    """(L, H) bool: vertices this rank owns read the vertex's row of that level, with everything communicated. Some of
    those are computed only because other ranks ask for them: where these compute instead, less is read, so what a plan
    that caches is priced at, and the bytes it is taken to hold, are upper ends (`RunRows` is what there is)."""
    reach: Tensor
    """(L, H) bool: this rank computes something that reads the row, or could: it would with everything cached, as far
    as in-edges are known here."""
    owned_rows: Tensor
    """(L + 1,) int64: rows of each level this rank owns and computes."""
    owned_edges: Tensor
    """(L,) int64: in-edges of the rows of level l + 1 it owns."""
    owned_reads: Tensor | None = None
    """(L, H) int32: how many of those begin at each halo vertex: they wait for its row if it is received. None: not
    known, and nothing is taken to run beside the exchange."""
    inputs_are_free: bool = False
    """Rows of level 1 that are computed here bring no rows of level 0 but their own: owners aggregate for them."""

    @property
    def num_halo(self) -> int:
        """H."""
        return int(self.halo_global.numel())

    def validate(self) -> None:
        """Checks shapes, dtypes, ranges and the closure of `reach`.

        Raises:
            PlanError: naming the field, what was expected and what came.
        """
        where = f"rank {self.rank} of {self.world_size}"

        def fail(message: str) -> None:
            raise PlanError(f"planning problem of {where}: {message}")

        if not 0 <= self.rank < self.world_size:
            fail(f"rank must lie in 0..{self.world_size - 1} (got {self.rank})")
        if self.num_layers < 1:
            fail(f"num_layers must be at least 1 (got {self.num_layers})")
        num_halo, num_layers = self.num_halo, self.num_layers
        if num_halo >= 2**31:
            fail(f"a rank can have fewer than 2**31 halo vertices (got {num_halo}); use more parts")
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "halo_global": ((num_halo,), torch.int64),
            "owner": ((num_halo,), torch.int64),
            "in_degree": ((num_halo,), torch.int64),
            "expandable": ((num_halo,), torch.bool),
            "in_indptr": ((num_halo + 1,), torch.int64),
            "in_halo": ((int(self.in_halo.numel()),), torch.int32),
            "demand": ((num_layers, num_halo), torch.bool),
            "reach": ((num_layers, num_halo), torch.bool),
            "owned_rows": ((num_layers + 1,), torch.int64),
            "owned_edges": ((num_layers,), torch.int64),
        }
        if self.owned_reads is not None:
            shapes["owned_reads"] = ((num_layers, num_halo), torch.int32)
        for name, (shape, dtype) in shapes.items():
            value: Tensor = getattr(self, name)
            if tuple(value.shape) != shape or value.dtype != dtype or value.device.type != "cpu":
                got = f"{tuple(value.shape)} {value.dtype} on {value.device}"
                fail(f"{name} must be {shape} {dtype} on cpu (got {got})")
        if num_halo and not bool((self.halo_global[1:] > self.halo_global[:-1]).all()):
            fail("halo_global must be strictly ascending")
        wrong_owner = (self.owner < 0) | (self.owner >= self.world_size) | (self.owner == self.rank)
        if bool(wrong_owner.any()):
            at = int(wrong_owner.nonzero()[0])
            fail(f"owner must be another rank (got {int(self.owner[at])} for vertex {int(self.halo_global[at])})")
        if bool((self.in_degree < 0).any()):
            fail("in_degree must not be negative")
        counts = self.in_indptr[1:] - self.in_indptr[:-1]
        if int(self.in_indptr[0]) != 0 or int(self.in_indptr[-1]) != self.in_halo.numel() or bool((counts < 0).any()):
            fail(f"in_indptr must ascend from 0 to {self.in_halo.numel()}")
        if bool(counts[~self.expandable].any()):
            fail("in_halo must list in-neighbours of expandable vertices only")
        if self.in_halo.numel() and not 0 <= int(self.in_halo.min()) <= int(self.in_halo.max()) < num_halo:
            fail(f"in_halo must hold positions in 0..{num_halo - 1}")
        if bool((self.demand & ~self.reach).any()):
            fail("demand must lie within reach: a row that is read is one that may be asked for")
        if self.owned_reads is not None and not torch.equal(self.owned_reads > 0, self.demand):
            fail("owned_reads must be positive where owned vertices read a row (demand), and 0 elsewhere")
        readers = torch.repeat_interleave(counts)
        for level in range(1, num_layers):
            row = self.reach[level]
            if bool((row & ~self.reach[level - 1]).any()) or bool(
                (row[readers] & ~self.reach[level - 1][self.in_halo]).any()
            ):
                fail(f"reach of level {level - 1} must hold what level {level} reads")
        if bool((self.owned_rows < 0).any()) or bool((self.owned_edges < 0).any()):
            fail("owned_rows and owned_edges must not be negative")
