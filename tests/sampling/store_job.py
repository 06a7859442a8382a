# SPDX-License-Identifier: Apache-2.0
"""Runs inside every server and trainer of a job: what the halo store reads, holds and gives up.

Each trainer writes one JSON: by phase, what was counted. All run the same phases. `test_store` starts the jobs.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dgl
import torch
import torch.distributed as dist
from dgl.distributed import kvstore

import dgl_hybrid
from dgl_hybrid.errors import HybridError
from dgl_hybrid.sampling.config import ENABLE_VARIABLE
from tests.helpers.distdgl import Truth

Counts = dict[str, Any]
EPOCHS = 3


class Job:
    """What the phases need."""

    def __init__(self, graph_name: str, truth: Path) -> None:
        self.g = dgl.distributed.DistGraph(graph_name)
        self.truth = Truth.load(truth)
        self.rank = dist.get_rank()
        self.wrong = 0
        """Values that were read and differ from the graph before partitioning."""

    def check_rows(self, rows: torch.Tensor, field: str, ids: torch.Tensor, ntype: str = "_N") -> None:
        truth = self.truth.graph.nodes[ntype].data[field][self.truth.orig_nodes[ntype][ids]].to(rows.dtype)
        self.wrong += int((rows != truth).any(-1).sum()) if truth.dim() > 1 else int((rows != truth).sum())

    def epochs(self, loader: Any, read: Callable[[Any], None], epochs: int = EPOCHS) -> list[Counts]:
        """Runs a loader for some epochs; returns each one's counts."""
        counted = []
        for _ in range(epochs):
            dgl_hybrid.reset_read_counts()
            for batch in loader:
                read(batch)
            counted.append({**dgl_hybrid.read_counts(), "held_bytes": dgl_hybrid.held_bytes(), "wrong": self.wrong})
        dist.barrier()
        return counted


def switch_on(**options: Any) -> None:
    """Nobody holds rows before the plugin is on again everywhere."""
    dgl_hybrid.enable(**options)
    dist.barrier()


def train_nodes(job: Job) -> torch.Tensor:
    g = job.g
    nids: torch.Tensor = dgl.distributed.node_split(g.ndata["train_mask"], g.get_partition_book(), force_even=True)
    return nids


def node_loader(job: Job, fanouts: list[int], batch_size: int = 16, seeds: torch.Tensor | None = None) -> Any:
    sampler = dgl.dataloading.NeighborSampler(fanouts)
    nids = train_nodes(job) if seeds is None else seeds
    return dgl.dataloading.DistNodeDataLoader(job.g, nids, sampler, batch_size=batch_size, shuffle=True)


def seeds_of_others(job: Job, count: int) -> torch.Tensor:
    """Some vertices that another machine owns; whether `train_nodes` has any is up to METIS."""
    book = job.g.get_partition_book()
    nids: torch.Tensor = book.partid2nids((book.partid + 1) % book.num_partitions())[:count]
    return nids


def read_batch(job: Job) -> Callable[[Any], None]:
    def read(batch: Any) -> None:
        inputs, seeds, blocks = batch
        job.check_rows(job.g.ndata["feat"][inputs], "feat", inputs)
        job.check_rows(job.g.ndata["label"][seeds], "label", seeds)
        for block in blocks:
            eids = block.edata[dgl.EID]
            truth = job.truth.graph.edata["w"][job.truth.orig_edges["_N", "_E", "_N"][eids]]
            job.wrong += int((job.g.edata["w"][eids] != truth).any(-1).sum())

    return read


def count_only(job: Job) -> Any:
    switch_on(strategy="depcomm")
    return job.epochs(node_loader(job, [3, 4]), read_batch(job))


def unlimited(job: Job) -> Any:
    switch_on(strategy="depcache")
    return job.epochs(node_loader(job, [3, 4]), read_batch(job))


def budgets(job: Job) -> Any:
    counted = {}
    for budget in ("0", "2KB", "10%", "40%"):
        switch_on(budget=budget)
        counted[budget] = job.epochs(node_loader(job, [3, 4]), read_batch(job), epochs=2)
    return counted


