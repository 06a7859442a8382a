# SPDX-License-Identifier: Apache-2.0
"""A DistDGL script that `test_distdgl_full_graph` runs on servers and trainers: many checks in one job.

    python -m tests.training.distdgl_full_graph FOLDER

`FOLDER/job.pt` says what to do; each trainer writes `FOLDER/rank<r>.pt`: what it computed, and what it saw of reads,
messages and errors. The comparisons are made in the test.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dgl_hybrid  # before dgl, which it makes importable

# isort: split
import dgl
from dgl.distributed import DistEmbedding
from dgl.distributed.kvstore import KVClient
from torch import Tensor, nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph
from dgl_hybrid.errors import HybridError
from dgl_hybrid.exchange import kvstore_transport
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.kvstore_transport import KVStoreTransport
from tests.helpers.exactness import Case, step_on


def hooked_functions() -> list[Any]:
    """What full-graph training on a `DistGraph` puts hooks around."""
    return [*(vars(KVClient)[name] for name in ("pull", "push", "barrier")), vars(DistEmbedding)["__call__"]]


HOOKED = hooked_functions()
"""DGL's own."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the trainers do."""

    graph_name: str
    cases: list[Case]
    transports: tuple[str, ...]
    is_enabled: bool
    has_group: bool
    """torch.distributed is initialised."""
    checks: tuple[str, ...] = ()


def main(folder: Path) -> None:
    job: Job = torch.load(folder / "job.pt", weights_only=False)
    if job.is_enabled:
        dgl_hybrid.enable(budget="unlimited")
    dgl.distributed.initialize(os.environ.get("DGL_IP_CONFIG"))
    g = dgl.distributed.DistGraph(job.graph_name)
    seen: dict[str, Any] = {}
    if "errors" in job.checks:
        seen["errors"] = {
            name: message_of(lambda name=name: PartitionedGraph.from_dist_graph(g, transport=name))
            for name in ("collective", "kvstore", "carrier pigeon")
            if not (name == "kvstore" and job.is_enabled)
        }
    if job.has_group:
        dist.init_process_group("gloo")
    for transport in job.transports:
        view = PartitionedGraph.from_dist_graph(g, transport=transport)
        results = [step_on(g, view, case, view.ndata["id"].local, transport=transport) for case in job.cases]
        seen[transport] = {
            "steps": results,
            **{name: CHECKS[name](g, view, transport) for name in job.checks if name in CHECKS},
        }
    if "disabled" in job.checks:
        seen["disabled"] = [check_disabled(g, transport) for transport in job.transports]
    torch.save(seen, folder / f"rank{os.environ['RANK']}.pt")
    g.barrier()  # and an end as scripts have it: nothing is destroyed, fields are still there


