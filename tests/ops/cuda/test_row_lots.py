# SPDX-License-Identifier: Apache-2.0
"""Lots of rows: what they hold, and that they are of the structure that they are asked for."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from dgl_hybrid.ops.cuda.row_lots import RowLots, chosen
from dgl_hybrid.ops.sparse_graph import Adjacency

INDPTR = torch.tensor([0, 2, 2, 5, 6, 6])
INDICES = torch.tensor([4, 1, 0, 3, 2, 5])


def entries_of(lots: RowLots, rows: Adjacency, w: Tensor) -> list[list[tuple[int, int]]]:
    """Returns by row the sources, with what an operation would take for their weights."""
    found = []
    for lot in lots.of(rows, 2):
        of_lot = chosen(w, lot.entries) if rows.edge_ids is None else w
        assert of_lot is not None
        bounds = lot.adjacency.indptr.tolist()
        for begin, end in pairwise(bounds):
            ids = range(begin, end) if lot.adjacency.edge_ids is None else lot.adjacency.edge_ids[begin:end].tolist()
            found.append(list(zip(lot.adjacency.indices[begin:end].tolist(), of_lot[list(ids)].tolist(), strict=True)))
    return found


def expected_of(rows: Adjacency, w: Tensor) -> list[list[tuple[int, int]]]:
    ids = torch.arange(len(w)) if rows.edge_ids is None else rows.edge_ids
    pairs = list(zip(rows.indices.tolist(), w[ids].tolist(), strict=True))
    bounds = rows.indptr.tolist()
    return [pairs[begin:end] for begin, end in pairwise(bounds)]


def test_structures_that_share_where_rows_begin_have_lots_of_their_own() -> None:
    """The second got the first one's sources, and the third weights of other edges."""
    lots, w = RowLots(), torch.arange(6) * 10
    structures = (
        Adjacency(INDPTR, INDICES, None),
        Adjacency(INDPTR, INDICES.flip(0), None),
        Adjacency(INDPTR, INDICES, INDICES.flip(0).clone()),
    )
    for rows in (*structures, *structures):
        assert entries_of(lots, rows, w) == expected_of(rows, w)


def test_lots_are_kept_until_something_is_written() -> None:
    lots, indices = RowLots(), INDICES.clone()
    rows = Adjacency(INDPTR.clone(), indices, None)
    first = lots.of(rows, 2)
    assert lots.of(rows, 2) is first
    assert lots.of(rows, 3) is not first
    again = lots.of(rows, 2)
    indices += 0
    assert lots.of(rows, 2) is not again