def link_prediction(job: Job) -> Any:
    """Both ends of edges, and vertices drawn uniformly as negatives."""
    switch_on(strategy="depcache")
    g = job.g
    eids = dgl.distributed.edge_split(g.edata["train_mask"], g.get_partition_book(), force_even=True)
    sampler = dgl.dataloading.NeighborSampler([2, 3])
    loader = dgl.dataloading.DistEdgeDataLoader(
        g,
        eids[:120],
        sampler,
        batch_size=40,
        shuffle=True,
        negative_sampler=dgl.dataloading.negative_sampler.Uniform(2),
        exclude="self",
    )

    def read(batch: Any) -> None:
        inputs, positive, negative, _ = batch
        job.check_rows(g.ndata["feat"][inputs], "feat", inputs)
        assert positive.num_nodes() == negative.num_nodes()

    return job.epochs(loader, read)


def seeds_first(job: Job) -> Any:
    """Of each batch the seeds' rows are read before those of all inputs, of the same field."""
    switch_on(strategy="depcache")
    loader = node_loader(job, [3, 4], seeds=torch.cat([train_nodes(job), seeds_of_others(job, 48)]).unique())

    def read(batch: Any) -> None:
        for ids in (batch[1], batch[0]):
            job.check_rows(job.g.ndata["feat"][ids], "feat", ids)

    return job.epochs(loader, read)


class OldStyleSampler:
    """How DistDGL scripts sampled before `DistNodeDataLoader`."""

    def __init__(self, g: Any, fanouts: list[int]) -> None:
        self.g, self.fanouts = g, fanouts

    def sample_blocks(self, seeds: list[int]) -> list[Any]:
        frontier = torch.as_tensor(seeds)
        blocks: list[Any] = []
        for fanout in self.fanouts:
            drawn = dgl.distributed.sample_neighbors(self.g, frontier, fanout)
            block = dgl.to_block(drawn, frontier)
            blocks.insert(0, block)
            frontier = block.srcdata[dgl.NID]
        return blocks


def old_style(job: Job) -> Any:
    switch_on(strategy="depcache")
    sampler = OldStyleSampler(job.g, [4, 3])
    loader = dgl.distributed.DistDataLoader(
        dataset=train_nodes(job).numpy(), batch_size=16, collate_fn=sampler.sample_blocks, shuffle=True
    )

    def read(blocks: Any) -> None:
        inputs = blocks[0].srcdata[dgl.NID]
        job.check_rows(job.g.ndata["feat"][inputs], "feat", inputs)

    return job.epochs(loader, read)


def says_nothing(job: Job) -> Any:
    """A script without any loader: what comes back is learnt."""
    switch_on(strategy="depcache")
    nodes = train_nodes(job)

    class Batches:
        def __iter__(self) -> Any:
            for seeds in nodes.split(16):
                inner = dgl.distributed.sample_neighbors(job.g, seeds, 4)
                outer = dgl.distributed.sample_neighbors(job.g, torch.unique(inner.edges()[0]), 3)
                yield torch.unique(torch.cat([*outer.edges(), seeds]))

    def read(inputs: Any) -> None:
        job.check_rows(job.g.ndata["feat"][inputs], "feat", inputs)

    return job.epochs(Batches(), read, epochs=40)


def inference(job: Job) -> Any:
    """All neighbours of all owned vertices, one layer: every input is read from its owner once."""
    switch_on(strategy="depcache")
    book = job.g.get_partition_book()
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(1)
    loader = dgl.dataloading.DistNodeDataLoader(
        job.g, book.partid2nids(book.partid), sampler, batch_size=50, shuffle=False
    )
    return job.epochs(loader, read_batch(job))


def sevens(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, 7, dtype=dtype)