def message_of(action: Callable[[], object]) -> str:
    try:
        action()
    except (HybridError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ------------------------------------------------------------------------------------------------ what is looked at


def is_inside(part: Tensor, whole: Tensor) -> bool:
    begin, end = whole.data_ptr(), whole.data_ptr() + whole.nbytes
    return begin <= part.data_ptr() and part.data_ptr() + part.nbytes <= end


def check_memory(g: Any, view: PartitionedGraph, transport: str) -> dict[str, bool]:
    """Structure and fields lie where the servers put them."""
    structure = view.partition.lists._structure
    indptr, indices, edges = g.local_partition.adj_tensors("csc")
    return {
        "indptr": structure.indptr.data_ptr() == indptr.data_ptr(),
        "indices": structure.indices.data_ptr() == indices.data_ptr(),
        "edge positions": structure.edge_positions.data_ptr() == edges.data_ptr(),
        "node ids": structure.node_global.data_ptr() == g.local_partition.ndata[dgl.NID].data_ptr(),
        "node field": is_inside(view.ndata["feat"].local, g.ndata["feat"].local_partition),
        "edge field": is_inside(view.edata["w"].local, g.edata["w"].local_partition),
        "view made once": PartitionedGraph.from_dist_graph(g, transport=transport) is view,
    }


def check_share(g: Any, view: PartitionedGraph, transport: str) -> dict[str, Any]:
    """Who owns what, and which in-edge lists are known without a message."""
    owned = view.nodes.owned()
    counts, src, eid = view.in_edges.lookup(owned)
    return {
        "nodes": (view.nodes.start, view.nodes.stop),
        "edges": (view.edges.start, view.edges.stop),
        "id": view.ndata["id"].local.clone(),
        "counts": counts,
        "src": g.ndata["id"][src],
        "weight": g.edata["w"][eid],
        "is_ascending": all(bool((part[1:] > part[:-1]).all()) for part in eid.split(counts.tolist())),
        "out_degrees": view.out_degrees,
        "halo": g.ndata["id"][view.in_edges.known_halo()],
        "knows_original_ids": view.partition.orig_node_ids is not None,
    }


def check_reads(g: Any, view: PartitionedGraph, transport: str) -> dict[str, Any]:
    """Reads with the loader's ids are one tensor until a write, of which every rank learns."""
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
        2, prefetch_node_feats=["feat"], prefetch_labels=["label"], prefetch_edge_feats=["w"]
    )
    foreign = torch.arange(g.num_nodes())
    foreign = foreign[~view.nodes.is_owned(foreign)]
    loader = FullGraphLoader(
        g,
        view.owned_nodes(),
        sampler,
        plan=[foreign, foreign],
        transport=transport,
        batch_size=1000,
        shuffle=True,
        drop_last=False,
    )
    first, seeds, blocks = next(iter(loader))
    x = g.ndata["feat"][first]
    pulls = view._reads.num_pulls
    dgl_hybrid.reset_read_counts()
    second, _, _ = next(iter(loader))
    seen: dict[str, Any] = {
        "same ids": second is first,
        "same rows": g.ndata["feat"][second] is x and view.ndata["feat"][second] is x,
        "same labels": g.ndata["label"][seeds] is blocks[-1].dstdata["label"],
        "prefetched": blocks[0].srcdata["feat"] is x,
        "edge rows": g.edata["w"][blocks[0].edata[dgl.EID]] is blocks[0].edata["w"],
        "no pull": view._reads.num_pulls == pulls,
        "no remote row": dgl_hybrid.read_counts()["remote_rows"] == 0,
        "rows": torch.equal(x, g.ndata["feat"][first.clone()]),
        "other rows": g.ndata["feat"][first.clone()] is not x,
    }
    if view.rank() == 0:  # reads are no collective
        g.ndata["feat"][torch.arange(5)], g.ndata["id"][first]

    everything = torch.arange(g.num_nodes())
    field = dgl.distributed.DistTensor((g.num_nodes(), 3), torch.float64, f"written_{transport}")
    g.ndata["written"] = field
    stale, unstable = 0, 0
    for trial in range(12):
        if view.rank() == trial % view.nodes.world_size:
            field[everything] = torch.full((len(everything), 3), float(trial), dtype=torch.float64)
        g.barrier()
        rows = g.ndata["written"][first]
        stale += not bool((rows == trial).all())
        unstable += g.ndata["written"][first] is not rows
        g.barrier()
        unstable += g.ndata["written"][first] is not rows
    seen["fresh after a push and a barrier"] = stale == 0
    seen["stable between writes"] = unstable == 0

    rows = field[first]
    if view.rank() == view.nodes.world_size - 1:
        field.local_partition[:] = -1.0  # past the KVStore
    g.barrier()
    machine = field.local_partition
    seen["fresh after a write into the local part"] = field[first] is not rows and bool((machine == -1).any()) == (
        g.get_partition_book().partid == g.get_partition_book().num_partitions() - 1
    )
    rows = field[first]
    g.barrier()
    assert field[first] is rows
    field.local_partition.numpy()[:] = -2.0  # nor counted by PyTorch, like what a collective receives
    g.barrier()
    seen["fresh after a write that is not counted"] = bool((field[first] == -2.0).all())
    g.barrier()
    if view.rank() == 0:
        field[everything] = torch.full((len(everything), 3), 7.0, dtype=torch.float64)
    next(iter(loader))  # an epoch is a fence as well
    seen["fresh in the next epoch"] = bool((field[first] == 7).all())
    if view.rank() == 0:
        g.ndata["feat"][everything] = g.ndata["feat"][everything] * 2
    _, _, blocks = next(iter(loader))
    seen["prefetched anew"] = torch.equal(blocks[0].srcdata["feat"], 2 * x) and (
        blocks[0].srcdata["feat"] is g.ndata["feat"][first]
    )
    g.barrier()
    if view.rank() == 0:
        g.ndata["feat"][everything] = g.ndata["feat"][everything] / 2
    g.barrier()
    seen["restored"] = torch.equal(g.ndata["feat"][first], x)
    x_read = g.ndata["feat"][first]
    x_read += 1  # the script's own tensor: the field is unharmed
    seen["own writes"] = torch.equal(g.ndata["feat"][first], x)

    del g.ndata["written"], field, machine
    g.barrier()
    field = dgl.distributed.DistTensor((g.num_nodes(), 3), torch.float64, f"written_{transport}")
    seen["a new tensor of an old name"] = bool((field[first] == 0).all())
    return seen


