# SPDX-License-Identifier: Apache-2.0
"""The in-edge lists this rank knows: its own, those its part holds for halo nodes, those it asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from dgl_hybrid.errors import PartitionError
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.ids import Ownership, fetch_lists
from dgl_hybrid.exchange.segments import difference, find_sorted, indptr_of, unique
from dgl_hybrid.partition import EdgeLists, RankPart, StoredLists
from dgl_hybrid.partition.split import expand_ranges


class InEdges:
    """Complete in-edge lists by global id, in ascending edge id inside each list.

    What the part does not hold (a plain DistDGL part has one halo hop) is fetched from the owners, once until it is
    forgotten, so any part serves any number of layers.
    """

    def __init__(self, part: RankPart, communicator: Communicator, ownership: Ownership) -> None:
        self._communicator = communicator
        self._ownership = ownership
        self._owned = part.lists
        self._halo, self._halo_lists = part.halo_global, part.halo_lists
        self._fetched, self._fetched_lists = part.halo_global[:0], StoredLists.empty()

    @property
    def num_fetched_edges(self) -> int:
        return self._fetched_lists.num_edges

    def forget_fetched(self) -> None:
        """Drops the lists that were asked for: many of three layers' are as long as the graph. Each rank on its own.

        Who needs them says so with `ensure` before, and they are fetched again.
        """
        self._fetched, self._fetched_lists = self._halo[:0], StoredLists.empty()

    def known_halo(self) -> Tensor:
        """Returns the halo nodes whose lists are known here, sorted."""
        return torch.cat([self._halo, self._fetched]).sort().values

    def ensure(self, ids_global: Tensor) -> None:
        """Makes the lists of these halo nodes known. Collective: every rank calls it, with ids or none."""
        foreign = ids_global[~self._ownership.is_owned(ids_global)]
        total = self._ownership.total
        missing = unique(difference(difference(foreign, self._halo, total), self._fetched, total), total)
        counts, src, eid = fetch_lists(self._communicator, self._ownership, self._owned, missing)
        if len(missing) == 0:
            return
        # Merge the two sorted tables: concatenate the lists, then order them by id.
        ids = torch.cat([self._fetched, missing])
        order = torch.argsort(ids)
        before = self._fetched_lists
        merged = StoredLists(
            indptr_of(torch.cat([before.counts, counts])),
            torch.cat([before.src_global, src]),
            torch.cat([before.eid_global, eid]),
        )
        counts, src, eid = merged.gather(order)
        self._fetched, self._fetched_lists = ids[order], StoredLists(indptr_of(counts), src, eid)

    def lookup(self, ids_global: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the lists of owned or ensured nodes, in the order given.

        Returns:
            `(counts, src_global, eid_global)`: (n,), (E,), (E,) int64.

        Raises:
            PartitionError: If a list is not known here.
        """
        mine = self._ownership.is_owned(ids_global)
        if bool(mine.all()):
            return self._owned.gather(ids_global - self._ownership.start)
        in_halo, halo_row = find_sorted(self._halo, ids_global, self._ownership.total)
        is_fetched, fetched_row = find_sorted(self._fetched, ids_global, self._ownership.total)
        known = mine | in_halo | is_fetched
        if not bool(known.all()):
            unknown = ids_global[~known]
            raise PartitionError(
                f"the in-edges of {len(unknown)} halo nodes (first: global id {int(unknown[0])}) are not known on rank "
                f"{self._ownership.rank} of {self._ownership.world_size}"
            )
        tables: list[tuple[Tensor, EdgeLists, Tensor]] = [
            (mine, self._owned, ids_global - self._ownership.start),
            (in_halo, self._halo_lists, halo_row),
            (is_fetched, self._fetched_lists, fetched_row),
        ]
        found = [lists.gather(row[chosen]) for chosen, lists, row in tables]
        counts = torch.empty(len(ids_global), dtype=torch.int64)
        for (chosen, _, _), (counts_found, _, _) in zip(tables, found, strict=True):
            counts[chosen] = counts_found
        offsets = indptr_of(counts)
        src, eid = (torch.empty(int(offsets[-1]), dtype=torch.int64) for _ in range(2))
        for (chosen, _, _), (_, src_found, eid_found) in zip(tables, found, strict=True):
            place = expand_ranges(offsets[:-1][chosen], offsets[1:][chosen])
            src[place], eid[place] = src_found, eid_found
        return counts, src, eid