def writes(job: Job) -> Any:
    """A push and a direct write are seen everywhere, by fields that were held a moment ago."""
    switch_on(strategy="depcache")
    g, ids = job.g, torch.arange(job.g.num_nodes())
    loader = node_loader(job, [3, 4], seeds=torch.cat([train_nodes(job), seeds_of_others(job, 48)]).unique())
    outcome: dict[str, Any] = {}
    for batch in loader:
        for field in ("feat", "wide", "scratch"):
            g.ndata[field][batch[0]]
    dgl_hybrid.reset_read_counts()
    for batch in loader:
        for field in ("feat", "wide", "scratch"):
            g.ndata[field][batch[0]]
    outcome["remote_rows_before"] = dgl_hybrid.read_counts()["remote_rows"]
    g.barrier()
    if job.rank == 0:
        g.ndata["scratch"][ids] = torch.full((len(ids), 4), 7.0)  # mostly other machines' rows
    g.barrier()
    outcome["stale_after_push"] = int((g.ndata["scratch"][ids] != 7.0).sum())
    g.barrier()
    if job.rank == dist.get_world_size() - 1:
        g.ndata["wide"].local_partition[:] = 3.0  # past the KVStore's client
    g.barrier()
    book = g.get_partition_book()
    written = book.partid2nids(book.num_partitions() - 1)
    outcome["stale_after_direct_write"] = int((g.ndata["wide"][written] != 3.0).sum())
    dgl_hybrid.reset_read_counts()
    for batch in loader:
        job.check_rows(g.ndata["feat"][batch[0]], "feat", batch[0])
    outcome["remote_rows_of_the_unwritten"] = dgl_hybrid.read_counts()["remote_rows"]
    outcome["wrong"] = job.wrong
    g.barrier()
    outcome["held_before_it_was_deleted"] = 0
    for batch in loader:
        dgl_hybrid.reset_read_counts()
        g.ndata["label"][batch[1]]
        outcome["held_before_it_was_deleted"] += dgl_hybrid.read_counts()["held_rows"]
    g.barrier()  # a deletion tells every machine to hold no more of that name
    key = g.ndata["label"].kvstore_key
    del g.ndata["label"]
    kvstore.get_kvstore().delete_data(key)
    anew = dgl.distributed.DistTensor((len(ids),), torch.int64, "label", init_func=sevens, attach=False)
    assert anew.kvstore_key == key
    outcome["stale_after_deletion"] = int((anew[ids] != 7).sum())
    g.barrier()
    return outcome


def heterograph(job: Job) -> Any:
    switch_on(strategy="depcache")
    g, book = job.g, job.g.get_partition_book()
    nids = {
        "paper": dgl.distributed.node_split(g.nodes["paper"].data["train_mask"], book, ntype="paper", force_even=True)
    }
    fanout = {etype: 2 + k % 2 for k, etype in enumerate(g.canonical_etypes)}
    sampler = dgl.dataloading.NeighborSampler([fanout, 3])
    loader = dgl.dataloading.DistNodeDataLoader(g, nids, sampler, batch_size=16, shuffle=True)

    def read(batch: Any) -> None:
        inputs, seeds, blocks = batch
        for ntype, field in (("paper", "feat"), ("venue", "x")):
            job.check_rows(g.nodes[ntype].data[field][inputs[ntype]], field, inputs[ntype], ntype)
        job.check_rows(g.nodes["paper"].data["label"][seeds["paper"]], "label", seeds["paper"], "paper")
        cites = ("paper", "cites", "paper")
        for block in blocks:
            eids = block.edges[cites].data.get(dgl.EID)
            if eids is not None and len(eids):
                truth = job.truth.graph.edges[cites].data["w"][job.truth.orig_edges[cites][eids]]
                job.wrong += int((g.edges["cites"].data["w"][eids] != truth).any(-1).sum())

    return job.epochs(loader, read)