def check_inference(g: Any, view: PartitionedGraph, transport: str) -> tuple[Tensor, Tensor]:
    model = Case(kind="gat").build(g.ndata["feat"].shape[1])
    nids, logits = dgl_hybrid.infer(model, g, dgl.dataloading.NeighborSampler([5, 5]), transport=transport)
    return g.ndata["id"][nids], logits


def check_sampled(g: Any, view: PartitionedGraph, transport: str) -> dict[str, bool]:
    """Sampled loaders of the same graph go on as before, sampler processes included."""
    sampler = dgl.dataloading.NeighborSampler([3, 3])
    loader = dgl.dataloading.DistNodeDataLoader(g, view.nodes.owned(), sampler, batch_size=16)
    seeds, good = [], True
    for input_nodes, batch_seeds, blocks in loader:
        seeds.append(batch_seeds)
        good &= torch.equal(g.ndata["id"][input_nodes][: len(batch_seeds)], g.ndata["id"][batch_seeds])
        good &= blocks[-1].num_dst_nodes() == len(batch_seeds)
    return {"seeds": torch.equal(torch.cat(seeds).sort().values, view.nodes.owned()), "rows": bool(good)}


def embedding_rows(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.linspace(-1, 1, shape[0] * shape[1]).reshape(shape).to(dtype)


def check_embedding(g: Any, view: PartitionedGraph, transport: str) -> list[dict[str, Any]]:
    """Gradients that a sparse optimizer pushes, of masters and replicas, and rows read anew after its step."""
    model = Case(kind="sage_mean", dtype=torch.float32).build(5)
    embedding = dgl.distributed.DistEmbedding(g.num_nodes(), 5, f"learned_{transport}", embedding_rows)
    optimizer = dgl.distributed.optim.SparseAdagrad([embedding], lr=0.1)
    foreign = torch.arange(g.num_nodes())
    foreign = foreign[~view.nodes.is_owned(foreign)]
    loader = FullGraphLoader(g, view.owned_nodes("train_mask"), 2, plan=[foreign, foreign], transport=transport)
    seen = []

    def train(input_nodes: Tensor, seeds: Tensor, blocks: list[Any]) -> None:
        in_pieces = len(seen) == 1  # by some of the ids at a time, as models of several kinds of nodes do
        is_even = input_nodes % 2 == 0
        masks = [is_even, ~is_even, is_even & ~is_even] if in_pieces else [torch.ones_like(is_even)]
        pieces = [embedding(input_nodes[mask]) if in_pieces else embedding(input_nodes) for mask in masks]
        x, grad = torch.zeros(len(input_nodes), 5), torch.zeros(len(input_nodes), 5)
        for mask, piece in zip(masks, pieces, strict=True):
            x[mask] = piece
        nn.functional.cross_entropy(model(blocks, x), g.ndata["label"][seeds]).backward()
        for mask, piece in zip(masks, pieces, strict=True):
            grad[mask] = piece.grad
        own = view.nodes.is_owned(input_nodes)
        seen.append({"ids": input_nodes, "x": x.detach().clone(), "grad": grad, "own": own})
        optimizer.step()

    for _ in range(2):
        for batch in loader:
            train(*batch)
        g.barrier()
    of_no_loader = next(
        iter(FullGraphLoader(g, view.owned_nodes("train_mask"), 2, plan=[foreign, foreign], transport=transport))
    )
    train(*of_no_loader)
    g.barrier()
    return [{**facts, "ids": g.ndata["id"][facts["ids"]]} for facts in seen]


def check_planned(g: Any, view: PartitionedGraph, transport: str) -> list[float]:
    """The user's script: probed, traced and planned at the second epoch, over this transport."""
    torch.manual_seed(0)
    model = Case(kind="sage_mean").build(g.ndata["feat"].shape[1])
    loader = FullGraphLoader(
        g, view.owned_nodes("train_mask"), dgl.dataloading.NeighborSampler([5, 5]), transport=transport
    )
    losses = []
    for _ in range(3):
        for input_nodes, seeds, blocks in loader:
            loss = nn.functional.cross_entropy(model(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds])
            losses.append(loss.item() * loader.loss_weight / view.nodes.world_size)
    assert loader.outcome is not None
    assert view.topology is not None
    return losses


class WithEmbedding(nn.Module):
    """A model with learned rows inside, called with ids."""

    def __init__(self, inner: nn.Module, embedding: Any) -> None:
        super().__init__()
        self.inner, self.embedding = inner, embedding

    def forward(self, blocks: Any, ids: Tensor) -> Any:
        return self.inner(blocks, self.embedding(ids))


def check_embedding_inside(g: Any, view: PartitionedGraph, transport: str) -> dict[str, Any]:
    """Planning runs copies of the model; what they read must not be deleted with them, nor remembered as read."""
    embedding = dgl.distributed.DistEmbedding(g.num_nodes(), 5, f"inside_{transport}", embedding_rows)
    ids = torch.arange(g.num_nodes())
    before = embedding._tensor[ids]
    model = WithEmbedding(Case(kind="sage_mean", dtype=torch.float32).build(5), embedding)
    loader = FullGraphLoader(g, view.owned_nodes("train_mask"), 2, transport=transport)
    losses, num_traced = [], []
    for _ in range(3):
        for input_nodes, seeds, blocks in loader:
            loss = nn.functional.cross_entropy(model(blocks, input_nodes), g.ndata["label"][seeds])
            losses.append(loss.item() * loader.loss_weight / view.nodes.world_size)
            num_traced.append(len(embedding._trace))
            embedding.reset_trace()
    g.barrier()
    return {
        "is_planned": loader.outcome is not None,
        "losses": losses,
        "num_traced": num_traced,
        "is_there": torch.equal(embedding._tensor[ids], before),
    }


def check_messages(g: Any, view: PartitionedGraph, transport: str) -> dict[str, Any]:
    """What a communicator moves, whatever carries it."""
    communicator = view.communicator
    rank, size = communicator.rank, communicator.world_size
    before, kvstore_transport.PARCEL_BYTES = kvstore_transport.PARCEL_BYTES, 1 << 12
    bytes_at_once, kvstore_transport._GATHERED_BYTES = kvstore_transport._GATHERED_BYTES, 1 << 10
    generator = torch.Generator().manual_seed(rank)
    seen: dict[str, Any] = {}
    try:
        for dtype in (
            torch.float64,
            torch.float32,
            torch.bfloat16,
            torch.int64,
            torch.int32,
            torch.int16,
            torch.bool,
            torch.uint8,
        ):
            send_counts = [0 if (rank + q) % 3 == 0 else 40 * rank + 7 * q for q in range(size)]
            rows = torch.randint(0, 100, (sum(send_counts), 2, 17), generator=generator).to(dtype)
            recv_counts = communicator.exchange_counts(send_counts)
            kept = rows.clone()
            received = communicator.exchange(rows, send_counts, recv_counts)
            rows.zero_()  # what was sent is no longer looked at
            communicator.barrier()
            seen[str(dtype)] = (kept, send_counts, received, recv_counts)
        # Rank 0 has nothing to wait for and writes into what it sent while that is still on its way.
        length = 1 << 21
        rows = torch.ones(size * length) if rank == 0 else torch.empty(0)
        send_counts, recv_counts = [length * (rank == 0)] * size, [length if q == 0 else 0 for q in range(size)]
        received = communicator.exchange(rows, send_counts, recv_counts)
        rows.fill_(-1.0)
        seen["large"] = bool((received == 1).all()) and len(received) == length
        seen["nothing"] = communicator.exchange(torch.empty(0, 4), [0] * size, [0] * size).shape == (0, 4)
        for length in (1, 50, 5000):
            values = torch.arange(length, dtype=torch.float64) * (rank + 1)
            seen[f"sum {length}"] = (values.clone(), communicator.sum_(values))
        seen["sum of a matrix"] = (torch.ones(3, 5), communicator.sum_(torch.ones(3, 5)))
        seen["sum of ints"] = (torch.tensor(rank), communicator.sum_(torch.tensor(rank)))
        seen["json"] = communicator.gather_json({"rank": rank, "text": "é" * 3000 * rank})
        seen["rows"] = communicator.gather_rows(torch.full((rank, 2), float(rank)))
        seen["ints"] = communicator.gather_ints([rank, -rank])

        def fail() -> None:
            with communicator.agreed():
                if rank == size - 1:
                    raise ValueError("no such thing")

        seen["agreed"] = message_of(fail)
    finally:
        kvstore_transport.PARCEL_BYTES, kvstore_transport._GATHERED_BYTES = before, bytes_at_once
    if transport == "kvstore":
        lonely = Communicator(KVStoreTransport(timeout_s=1.0))
        if rank == 0:
            seen["late"] = message_of(lambda: lonely.exchange(torch.ones(size), [1] * size, [1] * size))
        communicator.barrier()
        # Parcels that come after it was given up meet no request of anybody.
        if rank != 0:
            lonely.transport._swap(
                [torch.ones(3, dtype=torch.uint8)] * size,
                [torch.empty(3 if q == rank else 0, dtype=torch.uint8) for q in range(size)],
            )
        communicator.barrier()
        seen["rows after it"] = torch.equal(
            g.ndata["id"][torch.arange(g.num_nodes())].sort().values, torch.arange(g.num_nodes())
        )
    return seen


def check_disabled(g: Any, transport: str) -> dict[str, bool]:
    """What a view has hooked is DGL's own after `disable`, and hooked again by the next epoch."""
    view = PartitionedGraph.from_dist_graph(g, transport=transport)
    model, everything = Case(kind="sage_mean").build(g.ndata["feat"].shape[1]), torch.arange(g.num_nodes())
    foreign = everything[~view.nodes.is_owned(everything)]
    loader = FullGraphLoader(g, view.owned_nodes("train_mask"), 2, plan=[foreign, foreign], transport=transport)

    def epoch(*, disables: bool = False) -> Tensor:
        ((input_nodes, seeds, blocks),) = loader
        rows = g.ndata["feat"][input_nodes]
        if disables:
            dgl_hybrid.disable()
        nn.functional.cross_entropy(model(blocks, rows), g.ndata["label"][seeds]).backward()
        return rows

    rows = epoch()
    seen = {"hooked": hooked_functions() != HOOKED and "push" in vars(g._client)}
    dgl_hybrid.disable()
    seen["original"] = hooked_functions() == HOOKED and not {"push", "barrier", "pull"} & set(vars(g._client))
    seen["read as by DGL"] = torch.equal(g.ndata["id"][everything].sort().values, everything)
    g.barrier()
    if view.rank() == 0:
        g.ndata["feat"][everything] = 2 * g.ndata["feat"][everything]  # nobody sees that
    g.barrier()
    doubled = epoch()
    seen["written meanwhile"] = torch.equal(doubled, 2 * rows)
    seen["stable again"] = epoch() is doubled
    seen["says so"] = "take the batch anew" in message_of(lambda: epoch(disables=True))
    g.barrier()
    if view.rank() == 0:
        g.ndata["feat"][everything] = g.ndata["feat"][everything] / 2
    g.barrier()
    return seen


CHECKS: dict[str, Callable[[Any, PartitionedGraph, str], Any]] = {
    "memory": check_memory,
    "share": check_share,
    "messages": check_messages,
    "reads": check_reads,
    "inference": check_inference,
    "embedding": check_embedding,
    "embedding inside": check_embedding_inside,
    "planned": check_planned,
    "sampled": check_sampled,
}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
