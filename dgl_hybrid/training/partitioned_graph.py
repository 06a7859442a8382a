# SPDX-License-Identifier: Apache-2.0
"""`PartitionedGraph`: the graph as one rank sees it, opened from a partition folder without any server.

It offers what full-graph scripts use of a `DistGraph`: `ndata[name][ids]`, `edata[name][ids]`, sizes, and this rank's
nodes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgl_hybrid.errors import PartitionError
from dgl_hybrid.exchange.communicator import Communicator, create_communicator
from dgl_hybrid.exchange.ids import Ownership, fetch_rows
from dgl_hybrid.exchange.in_edges import InEdges
from dgl_hybrid.partition import RankPart, load_partition, read_partition_summary
from dgl_hybrid.planner import Topology


@dataclass(frozen=True)
class _RowSet:
    reference: weakref.ref[Tensor]
    ids_global: Tensor


class GraphField:
    """One node or edge field: `field[ids]` reads rows by global id, `field.local` is this rank's part.

    Reading the rows of an id tensor that a loader yielded (`input_nodes`, `seeds`, `blocks[i].srcdata[dgl.NID]`,
    `blocks[i].edata[dgl.EID]`, …) is collective the first time, since some of them are owned elsewhere; the same
    tensor is returned from then on, until `set_local` or until somebody writes into it. Any other ids must be owned by
    this rank.
    """

    def __init__(self, name: str, local: Tensor, ownership: Ownership, row_sets: RowSets, kind: str) -> None:
        self.name = name
        self.local = local
        self._ownership = ownership
        self._row_sets = row_sets
        self._kind = kind
        self._read: dict[int, tuple[Tensor, int]] = {}  # by identity of the ids: rows, and their version

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole field, all ranks together."""
        return torch.Size((self._ownership.total, *self.local.shape[1:]))

    def __len__(self) -> int:
        return self._ownership.total

    def __getitem__(self, ids: Tensor) -> Tensor:
        known = self._row_sets.find(self._kind, ids)
        if known is not None:
            key = id(ids)
            if key not in self._read or _was_changed(*self._read[key]):
                # Kept for later reads, so an ordinary tensor even if an evaluation in inference mode comes first.
                with torch.inference_mode(False):
                    rows = fetch_rows(self._row_sets.communicator, self._ownership, self.local, known).to(ids.device)
                if key not in self._read:
                    weakref.finalize(ids, self._read.pop, key, None)
                self._read[key] = rows, rows._version
            return self._read[key][0]
        given: Any = ids
        ids_global = torch.empty(()) if given is None or isinstance(given, slice) else torch.as_tensor(given)
        if ids_global.dim() != 1 or ids_global.dtype == torch.bool or ids_global.is_floating_point():
            got = f"{ids_global.dtype}, shape {tuple(ids_global.shape)}" if ids_global.dim() else repr(ids)
            raise TypeError(f"{self._kind} field {self.name!r} is read by a vector of integer ids (got {got})")
        host_ids = ids_global.to("cpu", torch.int64)
        if not bool(self._ownership.is_owned(host_ids).all()):
            self._ownership.check_range(host_ids, f"{self._kind} ids")
            foreign = host_ids[~self._ownership.is_owned(host_ids)]
            raise ValueError(
                f"{self._kind} field {self.name!r}: {len(foreign)} of {len(host_ids)} ids are not owned by rank "
                f"{self._ownership.rank} of {self._ownership.world_size} (first: {int(foreign[0])}). Without servers "
                f"only owned rows and the id tensors that the loader yields can be read."
            )
        return self.local[host_ids - self._ownership.start].to(ids_global.device)

    def identify(self, rows: Tensor) -> bool:
        """Whether `rows` is a tensor that this field returned for a loader's id tensor."""
        return any(rows is known for known, _ in self._read.values())

    def set_local(self, rows: Tensor) -> None:
        """Replaces this rank's rows; every rank must do so, since rows read before are read again."""
        if len(rows) != len(self.local):
            raise ValueError(f"{self._kind} field {self.name!r} must have {len(self.local)} rows (got {len(rows)})")
        self.local = rows
        self._read.clear()


def _was_changed(rows: Tensor, version: int) -> bool:
    """Whether the script wrote into rows it had read, or made them a leaf: the next read gives the field's rows anew.

    Alike on every rank, as it follows from the program.
    """
    return rows._version != version or rows.requires_grad


class RowSets:
    """The id tensors that loaders yielded, by identity: reading their rows is a collective all ranks share."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self._sets: dict[tuple[str, int], _RowSet] = {}

    def register_nodes(self, ids: Tensor) -> None:
        """Makes the rows of these node ids readable, whoever owns them. Every rank registers its own."""
        self._register("node", ids)

    def register_edges(self, ids: Tensor) -> None:
        """Makes the rows of these edge ids readable, whoever owns them. Every rank registers its own."""
        self._register("edge", ids)

    def _register(self, kind: str, ids: Tensor) -> None:
        key = (kind, id(ids))
        self._sets[key] = _RowSet(weakref.ref(ids), ids.to("cpu", torch.int64))
        weakref.finalize(ids, self._sets.pop, key, None)

    def find(self, kind: str, ids: object) -> Tensor | None:
        known = self._sets.get((kind, id(ids)))
        return known.ids_global if known is not None and known.reference() is ids else None


class GraphFields(Mapping[str, GraphField]):
    """The node or edge fields by name; a name that does not exist raises KeyError listing those that do."""

    def __init__(self, data: dict[str, Tensor], ownership: Ownership, row_sets: RowSets, kind: str) -> None:
        self._ownership, self._row_sets, self._kind = ownership, row_sets, kind
        self._fields = {name: GraphField(name, rows, ownership, row_sets, kind) for name, rows in data.items()}

    def __getitem__(self, name: str) -> GraphField:
        if name not in self._fields:
            raise KeyError(f"no {self._kind} field {name!r}; there are {sorted(self._fields) or 'none'}")
        return self._fields[name]

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __setitem__(self, name: str, local_rows: Tensor) -> None:
        """Adds or replaces a field by this rank's rows. Every rank does the same."""
        if name in self._fields:
            self._fields[name].set_local(local_rows)
            return
        num_owned = self._ownership.stop - self._ownership.start
        if len(local_rows) != num_owned:
            raise ValueError(f"{self._kind} field {name!r} must have {num_owned} rows (got {len(local_rows)})")
        self._fields[name] = GraphField(name, local_rows, self._ownership, self._row_sets, self._kind)

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


