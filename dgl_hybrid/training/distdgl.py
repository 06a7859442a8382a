# SPDX-License-Identifier: Apache-2.0
"""DistDGL as it is: the same model from the same weights, its loader over batches of seeds with full neighbourhoods.

What it measures is DGL's alone: unmodified layers on DGL's blocks, rows read from its servers, gradients averaged by
DDP. Runs in DistDGL's trainers (`launch.distdgl_part`), whose answers travel as JSON.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import dgl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dgl.dataloading import DistNodeDataLoader, NeighborSampler
from torch import Tensor, nn

from dgl_hybrid.training.config import TrainJob
from dgl_hybrid.training.models import build_model
from dgl_hybrid.training.resident_memory import current_rss_bytes, peak_rss_bytes

BATCH_SIZES = (8192, 1024)
"""Tried besides all seeds of a trainer at once, where it has more."""
HOPELESS = 1.5
"""A batch size is given up when its first epoch has taken so many times as long as the best one's."""
FEWEST, MOST = 5, 25
"""Epochs that are timed: the fewest unless time runs out, more while they are short."""
TIMED_S = 3.0
"""After which no more are timed than the fewest."""
LIMIT_S = 30.0
"""After which no epoch begins. The first one may take longer, and is then what is reported, unless whoever has started
the trainers ends them before it is done (`launch.distdgl`, after its `TIMEOUT_S`)."""
LONGEST_CHECK_S = 10.0
"""Epochs that take longer leave no time for the loss, which comes after the limit."""
OTHER_MODELS: Mapping[str, str] = {
    "gcn": "DistDGL's GCN is another model: it divides by out-degrees within its blocks, not by the graph's",
    "gin": "DistDGL's GIN is another model: batch norm is over the rows of each trainer's blocks",
}
"""Models whose results are not those of the whole graph, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistDGLReport:
    """What was measured; times are of the slowest trainer."""

    ranks: int
    """Trainers, one for each part."""
    times_s: tuple[float, ...]
    """Of epochs by the fastest batch size, read, computed and averaged, from a barrier on."""
    has_warmed_up: bool
    """Whether the first epoch by that size, which takes longer, was left out of them."""
    batch_size: int | None
    """The fastest; None: all seeds of a trainer."""
    seconds_by_batch_size: dict[str, float]
    """Of those that were tried to the end, by their number of seeds or "all"."""
    given_up: tuple[int, ...]
    """Sizes that took `HOPELESS` times as long as the best one, and were left there."""
    peak_rss_bytes: tuple[int, ...]
    """By trainer, servers not counted; after all batch sizes that were tried."""
    base_rss_bytes: tuple[int, ...]
    """By trainer: what it held before the graph was opened."""
    initial_loss: float | None = None
    """Mean over all train nodes at the initial weights, in float64; None: there was no time to make it."""
    is_complete: bool = False
    """Whether all was measured that there was time for."""
    stopped: str | None = None
    """Why it ended before it had measured all it would have."""

    @property
    def epoch_time_s(self) -> float:
        """Median of the epochs that count."""
        return statistics.median(self.times_s)

    def to_json(self) -> dict[str, Any]:
        """Returns an object for `json.dumps`."""
        loss = self.initial_loss
        return asdict(self) | {"initial_loss": None if loss is None or not math.isfinite(loss) else loss}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DistDGLReport:
        """Reads what `to_json` wrote."""
        names = ("times_s", "given_up", "peak_rss_bytes", "base_rss_bytes")
        return cls(**{**data, **{name: tuple(data[name]) for name in names}})


def measure_distdgl(
    job: TrainJob, graph_name: str, *, on_report: Callable[[DistDGLReport], None], skips_largest: bool = False
) -> None:
    """Trains in this trainer. Collective over PyTorch's process group, after `dgl.distributed.initialize`.

    Args:
        job: Its model and training; `strategy` is not used.
        graph_name: What the partition calls the graph.
        on_report: Called on every trainer with all that is known by then, now and then: what was measured is not lost
            if time runs out.
        skips_largest: Whether all seeds at once are left out, for which there was no memory or no time.

    Raises:
        ValueError: On every trainer: one has no train node, or no batch is left to try.
    """
    run = _Run(job, graph_name)
    start_s = time.monotonic()

    def has_time() -> bool:
        return _max_over_ranks(time.monotonic() - start_s) < LIMIT_S

    first_s: dict[int, float] = {}
    times_s: dict[int, list[float]] = {}
    given_up: list[int] = []

    def report() -> DistDGLReport:
        known = {size: times_s.get(size) or [first_s[size]] for size in first_s}
        best = min(known, key=lambda size: statistics.median(known[size]))
        names = {size: str(size) if size < run.most_seeds else "all" for size in known}
        memory = _gather([peak_rss_bytes(), run.base_rss_bytes])
        found = DistDGLReport(
            ranks=dist.get_world_size(),
            times_s=tuple(known[best]),
            has_warmed_up=best in times_s,
            batch_size=best if best < run.most_seeds else None,
            seconds_by_batch_size={names[size]: statistics.median(known[size]) for size in known},
            given_up=tuple(given_up),
            peak_rss_bytes=tuple(row[0] for row in memory),
            base_rss_bytes=tuple(row[1] for row in memory),
        )
        on_report(found)
        return found

    sizes = batch_sizes(run.fewest_seeds, run.most_seeds, skips_largest=skips_largest)
    for size in sizes:
        if first_s and not has_time():
            break
        limit_s = HOPELESS * min(first_s.values()) if first_s else math.inf
        took_s = run.train(size, limit_s=limit_s)
        if took_s < limit_s:
            first_s[size] = took_s
            report()
            if has_time():
                times_s[size] = [run.train(size)]
                report()
        else:
            given_up.append(size)
    # What has had no second epoch is compared by none: its first one pays for memory, too.
    best = min(times_s, key=lambda size: times_s[size][0]) if times_s else None
    if best is not None:
        timed = times_s[best]
        while has_time() and (len(timed) < FEWEST or (len(timed) < MOST and sum(timed) < TIMED_S)):
            timed.append(run.train(best))
    found = report()  # before the loss, whose memory is not that of training
    if found.epoch_time_s < LONGEST_CHECK_S:  # about as long, and worth more than the last of the epochs
        # In the largest batches that there was memory for.
        found = replace(found, initial_loss=run.initial_loss(sizes[0]))
    on_report(replace(found, is_complete=True))


def batch_sizes(fewest_seeds: int, most_seeds: int, *, skips_largest: bool = False) -> list[int]:
    """Returns those to try, given the seeds of the trainers that have the fewest and the most: all, then smaller ones.

    Left out are those by which one trainer would make a batch more than others, and wait for them for ever.

    Args:
        skips_largest: Whether all seeds at once are left out, for which there was no memory or no time.

    Raises:
        ValueError: Then none is left.
    """
    smaller = [
        size
        for size in BATCH_SIZES
        if size < fewest_seeds and math.ceil(fewest_seeds / size) == math.ceil(most_seeds / size)
    ]
    if skips_largest and not smaller:
        raise ValueError(f"there is no batch smaller than all {most_seeds} seeds of a trainer to try")
    return smaller if skips_largest else [most_seeds, *smaller]


class _Run:
    """One trainer's part."""

    def __init__(self, job: TrainJob, graph_name: str) -> None:
        self.base_rss_bytes = current_rss_bytes()
        self._job = job
        self._g = dgl.distributed.DistGraph(graph_name)
        book = self._g.get_partition_book()
        self._seeds = dgl.distributed.node_split(self._g.ndata["train_mask"], book, force_even=True)
        counts = [row[0] for row in _gather([len(self._seeds)])]
        if min(counts) == 0:
            raise ValueError(f"every trainer needs a train node (got {sum(counts)} for {len(counts)} trainers)")
        self.fewest_seeds, self.most_seeds = min(counts), max(counts)
        self._dtype: torch.dtype = getattr(torch, job.training.dtype)
        self._model = self._build(self._dtype)
        self._wrapped: nn.Module = self._model
        if dist.get_world_size() > 1:
            self._wrapped = nn.parallel.DistributedDataParallel(self._model)
        config = job.training
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        self._loaders: dict[int, Any] = {}

    def _build(self, dtype: torch.dtype) -> nn.Module:
        job = self._job
        classes = job.num_classes
        if classes is None:
            classes = 1 + int(_max_over_ranks(float(self._g.ndata["label"][self._seeds].max())))
        return build_model(
            job.model.model,
            int(self._g.ndata["feat"].shape[1]),
            job.model.hidden,
            classes,
            job.model.num_layers,
            dropout=job.model.dropout,
            heads=job.model.heads,
            seed=job.training.seed,
            dtype=dtype,
        )

    def train(self, batch_size: int, *, limit_s: float = math.inf) -> float:
        """One pass over the seeds. Collective; returns seconds of the slowest trainer, `limit_s` if they gave up."""
        if batch_size not in self._loaders:
            self._loaders[batch_size] = self._make_loader(batch_size)
        self._wrapped.train()
        dist.barrier()
        start_s = time.perf_counter()
        for inputs, seeds, blocks in self._loaders[batch_size]:
            logits = self._wrapped(blocks, self._read(inputs, self._dtype))
            loss = F.cross_entropy(logits, self._g.ndata["label"][seeds])
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            if limit_s < math.inf and _max_over_ranks(time.perf_counter() - start_s) > limit_s:
                return limit_s
        return _max_over_ranks(time.perf_counter() - start_s)

    def initial_loss(self, batch_size: int) -> float:
        """Returns the mean loss of all train nodes at the initial weights, in float64. Collective."""
        model = self._build(torch.float64)
        total, count = 0.0, 0
        with torch.no_grad():
            for inputs, seeds, blocks in self._make_loader(batch_size):
                logits = model(blocks, self._read(inputs, torch.float64))
                total += float(F.cross_entropy(logits, self._g.ndata["label"][seeds], reduction="sum"))
                count += len(seeds)
        sums = torch.tensor([total, count], dtype=torch.float64)
        dist.all_reduce(sums)
        return float(sums[0] / sums[1])

    def _make_loader(self, batch_size: int) -> Any:
        sampler = NeighborSampler([-1] * self._job.model.num_layers)
        return DistNodeDataLoader(self._g, self._seeds, sampler, batch_size=batch_size, shuffle=True, drop_last=False)

    def _read(self, nodes: Tensor, dtype: torch.dtype) -> Tensor:
        rows: Tensor = self._g.ndata["feat"][nodes]
        return rows.to(dtype)


def _max_over_ranks(value: float) -> float:
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def _gather(values: list[int]) -> list[list[int]]:
    """Returns every rank's numbers; not by `all_gather_object`, which pickles."""
    rows = [torch.zeros(len(values), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, torch.tensor(values, dtype=torch.int64))
    return [row.tolist() for row in rows]
