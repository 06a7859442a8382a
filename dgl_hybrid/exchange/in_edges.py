# SPDX-License-Identifier: Apache-2.0
"""The in-edge lists this rank knows: its own, those the partition folder holds for halo nodes, those it asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from dgl_hybrid.errors import PartitionError
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.ids import Ownership, fetch_segments
from dgl_hybrid.exchange.segments import difference, find_sorted, gather_segments, indptr_of
from dgl_hybrid.partition import LocalPartition


class InEdges:
    """Complete in-edge lists by global id, in original edge-id order inside each list.

    What the folder does not hold (a plain DistDGL folder has one halo hop) is fetched from the owners once, so any
    folder serves any number of layers.
    """

    def __init__(self, partition: LocalPartition, communicator: Communicator, ownership: Ownership) -> None:
        self._communicator = communicator
        self._ownership = ownership
        self._indptr, self._src, self._eid = partition.indptr, partition.src_global, partition.eid_global
        self._halo = partition.halo_global
        self._halo_indptr = partition.halo_indptr
        self._halo_src, self._halo_eid = partition.halo_src_global, partition.halo_eid_global

    def known_halo(self) -> Tensor:
        """Returns the halo nodes whose lists are known here, sorted."""
        return self._halo

    def ensure(self, ids_global: Tensor) -> None:
        """Makes the lists of these halo nodes known. Collective: every rank calls it, with ids or none."""
        foreign = ids_global[~self._ownership.is_owned(ids_global)]
        missing = torch.unique(difference(foreign, self._halo))
        counts, (src, eid) = fetch_segments(
            self._communicator, self._ownership, self._indptr, [self._src, self._eid], missing
        )
        if len(missing) == 0:
            return
        # Merge the two sorted tables: concatenate the lists, then order them by id.
        ids = torch.cat([self._halo, missing])
        order = torch.argsort(ids)
        all_counts = torch.cat([self._halo_indptr.diff(), counts])
        _, positions = gather_segments(indptr_of(all_counts), order)
        self._halo = ids[order]
        self._halo_indptr = indptr_of(all_counts[order])
        self._halo_src = torch.cat([self._halo_src, src])[positions]
        self._halo_eid = torch.cat([self._halo_eid, eid])[positions]

    def lookup(self, ids_global: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the lists of owned or ensured nodes, in the order given.

        Returns:
            `(counts, src_global, eid_global)`: (n,), (E,), (E,) int64.

        Raises:
            PartitionError: If a list is not known here.
        """
        mine = self._ownership.is_owned(ids_global)
        if bool(mine.all()):
            counts, positions = gather_segments(self._indptr, ids_global - self._ownership.start)
            return counts, self._src[positions], self._eid[positions]
        found, position = find_sorted(self._halo, ids_global)
        if not bool((mine | found).all()):
            unknown = ids_global[~(mine | found)]
            raise PartitionError(
                f"the in-edges of {len(unknown)} halo nodes (first: global id {int(unknown[0])}) are not known on rank "
                f"{self._ownership.rank} of {self._ownership.world_size}"
            )
        # One table of owned and halo rows, so that lists of both kinds come out in the order asked.
        counts_all = torch.cat([self._indptr.diff(), self._halo_indptr.diff()])
        row = torch.where(mine, ids_global - self._ownership.start, position + len(self._indptr) - 1)
        starts_all = torch.cat([self._indptr[:-1], self._halo_indptr[:-1] + len(self._src)])
        counts, starts = counts_all[row], starts_all[row]
        ends = torch.cumsum(counts, 0)
        total = int(ends[-1]) if len(ends) else 0
        positions = torch.arange(total) + torch.repeat_interleave(starts - (ends - counts), counts)
        in_halo = positions >= len(self._src)
        src, eid = torch.empty(total, dtype=torch.int64), torch.empty(total, dtype=torch.int64)
        src[~in_halo], eid[~in_halo] = self._src[positions[~in_halo]], self._eid[positions[~in_halo]]
        halo_positions = positions[in_halo] - len(self._src)
        src[in_halo], eid[in_halo] = self._halo_src[halo_positions], self._halo_eid[halo_positions]
        return counts, src, eid
