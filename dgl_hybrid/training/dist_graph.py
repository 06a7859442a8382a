# SPDX-License-Identifier: Apache-2.0
"""A running `DistGraph` as one rank of full-graph training sees it: its machine's shared memory, nothing copied.

Ranks are those of `torch.distributed`, numbered machine by machine. Trainers of one machine share its partition: each
owns a contiguous range of its nodes and one of its edges.

    partition 0, shared memory    nodes  [ rank 0 | rank 1 ] halo        edges  [ rank 0 | rank 1 ] halo
    partition 1, shared memory    nodes  [ rank 2 | rank 3 ] halo        edges  [ rank 2 | rank 3 ] halo
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import dgl
import torch
import torch.distributed as dist
from dgl.distributed import DistGraph, DistTensor, role
from torch import Tensor

from dgl_hybrid.errors import ExchangeError, PartitionError
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.connect import check_timeout, create_communicator
from dgl_hybrid.exchange.ids import Ownership, fetch_rows
from dgl_hybrid.exchange.kvstore_transport import KVStoreTransport
from dgl_hybrid.partition import SharedLists, SharedPart, SharedStructure, read_partition_summary
from dgl_hybrid.partition.local_order import LocalOrder
from dgl_hybrid.partition.manifest import MANIFEST_NAME, SIDECAR_NAME, partition_digest
from dgl_hybrid.partition.sidecar import Sidecar, read_sidecar
from dgl_hybrid.partition.summary import PartitionSummary
from dgl_hybrid.partition.verify import verify_sidecar
from dgl_hybrid.sampling.written import is_served
from dgl_hybrid.training.fields import GraphField, GraphFields
from dgl_hybrid.training.stable_reads import StableReads

_logger = logging.getLogger(__name__)

TransportName = Literal["auto", "collective", "shared_memory", "kvstore"]


def connect_trainers(g: DistGraph, transport: TransportName, *, timeout_s: float) -> Communicator:
    """Returns a communicator over all trainers of a job; `timeout_s` as of `create_communicator`. Collective.

    Raises:
        ExchangeError: `torch.distributed` is not initialised, or has not one rank for each trainer; or, over the
            KVStore, the servers run without the plugin.
        ValueError: No such transport, or no such time.
    """
    if transport not in get_args(TransportName):
        raise ValueError(
            f"transport must be one of {', '.join(map(repr, get_args(TransportName)))} (got {transport!r})"
        )
    check_timeout(timeout_s)
    num_trainers = role.get_num_trainers()
    where = f"trainer {role.get_trainer_rank()} of {num_trainers}"
    is_initialized = dist.is_available() and dist.is_initialized()
    if num_trainers == 1 and not is_initialized:
        return Communicator(None)
    if transport == "kvstore":
        if not is_served(g._client):
            raise ExchangeError(
                f"transport='kvstore' needs servers that pass rows on, but those that {where} is connected to run "
                f"without dgl_hybrid. Call dgl_hybrid.enable() before dgl.distributed.initialize(...), or start the "
                f"script with `dgl-hybrid launch` or `dgl-hybrid run`."
            )
        return Communicator(KVStoreTransport(timeout_s=timeout_s), timeout_s=timeout_s)
    if not is_initialized:
        raise ExchangeError(
            f"full-graph training on a DistGraph exchanges rows over torch.distributed, which is not initialised on "
            f"{where}. Call torch.distributed.init_process_group('gloo') after dgl.distributed.initialize(...), or "
            f"give transport='kvstore'."
        )
    if dist.get_world_size() != num_trainers:
        raise ExchangeError(
            f"torch.distributed must have one rank for each of DistDGL's {num_trainers} trainers (got "
            f"{dist.get_world_size()} ranks on {where})"
        )
    return create_communicator(timeout_s=timeout_s, transport=transport)


def share_partition(g: DistGraph, communicator: Communicator) -> SharedPart:
    """Describes this rank's share of its machine's partition. Collective.

    Raises:
        PartitionError: On all ranks, if any cannot read its machine's partition.
        ExchangeError: On all ranks, if they are not numbered machine by machine.
    """
    with communicator.agreed():
        structure = _read_structure(g)
        book = g.get_partition_book()
        part = int(book.partid)
        node_bounds, edge_bounds = _bounds(book, "num_nodes"), _bounds(book, "num_edges")
        _check_inner(structure, node_bounds[part], node_bounds[part + 1])
    of_ranks = communicator.gather_json([node_bounds, edge_bounds, _digest_of_folder(g)])
    first_digest = next((digest for *_, digest in of_ranks if digest is not None), None)
    for other, (*sizes, digest) in enumerate(of_ranks):
        has_other_sizes = sizes != of_ranks[0][:2]
        if has_other_sizes or digest not in (None, first_digest):
            what = "parts have other sizes" if has_other_sizes else "files have other checksums"
            raise PartitionError(
                f"the machine of rank {other} has another partition of {g.graph_name!r} than others: its {what}. Copy "
                f"one partition folder to all machines again."
            )
    first, last = node_bounds[part], node_bounds[part + 1]
    siblings = _ranks_of_machines(communicator, part, len(node_bounds) - 1)
    position, num_siblings = communicator.rank - siblings.start, len(siblings)

    # Shares of a machine's trainers hold about as many rows and in-edges each.
    work = structure.indptr[: last - first + 1].to(torch.int64) + torch.arange(last - first + 1)
    start = first + int(torch.searchsorted(work, int(work[-1] - work[0]) * position // num_siblings))
    edge_start = edge_bounds[part] + (edge_bounds[part + 1] - edge_bounds[part]) * position // num_siblings
    starts = torch.tensor(communicator.gather_ints([start, edge_start]))
    node_offsets = torch.cat([starts[:, 0], torch.tensor([node_bounds[-1]])])
    edge_offsets = torch.cat([starts[:, 1], torch.tensor([edge_bounds[-1]])])

    nodes = Ownership(offsets=node_offsets, rank=communicator.rank)
    edges = Ownership(offsets=edge_offsets, rank=communicator.rank)
    lists = SharedLists(structure, (nodes.start - first, nodes.stop - first))
    halo_global, halo_local = _complete_elsewhere(structure, communicator, nodes, lists, first, last)
    sidecar = _find_sidecar(g, structure, communicator, siblings.start, node_bounds, edge_bounds)
    own_nodes = slice(nodes.start - first, nodes.stop - first)
    own_edges = slice(edges.start - edge_bounds[part], edges.stop - edge_bounds[part])
    return SharedPart(
        node_offsets=node_offsets,
        edge_offsets=edge_offsets,
        lists=lists,
        halo_global=halo_global,
        halo_lists=SharedLists(structure, halo_local),
        first_node_of_machine=first,
        first_edge_of_machine=edge_bounds[part],
        out_degrees=None if sidecar is None else sidecar.out_degrees[own_nodes].clone(),
        orig_node_ids=None if sidecar is None else sidecar.orig_node_ids[own_nodes].clone(),
        orig_edge_ids=None if sidecar is None else sidecar.orig_edge_ids[own_edges].clone(),
        local_order=_order_of_own(sidecar, own_nodes),
    )


def _order_of_own(sidecar: Sidecar | None, own_nodes: slice) -> LocalOrder | None:
    """Returns the order that the part's vertices have among those of this rank, a range of the part."""
    order = None if sidecar is None else sidecar.local_order
    if order is None:
        return None
    is_own = (order.rows >= own_nodes.start) & (order.rows < own_nodes.stop)
    return replace(order, rows=order.rows[is_own] - own_nodes.start)