def switched_off(job: Job) -> Any:
    """One trainer goes on without the plugin, and announces nothing that it writes."""
    switch_on(strategy="depcache")
    g, ids = job.g, torch.arange(job.g.num_nodes())
    loader = node_loader(job, [3, 4], seeds=torch.cat([train_nodes(job), seeds_of_others(job, 48)]).unique())
    outcome: dict[str, Any] = {}

    def read(expected: float) -> tuple[int, int]:
        dgl_hybrid.reset_read_counts()
        stale = 0
        for inputs, _, _ in loader:
            stale += int((g.ndata["scratch"][inputs] != expected).sum())
        g.barrier()
        return dgl_hybrid.read_counts()["held_rows"], stale

    outcome["first"] = read(0.0)
    for value in (5.0, 0.0):
        if job.rank == 0:
            dgl_hybrid.disable()
            g.ndata["scratch"][ids] = torch.full((len(ids), 4), value)
            g.ndata["scratch"][ids]  # DGL's own barrier does not wait for pushes, an answer does
        g.barrier()
        outcome[f"off, {value}"] = read(value)
    if job.rank == 0:
        dgl_hybrid.enable(strategy="depcache")
    g.barrier()
    outcome["on again"] = read(0.0)
    # Nobody reads while it is off this time: what is held from before must not be taken for new.
    if job.rank == 0:
        dgl_hybrid.disable()
        g.ndata["scratch"][ids] = torch.full((len(ids), 4), 9.0)
        dgl_hybrid.enable(strategy="depcache")
    g.barrier()
    outcome["off and on"] = read(9.0)
    return outcome


def seeds_of_32_bits(job: Job) -> Any:
    """DGL samples for them; so must what is held."""
    seeds = torch.cat([train_nodes(job)[:20], seeds_of_others(job, 20)])
    drawn = {}
    for strategy in ("depcomm", "depcache"):
        switch_on(strategy=strategy)
        for _ in node_loader(job, [3, 4], seeds=seeds.unique()):
            pass
        dgl_hybrid.reset_read_counts()
        for dtype in (torch.int64, torch.int32):
            edges = dgl.distributed.sample_neighbors(job.g, seeds.to(dtype), -1).edata[dgl.EID]
            drawn[f"{strategy}, {dtype}"] = sorted(edges.tolist())
    return {"drawn": drawn, "held_seeds": dgl_hybrid.read_counts()["held_seeds"], "num_seeds": len(seeds)}


def seeds_that_are_none(job: Job) -> Any:
    """Ids that are no vertices, among others; what comes of them is DGL's to say, whatever is held."""
    own = job.g.get_partition_book().partid2nids(job.rank)[:1]
    no_vertices = [job.g.num_nodes(), job.g.num_nodes() + 5]
    if job.rank == 0:
        no_vertices += [-1, -60]  # of its own part; elsewhere a server is asked, which they may end
    drawn = {}
    for strategy in ("depcomm", "depcache"):
        switch_on(strategy=strategy)
        for _ in node_loader(job, [-1], seeds=torch.arange(job.g.num_nodes())):
            pass
        for none in no_vertices:
            seeds = torch.cat([own, torch.tensor([none])])
            edges = dgl.distributed.sample_neighbors(job.g, seeds, -1).edata[dgl.EID]
            drawn[f"{strategy}, {none}"] = sorted(edges.tolist())
    own_edges = dgl.distributed.sample_neighbors(job.g, own, -1).edata[dgl.EID]
    return {"drawn": drawn, "of_own": sorted(own_edges.tolist()), "held_bytes": dgl_hybrid.held_bytes()}


class CountingSampler(OldStyleSampler):
    """Says what the process that samples has counted."""

    def sample_blocks(self, seeds: list[int]) -> Any:
        return super().sample_blocks(seeds), dgl_hybrid.read_counts()


def sampler_processes(job: Job) -> Any:
    switch_on(strategy="depcache")
    sampler = CountingSampler(job.g, [4, 3])
    loader = dgl.distributed.DistDataLoader(
        dataset=train_nodes(job), batch_size=16, collate_fn=sampler.sample_blocks, shuffle=True
    )
    last: Counts = {}

    def read(batch: Any) -> None:
        blocks, counts = batch
        last.update(counts)
        inputs = blocks[0].srcdata[dgl.NID]
        job.check_rows(job.g.ndata["feat"][inputs], "feat", inputs)

    return {"trainer": job.epochs(loader, read), "sampler": last}


