# SPDX-License-Identifier: Apache-2.0
"""Ids of a plan's edges that do not depend on the partition: what dropout on edges (of attention, say) draws by."""

from __future__ import annotations

import torch
from torch import Tensor

from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.ids import Ownership, fetch_rows
from dgl_hybrid.partition.narrow_ids import NarrowIds


class EdgeKeys:
    """Fetched when a model first draws on edges: most never do, and over a slow link the ids of all edges that a plan
    caches take as long as everything else that a change of plans does.

    Args:
        edges: Who owns which edge.
        edge_ids: Of each layer its global ids, as `LevelSets.edge_ids`; layers may share them.
        own_keys: (owned edges,) int64 ids before the graph was partitioned; None, where some rank does not know them:
            then edges go by their global ids.
    """

    def __init__(
        self, communicator: Communicator, edges: Ownership, edge_ids: tuple[NarrowIds, ...], own_keys: Tensor | None
    ) -> None:
        self._communicator, self._edges, self._own_keys = communicator, edges, own_keys
        self._of_layers = edge_ids
        self.is_known = own_keys is None
        """Whether nothing is to be fetched any more; the same on all ranks."""

    def of_layer(self, layer: int) -> NarrowIds:
        """Returns the keys of a layer's edges, and maybe more after them; layers may share them.

        Args:
            layer: From 1 on. Its keys must be known.
        """
        assert self.is_known, "dropout on edges must ask for keys on all ranks before it draws by them"
        return self._of_layers[layer - 1]

    def ask(self, wanted: bool, *, agreed: bool) -> None:
        """Fetches the keys if they are wanted and not known yet. Collective, as long as they are not known.

        Args:
            wanted: Whether this rank is about to draw on edges.
            agreed: `wanted` is the same on all ranks. Else they find out whether one of them wants keys: rows that are
                edges on all ranks may be as many on one of them as a level has vertices.
        """
        if self.is_known:
            return
        if not agreed:
            wanted = any(row[0] for row in self._communicator.gather_ints([int(wanted)]))
        if wanted:
            self._fetch()

    def _fetch(self) -> None:
        assert self._own_keys is not None
        with torch.inference_mode(False), torch.no_grad():  # kept for later steps
            # Which layers share their edges is each rank's own affair: all are asked for at once.
            different = {id(ids): ids.peek() for ids in self._of_layers}
            fetched = fetch_rows(self._communicator, self._edges, self._own_keys, torch.cat(list(different.values())))
            parts = fetched.split([len(ids) for ids in different.values()])
            known = {name: NarrowIds(part) for name, part in zip(different, parts, strict=True)}
        self._of_layers = tuple(known[id(ids)] for ids in self._of_layers)
        self.is_known = True