def _digest_of_folder(g: DistGraph) -> str | None:
    """Returns the digest of the partition folder that servers of this machine have read, if that tells and is seen."""
    part_config = Path(os.environ.get("DGL_CONF_PATH", ""))
    try:
        if not part_config.is_file() or not (part_config.parent / MANIFEST_NAME).is_file():
            return None
        return partition_digest(part_config) if read_partition_summary(part_config).graph_name == g.graph_name else None
    except (OSError, PartitionError):
        return None


def _read_structure(g: DistGraph) -> SharedStructure:
    if len(g.ntypes) > 1 or len(g.etypes) > 1:
        raise PartitionError(
            f"graph {g.graph_name!r} is a heterograph (node types {g.ntypes}, edge types {g.etypes}); full-graph "
            f"training reads homogeneous graphs only in this release. Convert it with dgl.to_homogeneous before "
            f"partitioning, or train it by sampling."
        )
    if g.local_partition is None:
        raise PartitionError(
            f"graph {g.graph_name!r} has no part in this machine's shared memory: trainers must run beside the servers"
        )
    if not isinstance(g.local_partition, dgl.DGLGraph):
        raise PartitionError(
            f"graph {g.graph_name!r} is served by GraphBolt, whose structure full-graph training does not read. Call "
            f"dgl.distributed.initialize(..., use_graphbolt=False)."
        )
    return SharedStructure.of_graph(g.local_partition)


