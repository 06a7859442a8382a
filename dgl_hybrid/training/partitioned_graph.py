# SPDX-License-Identifier: Apache-2.0
"""`PartitionedGraph`: the graph as one rank sees it, from a partition folder without servers or a running `DistGraph`.

It offers what full-graph scripts use of a `DistGraph`: `ndata[name][ids]`, `edata[name][ids]`, sizes, and this rank's
nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from dgl import DGLError
from dgl.distributed import DistGraph
from torch import Tensor

from dgl_hybrid.errors import PartitionError
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.connect import create_communicator, default_timeout_s
from dgl_hybrid.exchange.ids import Ownership, fetch_rows
from dgl_hybrid.exchange.in_edges import InEdges
from dgl_hybrid.exchange.locality import LocalPlaces
from dgl_hybrid.partition import LocalPartition, RankPart, load_partition, read_partition_summary
from dgl_hybrid.partition.location import find_part_config
from dgl_hybrid.partition.manifest import partition_digest
from dgl_hybrid.planner import Topology
from dgl_hybrid.training.dist_graph import DistFields, TransportName, connect_trainers, share_partition
from dgl_hybrid.training.fields import GraphFields, RowSets, StoredFields, find_stored_writes, spread_stored_writes
from dgl_hybrid.training.stable_reads import StableReads
from dgl_hybrid.training.step import Step


class LoaderOfGraph(Protocol):
    """What a graph, and loaders of the same graph, ask of a loader."""

    has_memory_budget: bool
    """Whether the process is to hold no more than it must."""

    @property
    def is_in_trials(self) -> bool:
        """Whether plans take turns, and more of them are to be built."""


class PartitionedGraph:
    """One rank's view of a partitioned homogeneous graph.

    Create it with `PartitionedGraph.open(part_config)` or `PartitionedGraph.from_dist_graph(g)` on every rank.

    Attributes:
        ndata, edata: Fields by name; see `GraphField`.
        partition: This rank's share: structure, and what its folder or servers know of it.
        nodes, edges: Ranges of global ids of every rank.
        in_edges: In-edge lists, fetched from owners where the folder lacks them.
        places: Where vertices come in an order of each rank's own, by locality.
        out_degrees: (N,) full-graph out-degrees of this rank's nodes.
    """

    def __init__(
        self,
        partition: RankPart,
        communicator: Communicator,
        *,
        node_data: Mapping[str, Tensor] | None = None,
        edge_data: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.partition = partition
        self.communicator = communicator
        self.nodes = Ownership(offsets=partition.node_offsets, rank=communicator.rank)
        self.edges = Ownership(offsets=partition.edge_offsets, rank=communicator.rank)
        self.row_sets = RowSets(communicator)
        self._stored = {
            "node": StoredFields(node_data or {}, self.nodes, self.row_sets, "node"),
            "edge": StoredFields(edge_data or {}, self.edges, self.row_sets, "edge"),
        }
        self.ndata: GraphFields = self._stored["node"]
        self.edata: GraphFields = self._stored["edge"]
        self.in_edges = InEdges(partition, communicator, self.nodes)
        self.places = LocalPlaces(communicator, self.nodes, partition.lists, self.edges.total, partition.local_order)
        known = communicator.gather_ints([int(partition.out_degrees is not None)])
        if all(row[0] for row in known) and partition.out_degrees is not None:
            self.out_degrees = partition.out_degrees
        else:
            self.out_degrees = self.sum_over_out_edges()
        self.topology: Topology | None = None
        """Measured rates of these ranks, once they were probed."""
        self.num_loaders = 0
        """Made over this graph so far: the same on all ranks."""
        self.loaders: WeakSet[LoaderOfGraph] = WeakSet()
        """Those of them that there still are."""
        self.is_told_of_moves = False
        """Whether the script was told what moving blocks costs: once, and not by every loader."""
        self._reads: StableReads | None = None
        self._weighted_out_degrees: dict[str, tuple[tuple[str, int], Tensor]] = {}

    @property
    def is_memory_scarce(self) -> bool:
        """Whether there is a loader with a memory budget, for which the process is to hold no more than it must."""
        return any(loader.has_memory_budget for loader in self.loaders)

    def __deepcopy__(self, memo: dict[int, Any]) -> PartitionedGraph:
        """A copy of a model that holds its graph holds this one: ranks see one graph, not one for each copy."""
        return self

    @staticmethod
    def open(
        part_config: str | Path,
        *,
        communicator: Communicator | None = None,
        verify: bool = True,
        timeout_s: float | None = None,
    ) -> PartitionedGraph:
        """Opens this rank's part. Collective: a fault on one rank is raised on all.

        Args:
            part_config: A DistDGL partition folder, or the JSON file in it.
            communicator: None makes one over the default process group.
            verify: Check checksums where the folder has them.
            timeout_s: How long ranks wait for each other, in planning too; None: what `init_process_group(timeout=)`
                was given, or ten minutes (see `create_communicator`). The same on all ranks.

        Raises:
            PartitionError: Missing, damaged or unsuitable folder, parts with different fields, or a number of ranks
                other than its parts.
            ValueError: A timeout for a communicator that has its own.
        """
        chosen = communicator
        if chosen is None:
            chosen = create_communicator(timeout_s=timeout_s)
        with chosen.agreed():
            if communicator is not None and timeout_s is not None:
                raise ValueError(f"timeout_s is for a new communicator (got {timeout_s} with one that has its own)")
            part_config = find_part_config(part_config)
            summary = read_partition_summary(part_config)
            if summary.num_parts != chosen.world_size:
                is_alone = communicator is None and not dist.is_initialized()
                raise PartitionError(
                    f"{part_config} has {summary.num_parts} parts, but {chosen.world_size} ranks are running. Start "
                    f"{summary.num_parts} ranks, or partition the graph into {chosen.world_size} parts."
                    + " (torch.distributed is not initialised in this process: under torchrun, call "
                    "init_process_group before PartitionedGraph.open.)" * is_alone
                )
            partition = load_partition(part_config, chosen.rank, verify=verify)
            digest = partition_digest(Path(part_config))
        of_ranks = chosen.gather_json([digest, _fields_of(partition)])
        if (other := next((r for r in range(len(of_ranks)) if of_ranks[r][0] != of_ranks[0][0]), None)) is not None:
            raise PartitionError(
                f"rank {other} of {chosen.world_size} has opened another partition than rank 0 has ({part_config} on "
                f"rank {chosen.rank}): names, sizes or checksums differ. Copy one partition folder to all hosts again."
            )
        # Nothing in a plain DistDGL folder says what its parts hold, each of which may have been written by itself.
        _check_same_fields(part_config, [fields for _, fields in of_ranks])
        return PartitionedGraph(partition, chosen, node_data=partition.node_data, edge_data=partition.edge_data)

    @staticmethod
    def from_dist_graph(
        g: DistGraph, *, transport: TransportName = "auto", timeout_s: float | None = None
    ) -> PartitionedGraph:
        """Sees a running `DistGraph` as this trainer's rank. Collective over all trainers; made once for each graph.

        Structure and fields stay where DistDGL's servers put them, in the machine's shared memory. Trainers of one
        machine share its partition.

        Args:
            g: Of a homogeneous graph, on a machine whose server keeps it by destination (format csc, the default).
            transport: "collective" exchanges rows over `torch.distributed`, "shared_memory" through the memory of the
                host that all trainers run on; "auto" (the default) chooses between these two for every pair
                (`create_communicator`).
                "kvstore" goes over DistDGL's servers, slowly, where no backend of torch.distributed spans the hosts.
            timeout_s: How long ranks wait for each other, in planning too; None: what this graph was seen with before,
                else what `init_process_group(timeout=)` was given, or ten minutes (see `create_communicator`). The same
                on all ranks.

        Raises:
            ValueError: Another timeout than it was seen with before.
            ExchangeError: On all ranks, if they are not numbered machine by machine, one for each trainer.
            PartitionError: On all ranks, if the structure of any machine cannot be read so.
        """
        views: dict[str, tuple[PartitionedGraph, float]] = g.__dict__.setdefault("_dgl_hybrid_views", {})
        if transport not in views:
            chosen_s = default_timeout_s() if timeout_s is None else timeout_s
            communicator = connect_trainers(g, transport, timeout_s=chosen_s)
            part = share_partition(g, communicator)
            view = PartitionedGraph(part, communicator)
            reads = StableReads(g._client, communicator, view.row_sets, view.nodes, view.edges)
            # What DGL's views look at, not these: they hold the graph, which would not end with its last reference.
            view.ndata = DistFields(g.ndata._data, view.nodes, part.first_node_of_machine, reads)
            view.edata = DistFields(g.edata._data, view.edges, part.first_edge_of_machine, reads)
            view._reads = reads
            views[transport] = view, chosen_s
        view, made_with_s = views[transport]
        if timeout_s not in (None, made_with_s):
            raise ValueError(
                f"this graph's ranks wait {made_with_s:g} s for each other (got timeout_s={timeout_s:g}): give "
                f"timeout_s where it is first used, or before that to PartitionedGraph.from_dist_graph(g, timeout_s=…)"
            )
        return view

    def rank(self) -> int:
        return self.communicator.rank

    def num_nodes(self) -> int:
        return self.nodes.total

    def num_edges(self) -> int:
        return self.edges.total

    number_of_nodes, number_of_edges = num_nodes, num_edges

    def owned_nodes(self, mask: str | None = None) -> Tensor:
        """Returns the global ids of this rank's nodes, or of those where the node field `mask` is true.

        Raises:
            ValueError: The field has several numbers for a node.
        """
        owned = self.nodes.owned()
        if mask is None:
            return owned
        rows = self.ndata[mask].local
        if rows.dim() != 1:
            raise ValueError(f"a mask has one entry for each node (field {mask!r} has {tuple(rows.shape[1:])})")
        return owned[rows.bool()]

    def fetch_nodes(self, local_rows: Tensor, ids_global: Tensor) -> Tensor:
        """Fetches static per-node rows by global id from their owners. Collective."""
        return fetch_rows(self.communicator, self.nodes, local_rows, ids_global)

    def find_writes(self) -> dict[str, int]:
        """Returns into which fields, or what it had read of them, this process wrote since it was last asked.

        If any rank wrote into some, `spread_writes` follows on all.
        """
        if self._reads is not None:
            return dict.fromkeys(self._reads.find_writes(), 1)
        return find_stored_writes(self._stored)

    def spread_writes(self, found: Mapping[str, int]) -> None:
        """Makes rows be read again on all ranks where `find_writes` found something on any. Collective."""
        if self._reads is not None:
            self._reads.spread_writes(set(found))
        else:
            spread_stored_writes(self.communicator, self._stored, found)

    def forget_reads(self, ids: Iterable[Tensor]) -> None:
        """Drops the rows that were read by these id tensors of a loader; every rank does so at the same point."""
        for one in ids:
            if self._reads is not None:
                self._reads.forget(one)
            else:
                for fields in self._stored.values():
                    for _, field in fields.stored():
                        field.forget(one)

    def hands_out(self, rows: Tensor) -> bool:
        """Whether `rows` is what a read with a loader's id tensor returns until somebody writes into the field."""
        return any(field.identify(rows) for fields in (self.ndata, self.edata) for field in fields.values())

    def hands_out_still(self, rows: Tensor) -> bool:
        """Whether the next such read returns `rows`, too; alike on every rank after `spread_writes`."""
        return any(field.is_current(rows) for fields in (self.ndata, self.edata) for field in fields.values())

    def follow(self, step: Step) -> None:
        """Takes note of an epoch of a loader that begins."""
        if self._reads is not None:
            self._reads.follow(step)

    def note_forward(self) -> None:
        """Prepares the backward of rows that an embedding of the servers handed out in the forward just run."""
        if self._reads is not None:
            self._reads.note_forward()

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
        """Returns full-graph sums of out-edge weights for some nodes, if `edge_weight` is rows of a known edge field,
        as they were read.

        Collective where the field is known; which it is follows from the program, alike on every rank.

        Raises:
            DGLError: On all ranks (on those that own none of them as a HybridError), if any weight of the field is not
                positive.
        """
        for name, field in self.edata.items():
            if field.has_as_it_is(edge_weight):
                known, state = self._weighted_out_degrees.get(name), (field.key, field.version)
                if known is None or known[0] != state:
                    with self.communicator.agreed():
                        if bool((field.local <= 0).any()):
                            raise DGLError(
                                "edge weights must be positive with norm='both': their sums are taken to the power -1/2"
                            )
                    # Ranks of one machine share its edges, so those of own nodes need not be own edges.
                    local = fetch_rows(self.communicator, self.edges, field.local, self.partition.lists.all_eids())
                    known = (state, self.sum_over_out_edges(local.reshape(len(local))))
                    self._weighted_out_degrees[name] = known
                return self.fetch_nodes(known[1], ids_global)
        return None