class PartitionedGraph:
    """One rank's view of a partitioned homogeneous graph.

    Create it with `PartitionedGraph.open(part_config)` on every rank.

    Attributes:
        ndata, edata: Fields by name; see `GraphField`.
        partition: What the folder holds for this rank.
        nodes, edges: Ranges of global ids of every rank.
        in_edges: In-edge lists, fetched from owners where the folder lacks them.
        out_degrees: (N,) full-graph out-degrees of this rank's nodes.
    """

    def __init__(self, partition: RankPart, communicator: Communicator) -> None:
        self.partition = partition
        self.communicator = communicator
        self.nodes = Ownership(offsets=partition.node_offsets, rank=communicator.rank)
        self.edges = Ownership(offsets=partition.edge_offsets, rank=communicator.rank)
        self.row_sets = RowSets(communicator)
        self.ndata = GraphFields(dict(partition.node_data), self.nodes, self.row_sets, "node")
        self.edata = GraphFields(dict(partition.edge_data), self.edges, self.row_sets, "edge")
        self.in_edges = InEdges(partition, communicator, self.nodes)
        known = communicator.gather_ints([int(partition.out_degrees is not None)])
        if all(row[0] for row in known) and partition.out_degrees is not None:
            self.out_degrees = partition.out_degrees
        else:
            self.out_degrees = self.sum_over_out_edges()
        self.topology: Topology | None = None
        """Measured rates of these ranks, once they were probed."""
        self._weighted_out_degrees: dict[str, tuple[Tensor, Tensor]] = {}

    @staticmethod
    def open(
        part_config: str | Path, *, communicator: Communicator | None = None, verify: bool = True
    ) -> PartitionedGraph:
        """Opens this rank's part. Collective: a fault on one rank is raised on all.

        Args:
            part_config: The JSON file of a DistDGL partition folder.
            communicator: None makes one over the default process group.
            verify: Check checksums where the folder has them.

        Raises:
            PartitionError: Missing, damaged or unsuitable folder, or a number of ranks other than its parts.
        """
        chosen = create_communicator() if communicator is None else communicator
        with chosen.agreed():
            summary = read_partition_summary(part_config)
            if summary.num_parts != chosen.world_size:
                raise PartitionError(
                    f"{part_config} has {summary.num_parts} parts, but {chosen.world_size} ranks are running. Start "
                    f"{summary.num_parts} ranks, or partition the graph into {chosen.world_size} parts."
                )
            partition = load_partition(part_config, chosen.rank, verify=verify)
        return PartitionedGraph(partition, chosen)

    def rank(self) -> int:
        return self.communicator.rank

    def num_nodes(self) -> int:
        return self.nodes.total

    def num_edges(self) -> int:
        return self.edges.total

    number_of_nodes, number_of_edges = num_nodes, num_edges

    def owned_nodes(self, mask: str | None = None) -> Tensor:
        """Returns the global ids of this rank's nodes, or of those where the node field `mask` is true."""
        owned = self.nodes.owned()
        return owned if mask is None else owned[self.ndata[mask].local.bool()]

    def fetch_nodes(self, local_rows: Tensor, ids_global: Tensor) -> Tensor:
        """Fetches static per-node rows by global id from their owners. Collective."""
        return fetch_rows(self.communicator, self.nodes, local_rows, ids_global)

    def sum_over_out_edges(self, values: Tensor | None = None) -> Tensor:
        """Sums a value over the out-edges of every node; each rank contributes its own nodes' in-edges. Collective.

        Args:
            values: One for each in-edge of this rank's nodes, in the order of `partition.lists`; None counts edges.

        Returns:
            (N,) sums for this rank's nodes over all out-edges in the graph.
        """
        sources, partial = self.partition.lists.sum_by_source(values)
        counts = torch.bincount(self.nodes.owner_of(sources), minlength=self.nodes.world_size).tolist()
        arriving = self.communicator.exchange_counts(counts)
        ids = self.communicator.exchange(sources, counts, arriving)
        sums = self.communicator.exchange(partial, counts, arriving)
        total = torch.zeros(self.nodes.stop - self.nodes.start, dtype=partial.dtype)
        return total.index_add_(0, ids - self.nodes.start, sums)

    def weighted_out_degrees(self, edge_weight: Tensor, ids_global: Tensor) -> Tensor | None:
        """Returns full-graph sums of out-edge weights for some nodes, if `edge_weight` is rows of a known edge field.

        Collective where the field is known; which it is follows from the program, alike on every rank.
        """
        for name, field in self.edata.items():
            if field.identify(edge_weight):
                known = self._weighted_out_degrees.get(name)
                if known is None or known[0] is not field.local:
                    # Ranks of one machine share its edges, so those of own nodes need not be own edges.
                    local = fetch_rows(self.communicator, self.edges, field.local, self.partition.lists.all_eids())
                    known = (field.local, self.sum_over_out_edges(local.reshape(len(local))))
                    self._weighted_out_degrees[name] = known
                return self.fetch_nodes(known[1], ids_global)
        return None