def sampler_processes_of_two_loaders(job: Job) -> Any:
    """The second loader reaches further than the first, whose lists the sampler processes got at their start."""
    switch_on(strategy="depcache")
    nodes = train_nodes(job)
    last: Counts = {}
    for nids, fanouts in ((nodes[:10], [3]), (nodes, [4, 3])):
        sampler = CountingSampler(job.g, fanouts)
        loader = dgl.distributed.DistDataLoader(dataset=nids, batch_size=16, collate_fn=sampler.sample_blocks)
        for _, counts in loader:
            last.update(counts)
        dist.barrier()
    return last


def draw_blocks(g: Any, fanouts: list[int], seeds: list[int]) -> Any:
    return OldStyleSampler(g, fanouts).sample_blocks(seeds)


def sampler_processes_say_nothing(job: Job) -> Any:
    """All sampling is done elsewhere, by a function that the trainer cannot look into: it learns from its reads."""
    switch_on(strategy="depcache")
    loader = dgl.distributed.DistDataLoader(
        dataset=train_nodes(job), batch_size=16, collate_fn=functools.partial(draw_blocks, job.g, [4, 3])
    )

    def read(blocks: Any) -> None:
        inputs = blocks[0].srcdata[dgl.NID]
        job.check_rows(job.g.ndata["feat"][inputs], "feat", inputs)

    return job.epochs(loader, read, epochs=12)


def unserved(job: Job) -> Any:
    """The trainers run with the plugin, the servers do not."""
    counted = job.epochs(node_loader(job, [3, 4]), read_batch(job))
    dgl_hybrid.disable()
    try:
        dgl_hybrid.enable()
    except HybridError as error:
        return {"epochs": counted, "error": str(error)}
    return {"epochs": counted, "error": None}


class Messages(logging.Handler):
    """Keeps what is warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def partly_served(job: Job) -> Any:
    """Server and trainer of the first machine run with the plugin, those of the second do not."""
    g, ids = job.g, torch.arange(job.g.num_nodes())
    messages = Messages()
    logging.getLogger("dgl_hybrid").addHandler(messages)
    loader = node_loader(job, [3, 4], seeds=torch.cat([train_nodes(job), seeds_of_others(job, 48)]).unique())
    outcome: dict[str, Any] = {"is_on": ENABLE_VARIABLE in os.environ, "machine": int(g.get_partition_book().partid)}
    for _ in range(2):
        for inputs, _, _ in loader:
            g.ndata["scratch"][inputs]
    outcome["counts"] = dgl_hybrid.read_counts()
    for writer in (1, 0):
        g.barrier()
        if job.rank == writer:
            g.ndata["scratch"][ids] = torch.full((len(ids), 4), 7.0 + writer)
            g.ndata["scratch"][ids]  # DGL's own barrier does not wait for pushes, an answer does
        g.barrier()
        outcome[f"stale after {writer}"] = int((g.ndata["scratch"][ids] != 7.0 + writer).sum())
    outcome["warnings"] = messages.texts
    return outcome


PHASES: dict[str, Callable[[Job], Any]] = {
    phase.__name__: phase
    for phase in (
        count_only,
        unlimited,
        budgets,
        link_prediction,
        seeds_first,
        old_style,
        says_nothing,
        inference,
        writes,
        heterograph,
        sampler_processes,
        sampler_processes_of_two_loaders,
        sampler_processes_say_nothing,
        seeds_of_32_bits,
        seeds_that_are_none,
        switched_off,
        unserved,
        partly_served,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--truth", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--phases", required=True)
    args = parser.parse_args()
    if args.phases == "unserved" and os.environ["DGL_ROLE"] == "client":
        dgl_hybrid.enable(strategy="depcache")
    if args.phases == "partly_served" and os.environ.get("DGL_SERVER_ID", os.environ.get("RANK")) == "0":
        dgl_hybrid.enable(strategy="depcache")
    torch.manual_seed(0)
    dgl.distributed.initialize(os.environ["DGL_IP_CONFIG"])
    dist.init_process_group("gloo")
    job = Job("case", args.truth)
    results = {}
    for name in args.phases.split(","):
        if name not in ("unserved", "partly_served"):
            dgl_hybrid.disable()  # every phase begins with an empty store
        results[name] = PHASES[name](job)
        dist.barrier()
    (args.out / f"trainer_{job.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