def _bounds(book: Any, count: str) -> list[int]:
    """Ends of every partition's range of global ids, with a leading 0."""
    bounds = [0]
    for metadata in book.metadata():
        bounds.append(bounds[-1] + int(metadata[count]))
    return bounds


def _check_inner(structure: SharedStructure, first: int, last: int) -> None:
    inner = structure.node_global[: last - first]
    if len(inner) != last - first or (len(inner) and not torch.equal(inner, torch.arange(first, last))):
        raise PartitionError(
            f"a part in shared memory must begin with its inner nodes {first}..{last - 1} in ascending order, which "
            f"this one does not. Partition the graph anew."
        )


def _ranks_of_machines(communicator: Communicator, part: int, num_parts: int) -> range:
    """Returns the ranks that share this rank's partition; all ranks raise if they are in the wrong order."""
    part_of_rank = [row[0] for row in communicator.gather_ints([part])]
    if part_of_rank != sorted(part_of_rank):
        raise ExchangeError(
            f"ranks of torch.distributed must be numbered machine by machine, those of partition 0 first (got the "
            f"partitions {part_of_rank} by rank). Start the trainers of machine m as ranks m*T..m*T+T-1."
        )
    idle = sorted(set(range(num_parts)) - set(part_of_rank))
    if idle:
        raise ExchangeError(
            f"every machine must run a trainer, since full-graph training computes each partition where it lies (got "
            f"none for partitions {idle})"
        )
    return range(part_of_rank.index(part), part_of_rank.index(part) + part_of_rank.count(part))


def _complete_elsewhere(
    structure: SharedStructure, communicator: Communicator, nodes: Ownership, lists: SharedLists, first: int, last: int
) -> tuple[Tensor, Tensor]:
    """Finds vertices of other ranks whose in-edge lists are here: those of this machine, and complete halo vertices.

    Returns:
        Their global ids, ascending, and their local ones.
    """
    num_inner = last - first
    degrees = structure.indptr[num_inner:].diff().to(torch.int64)
    held = torch.nonzero(degrees).flatten() + num_inner
    full = fetch_rows(communicator, nodes, lists.counts, structure.node_global[held])
    complete = held[degrees[held - num_inner] == full]
    inner = torch.arange(num_inner)
    shared = inner[(inner < nodes.start - first) | (inner >= nodes.stop - first)]
    local = torch.cat([shared, complete])
    ids_global, order = torch.sort(structure.node_global[local])
    return ids_global, local[order]


def _find_sidecar(
    g: DistGraph,
    structure: SharedStructure,
    communicator: Communicator,
    first_of_machine: int,
    node_bounds: list[int],
    edge_bounds: list[int],
) -> Sidecar | None:
    """Reads what the partition's folder knows beyond DistDGL's files, if this process can see it and it has that.
    Collective: the first rank of each machine compares the files with their checksums for all of it.
    """
    part = int(g.get_partition_book().partid)
    summary, fault = None, ""
    try:
        summary = _summary_of_folder(g, node_bounds, edge_bounds)
        if summary is not None and communicator.rank == first_of_machine:
            # DGL's partition_graph leaves the sidecar of what it writes over, and that may differ in out-degrees alone.
            verify_sidecar(summary, part)
    except (OSError, PartitionError) as error:
        fault = str(error)
    faults = communicator.gather_json(fault)
    fault = fault or faults[first_of_machine]
    num_inner = node_bounds[part + 1] - node_bounds[part]
    if summary is not None and not fault:
        try:
            sidecar = read_sidecar(
                summary.folder / f"part{part}" / SIDECAR_NAME,
                part_id=part,
                num_inner_nodes=num_inner,
                num_inner_edges=edge_bounds[part + 1] - edge_bounds[part],
            )
            served = structure.indptr[: num_inner + 1].diff().to(torch.int64)
            return sidecar if torch.equal(served, sidecar.in_degrees) else None
        except (OSError, PartitionError) as error:
            fault = str(error)
    if fault:
        _logger.warning("original ids and out-degrees are not read from the partition folder: %s", fault)
    return None