def _fields_of(partition: LocalPartition) -> dict[str, str]:
    """Returns what the rows of each field are, in words, for ranks to compare."""
    return {
        f"{kind} field {name!r}": f"{rows.dtype} rows of shape {tuple(rows.shape[1:])}"
        for kind, data in (("node", partition.node_data), ("edge", partition.edge_data))
        for name, rows in data.items()
    }


def _check_same_fields(part_config: str | Path, of_ranks: Sequence[Mapping[str, str]]) -> None:
    """Checks that what ranks would exchange as one field is of one kind. Not collective; alike on all ranks.

    Raises:
        PartitionError: A part lacks a field, or has other rows in it.
    """
    first = of_ranks[0]
    for rank, fields in enumerate(of_ranks):
        for name in (*first, *fields):
            if fields.get(name) != first.get(name):
                raise PartitionError(
                    f"all parts of {part_config} must have the same fields: the {name} is {first.get(name, 'missing')} "
                    f"in the part of rank 0, and {fields.get(name, 'missing')} in that of rank {rank} of "
                    f"{len(of_ranks)}. Write the partition anew, or the field of that part as the others have it."
                )


def as_partitioned(
    g: PartitionedGraph | DistGraph, transport: TransportName | None, *, timeout_s: float | None = None
) -> PartitionedGraph:
    """Returns `g` itself, or a `DistGraph` as this rank sees it. Collective.

    Raises:
        TypeError, ValueError: Neither, or a transport or timeout for a graph that has its own.
    """
    if isinstance(g, DistGraph):
        return PartitionedGraph.from_dist_graph(g, transport=transport or "auto", timeout_s=timeout_s)
    if not isinstance(g, PartitionedGraph):
        raise TypeError(
            f"full-graph training takes a dgl.distributed.DistGraph or a dgl_hybrid.PartitionedGraph (got "
            f"{type(g).__name__}); open a partition folder without servers with PartitionedGraph.open(part_config)"
        )
    if transport is not None:
        raise ValueError(f"transport is for a DistGraph (got {transport!r} with a PartitionedGraph, which has its own)")
    if timeout_s is not None:
        raise ValueError(
            f"timeout_s is for a DistGraph (got {timeout_s} with a PartitionedGraph, which has its own): give it to "
            f"PartitionedGraph.open(part_config, timeout_s=…)"
        )
    return g
