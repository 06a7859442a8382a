# SPDX-License-Identifier: Apache-2.0
"""In-edges of made-up graphs in which it is known who is near whom."""

from __future__ import annotations

import torch
from torch import Tensor

from dgl_hybrid.exchange.segments import indptr_of


def in_edges(num_rows: int, src: Tensor, dst: Tensor) -> tuple[Tensor, Tensor]:
    order = torch.argsort(dst, stable=True)
    return indptr_of(torch.bincount(dst, minlength=num_rows)), src[order]


def ring(num_rows: int, generator: torch.Generator, reach: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Every vertex reads its neighbours on a ring. Returns its in-edges and each vertex's place: ids are shuffled."""
    ids = torch.randperm(num_rows, generator=generator)
    place = torch.arange(num_rows).repeat(2 * reach)
    offset = torch.cat([torch.arange(-reach, 0), torch.arange(1, reach + 1)]).repeat_interleave(num_rows)
    on_ring = torch.argsort(ids)
    return *in_edges(num_rows, ids[(place + offset) % num_rows], ids[place]), on_ring
