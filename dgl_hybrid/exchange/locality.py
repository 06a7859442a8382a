# SPDX-License-Identifier: Apache-2.0
"""Orders the rows of a rank so that rows computed one after the other read the same sources: those are in cache then.

Each rank has an order of the vertices that it owns (`partition/local_order.py`), kept with its part or looked for once,
and tells others where their replicas stand in it: rank by rank, so replicas of a rank are by its clusters.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.ids import Ownership, fetch_rows
from dgl_hybrid.exchange.segments import indptr_of
from dgl_hybrid.partition import EdgeLists
from dgl_hybrid.partition.local_order import METIS_S, MIN_EDGES, LocalOrder, is_sought, look_for_order
from dgl_hybrid.partition.narrow_ids import narrow_dtype

_logger = logging.getLogger(__name__)

RowOrder = Literal["auto", "id", "locality"]
"""Within a level class: the order that shares more reads, ascending global id, or always that of `LocalPlaces`."""


class LocalPlaces:
    """Where every vertex comes if each rank puts those that it owns in a local order; found once.

    Args:
        lists: In-edges of the vertices owned here, in their order.
        num_edges: Of the whole graph.
        kept: An order of the vertices owned here that is known already.
    """

    def __init__(
        self,
        communicator: Communicator,
        ownership: Ownership,
        lists: EdgeLists,
        num_edges: int,
        kept: LocalOrder | None = None,
    ) -> None:
        self._communicator, self._ownership, self._lists = communicator, ownership, lists
        self._is_small = num_edges < MIN_EDGES
        self._kept = kept
        self._of_owned: Tensor | None = None
        self._shares_more = False

    @property
    def are_known(self) -> bool:
        """Whether they were looked for: alike on all ranks, if all make the same loaders."""
        return self._of_owned is not None

    def are_used(self, row_order: RowOrder) -> bool:
        """Whether rows may lie otherwise than by id: alike on all ranks."""
        return row_order == "locality" or (row_order == "auto" and not self._is_small)

    def is_local(self, row_order: RowOrder) -> bool:
        """Whether this rank's own rows are in the order that it found."""
        return self.are_used(row_order) and (row_order == "locality" or self._shares_more)

    def find(self, row_order: RowOrder) -> None:
        """Looks for an order of this rank's own vertices, if it may be used and is not known. Not collective."""
        if self._of_owned is not None or not self.are_used(row_order):
            return
        begin = time.perf_counter()
        places, order = self._ownership.owned(), self._kept
        if order is None and is_sought(len(places)):
            # Ranks wait for each other before and after: who finds no clusters in half of that time does without.
            order = look_for_order(*self._own_edges(), min(METIS_S, self._communicator.timeout_s / 2))
        if order is not None:
            places[order.rows] = places.clone()
            self._shares_more = order.shares_more
            _logger.info(
                "rows by %s: of sources read in a row %.0f %% are distinct by id, %.0f %% by locality (%s)",
                "locality" if self._shares_more else "id",
                100 * order.reads_by_id,
                100 * order.reads_by_locality,
                "kept with the part" if self._kept is not None else f"{time.perf_counter() - begin:.1f} s",
            )
        self._of_owned, self._kept = places, None

    def of(self, ids_global: Tensor, row_order: RowOrder) -> Tensor:
        """Returns the (n,) int64 places of these vertices; those of a rank follow those of the rank before. Collective.

        Args:
            ids_global: (n,) int64 in any order.
            row_order: For which `find` was called, on all ranks.
        """
        assert self._of_owned is not None
        of_owned = self._of_owned if self.is_local(row_order) else self._ownership.owned()
        return fetch_rows(self._communicator, self._ownership, of_owned, ids_global)

    def _own_edges(self) -> tuple[Tensor, Tensor]:
        """Returns the in-edges of owned vertices from owned ones: (N + 1,) int64 and (E,) narrow local sources."""
        ownership = self._ownership
        num_owned = ownership.stop - ownership.start
        counts, src_global, _ = self._lists.gather(torch.arange(num_owned))
        is_owned = ownership.is_owned(src_global)
        indptr = indptr_of(is_owned.to(torch.int64))[indptr_of(counts)]
        return indptr, (src_global[is_owned] - ownership.start).to(narrow_dtype(num_owned))


def check_row_order(row_order: str) -> RowOrder:
    """Returns a valid `RowOrder`.

    Raises:
        ValueError: For any other string.
    """
    if row_order not in get_args(RowOrder):
        raise ValueError(f"row_order must be one of {', '.join(get_args(RowOrder))} (got {row_order!r})")
    return row_order  # type: ignore[return-value]


def order_rows(class_sizes: Sequence[int], places: Tensor) -> Tensor:
    """Returns (C,) int64: which row comes at each position, classes apart and in their order, each by places.

    Args:
        class_sizes: Rows of each class; together C.
        places: (C,) of the rows, class by class.
    """
    level_class = torch.repeat_interleave(torch.arange(len(class_sizes)), torch.tensor(class_sizes))
    order = torch.argsort(places)
    return order[torch.argsort(level_class[order], stable=True)]
