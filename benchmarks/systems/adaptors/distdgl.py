# SPDX-License-Identifier: Apache-2.0
"""DistDGL as it is, the plugin off: batches of seeds with full neighbourhoods (its exact result), or sampled ones."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dgl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dgl.dataloading import DistNodeDataLoader, NeighborSampler
from torch import nn

from benchmarks.systems.adaptors import curve
from benchmarks.systems.adaptors.base import (
    PATIENCE,
    Epoch,
    Sample,
    Stopwatch,
    System,
    mean_over_ranks,
    original_ids,
    pick_logits,
    sample_ids,
)
from benchmarks.systems.job import SKIPS_LARGEST
from dgl_hybrid.training.distdgl import HOPELESS, batch_sizes


class DistDGLFull(System):
    """Every neighbour, the best of several batch sizes."""

    def join(self) -> None:
        dgl.distributed.initialize(os.environ.get("DGL_IP_CONFIG"))
        dist.init_process_group("gloo", timeout=PATIENCE)

    def prepare(self) -> dict[str, Any]:
        job = self.job
        self.g = dgl.distributed.DistGraph(job.graph_name)
        book = self.g.get_partition_book()
        self.nids = dgl.distributed.node_split(self.g.ndata["train_mask"], book, force_even=True)
        self.model = self.make_model()
        self.wrapped = nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = self.make_optimizer(self.model)
        return self._choose()

    def _choose(self) -> dict[str, Any]:
        """Tries the batch sizes from the initial weights on, and goes back to these.

        The second epoch of each counts: the first one, which faults in its memory, takes up to three times as long.
        """
        start = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        seconds: dict[int, float] = {}
        first_s: list[float] = []
        fewest, most = self._share_sizes()
        skips_largest = bool(self.job.options.get(SKIPS_LARGEST, False))
        for batch_size in batch_sizes(fewest, most, skips_largest=skips_largest):
            loader = self._make_loader(batch_size)
            limit_s = HOPELESS * min(first_s) if first_s else float("inf")
            dist.barrier()
            elapsed_s = _max_over_ranks(self._train(loader, limit_s=limit_s))
            if elapsed_s < limit_s:
                first_s.append(elapsed_s)
                dist.barrier()
                seconds[batch_size] = _max_over_ranks(self._train(loader))
        best = min(seconds, key=lambda size: seconds[size])
        self.loader = self._make_loader(best)
        self.model.load_state_dict(start)
        self.optimizer = self.make_optimizer(self.model)
        return {
            "batch_size": "all" if best == most else best,
            "seconds_by_batch_size": {"all" if size == most else str(size): value for size, value in seconds.items()},
            SKIPS_LARGEST: skips_largest,
        }

    def _share_sizes(self) -> tuple[int, int]:
        """Returns the seeds of the ranks that have the fewest and the most: shares differ by one."""
        return -int(_max_over_ranks(-float(len(self.nids)))), int(_max_over_ranks(float(len(self.nids))))

    def _make_loader(self, batch_size: int, fanouts: tuple[int, ...] | None = None, *, shuffle: bool = True) -> Any:
        sampler = NeighborSampler(list(fanouts or (-1,) * self.job.num_layers))
        return DistNodeDataLoader(self.g, self.nids, sampler, batch_size=batch_size, shuffle=shuffle, drop_last=False)

    def _train(self, loader: Any, *, limit_s: float = float("inf")) -> float:
        """One pass over the seeds; returns the seconds of the slowest rank. Given up at a limit, all ranks together."""
        self.compute_s = self.exchange_s = 0.0
        start_s = time.perf_counter()
        for inputs, seeds, blocks in self._timed(loader):
            read_s = time.perf_counter()
            x, label = self.g.ndata["feat"][inputs], self.g.ndata["label"][seeds]
            compute_s = time.perf_counter()
            loss = F.cross_entropy(self.wrapped(blocks, x), label)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.exchange_s += compute_s - read_s
            self.compute_s += time.perf_counter() - compute_s
            if limit_s < float("inf") and _max_over_ranks(time.perf_counter() - start_s) > limit_s:
                return limit_s
        return (
            _max_over_ranks(time.perf_counter() - start_s) if limit_s < float("inf") else time.perf_counter() - start_s
        )

    def _timed(self, loader: Any) -> Iterator[Any]:
        """Yields batches and adds the time until each to what is exchanged: most of it is waiting for servers."""
        batches = iter(loader)
        while True:
            start_s = time.perf_counter()
            batch = next(batches, None)
            self.exchange_s += time.perf_counter() - start_s
            if batch is None:
                return
            yield batch

    def check(self) -> Sample:
        """The loss at the initial weights over all seeds, in batches: what one step of all seeds would see.

        GraphConv's norm takes out-degrees of the sampled blocks, which are not those of the graph: DistDGL's GCN is
        another model, and is not compared.
        """
        wanted, original = sample_ids(self.job), original_ids(self.job)
        total = 0.0
        logits: dict[int, list[float]] = {}
        with torch.no_grad():
            for inputs, seeds, blocks in self._make_loader(8192, shuffle=False):
                rows = self.model(blocks, self.g.ndata["feat"][inputs])
                total += float(F.cross_entropy(rows, self.g.ndata["label"][seeds], reduction="sum"))
                logits |= pick_logits(original[seeds], rows, wanted)
        loss = mean_over_ranks(total, len(self.nids))
        why = "it steps by means over batches, so there is no gradient of the whole"
        return Sample(losses=[loss], logits=logits, why_no_gradients=why, is_comparable=self.job.model != "gcn")

    def run_epoch(self) -> Epoch:
        with Stopwatch() as watch:
            self._train(self.loader)
        return Epoch(elapsed_s=watch.elapsed_s, cpu_s=watch.cpu_s, compute_s=self.compute_s, exchange_s=self.exchange_s)


class DistDGLSampled(DistDGLFull):
    """Neighbours drawn by fanouts; for time to accuracy."""

    def _choose(self) -> dict[str, Any]:
        options = self.job.options
        # A rank that made a batch more than others would wait for them for ever.
        self.nids = self.nids[: self._share_sizes()[0]]
        torch.manual_seed(self.job.seed + self.rank)
        dgl.seed(self.job.seed + self.rank)
        self.loader = self._make_loader(int(options["batch_size"]), tuple(options["fanouts"]))
        return {}

    def train_curve(self, folder: Path, count: int, every: int) -> list[dict[str, Any]]:
        self.model.train()
        return curve.train(self.model, lambda: self._train(self.loader), folder, count, every, rank=self.rank)


def _max_over_ranks(value: float) -> float:
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)