def _summary_of_folder(g: DistGraph, node_bounds: list[int], edge_bounds: list[int]) -> PartitionSummary | None:
    """Returns what the JSON says of the partition that servers hold, if this process can see it and it is of ours."""
    part_config = os.environ.get("DGL_CONF_PATH")
    if not part_config or not os.path.isfile(part_config):
        return None
    summary = read_partition_summary(part_config)
    if summary.manifest_graph_name is None or summary.graph_name != g.graph_name:
        return None
    has_these_parts = list(summary.node_offsets) == node_bounds and list(summary.edge_offsets) == edge_bounds
    return summary if has_these_parts else None


class DistField(GraphField):
    """A field that servers hold.

    Any ids may be read, by any rank alone, as from the `DistTensor`; reads with the id tensors of a loader cost
    messages only once.
    """

    def __init__(self, tensor: DistTensor, ownership: Ownership, first_of_machine: int, reads: StableReads) -> None:
        self.name = tensor.name
        self.ownership = ownership
        self._tensor = tensor
        self._first_of_machine = first_of_machine
        self._reads = reads

    @property
    def local(self) -> Tensor:
        rows: Tensor = self._tensor.local_partition
        return rows[self.ownership.start - self._first_of_machine : self.ownership.stop - self._first_of_machine]

    @property
    def key(self) -> str:
        key: str = self._tensor.kvstore_key
        return key

    @property
    def version(self) -> int:
        return self._reads.num_writes(self.key)

    def __getitem__(self, ids: Tensor) -> Tensor:
        rows: Tensor = self._tensor[ids]
        return rows

    def identify(self, rows: Tensor) -> bool:
        return self._reads.identify(self.key, rows)

    def has_as_it_is(self, rows: Tensor) -> bool:
        return self._reads.has_as_it_is(self.key, rows)

    def is_current(self, rows: Tensor) -> bool:
        return self._reads.identify(self.key, rows, is_current=True)


class DistFields(GraphFields):
    """The node or edge fields of a `DistGraph`, as they are at each look.

    Args:
        data: What `g.ndata` or `g.edata` looks at.
        ownership: Of the nodes or edges.
        first_of_machine: The first global id of this machine's partition.
        reads: Of the graph's client.
    """

    def __init__(
        self, data: MutableMapping[str, Any], ownership: Ownership, first_of_machine: int, reads: StableReads
    ) -> None:
        self._data, self._ownership, self._reads = data, ownership, reads
        self._first_of_machine = first_of_machine

    def __getitem__(self, name: str) -> DistField:
        if name not in self._data:
            raise KeyError(f"no field {name!r}; there are {sorted(self._data) or 'none'}")
        if not isinstance(self._data[name], DistTensor):
            raise TypeError(
                f"field {name!r} must be a DistTensor, which servers hold, to be read by ids of the whole graph (got "
                f"{type(self._data[name]).__name__})"
            )
        return DistField(self._data[name], self._ownership, self._first_of_machine, self._reads)

    def __setitem__(self, name: str, value: DistTensor) -> None:
        """Adds or replaces a field. Every rank does the same."""
        self._data[name] = value

    def __iter__(self) -> Iterator[str]:
        """Of those that servers hold: a script may have put any other tensor there."""
        return iter([name for name, value in self._data.items() if isinstance(value, DistTensor)])

    def __len__(self) -> int:
        return len(list(iter(self)))
