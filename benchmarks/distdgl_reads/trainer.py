# SPDX-License-Identifier: Apache-2.0
"""Server and trainer of one job: checks, counts, then times sampled GraphSAGE with the plugin off and on.

Run by `run.py` in every part of a DistDGL job. The plugin is on in the servers of the job throughout (a server only
draws neighbours and sends rows, the same either way); trainers switch it off and on. Off means that every function of
DGL in the trainer is DGL's own object again.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dgl_hybrid  # before dgl, which it makes importable

# isort: split
import dgl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dgl.dataloading import DistNodeDataLoader, NeighborSampler
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.distdgl_reads.schedule import Schedule, write_message
from benchmarks.distdgl_reads.stock_counts import StockCounts

GATE_BATCHES = 2


class SAGE(nn.Module):
    """As in DGL's distributed example: mean aggregation, ReLU and dropout between layers."""

    def __init__(self, in_feats: int, hidden: int, num_classes: int, num_layers: int) -> None:
        super().__init__()
        widths = [in_feats, *[hidden] * (num_layers - 1), num_classes]
        self.layers = nn.ModuleList(dgl.nn.SAGEConv(a, b, "mean") for a, b in itertools.pairwise(widths))
        self.dropout = nn.Dropout(0.5)

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        for depth, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            x = layer(block, x)
            if depth + 1 < len(self.layers):
                x = self.dropout(F.relu(x))
        return x


def set_mode(mode: str) -> None:
    """Turns the plugin off, or on with an empty store."""
    dgl_hybrid.disable()
    if mode == "depcomm":
        dgl_hybrid.enable(strategy="depcomm")
    elif mode == "unlimited":
        dgl_hybrid.enable(strategy="depcache")
    elif mode != "off":
        dgl_hybrid.enable(budget=mode)


def say(kind: str, **content: Any) -> None:
    if dist.get_rank() == 0:
        print(write_message(kind, **content), flush=True)


def gather(value: Any) -> list[Any]:
    """Returns every rank's value."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Bench:
    """The graph, and what is measured on it."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.g = dgl.distributed.DistGraph(schedule.graph_name)
        self.nids = dgl.distributed.node_split(self.g.ndata["train_mask"], self.g.get_partition_book(), force_even=True)
        self.num_features = int(self.g.ndata["feat"].shape[1])
        batches = gather(-(-len(self.nids) // schedule.batch_size))
        assert len(set(batches)) == 1, f"trainers have {batches} batches: DDP needs as many on each"

    def make_loader(self, fanouts: tuple[int, ...], *, shuffle: bool = True) -> Any:
        torch.manual_seed(self.schedule.seed + dist.get_rank())
        dgl.seed(self.schedule.seed + dist.get_rank())
        sampler = NeighborSampler(list(fanouts))
        return DistNodeDataLoader(
            self.g, self.nids, sampler, batch_size=self.schedule.batch_size, shuffle=shuffle, drop_last=False
        )

    def describe(self) -> None:
        say(
            "graph",
            num_nodes=self.g.num_nodes(),
            num_edges=self.g.num_edges(),
            feat_dim=self.num_features,
            feat_bytes=self.g.num_nodes() * self.num_features * 4,
            train_nodes=sum(gather(len(self.nids))),
        )

    # ---------------------------------------------------------------- the gate

    def check(self) -> None:
        """Full neighbourhoods leave nothing to chance: all modes must read the same; with nothing held, as often."""
        fanouts = (-1,) * len(self.schedule.fanouts[0])
        truth: list[tuple[Tensor, Tensor, int]] = []
        stock: dict[str, int] = {}
        for mode in self.schedule.count_modes:
            set_mode(mode)
            loader = self.make_loader(fanouts, shuffle=False)
            dgl_hybrid.reset_read_counts()
            with StockCounts() if mode == "off" else _Nothing() as counts:
                batches = [
                    (*_sorted_rows(inputs, self.g.ndata["feat"][inputs]), sum(b.num_edges() for b in blocks))
                    for inputs, _, blocks in itertools.islice(loader, GATE_BATCHES)
                ]
            if mode == "off":
                truth, stock = batches, counts.to_json()
                continue
            for (ids, rows, num_edges), (true_ids, true_rows, true_num_edges) in zip(batches, truth, strict=True):
                assert torch.equal(ids, true_ids), f"{mode}: full neighbourhoods differ from DistDGL's"
                assert torch.equal(rows, true_rows), f"{mode}: rows of features differ from DistDGL's"
                assert num_edges == true_num_edges, f"{mode}: blocks have other edges than DistDGL's"
            if mode == "depcomm":
                counted = dgl_hybrid.read_counts()
                for name, value in stock.items():
                    assert counted[name] == value, f"{name}: the plugin counts {counted[name]}, DistDGL reads {value}"
        say("gate", fanouts=fanouts, batches=GATE_BATCHES, stock_counts=_sum(gather(stock)))

    # ---------------------------------------------------------------- counting

    def count(self, fanouts: tuple[int, ...]) -> None:
        """Reads inputs' features and seeds' labels for some epochs in each mode."""
        for mode in self.schedule.count_modes:
            dist.barrier()
            dgl_hybrid.reset_read_counts()
            set_mode(mode)
            start_s = time.perf_counter()
            loader = self.make_loader(fanouts)
            plan_s = time.perf_counter() - start_s
            plan_counts = _sum(gather(dgl_hybrid.read_counts()))
            epochs = []
            for _ in range(self.schedule.count_epochs):
                dist.barrier()
                dgl_hybrid.reset_read_counts()
                start_s = time.perf_counter()
                with StockCounts() if mode == "off" else _Nothing() as stock:
                    for inputs, seeds, _ in loader:
                        x, y = self.g.ndata["feat"][inputs], self.g.ndata["label"][seeds]
                elapsed_s = time.perf_counter() - start_s
                counts = dgl_hybrid.read_counts() | (stock.to_json() if mode == "off" else {})
                ranks = gather({**counts, "held_bytes": dgl_hybrid.held_bytes(), "elapsed_s": elapsed_s})
                epochs.append(
                    _sum(ranks)
                    | {
                        "elapsed_s": max(rank["elapsed_s"] for rank in ranks),
                        "held_bytes_max": max(rank["held_bytes"] for rank in ranks),
                    }
                )
                say("epoch")
            set_mode("off")
            assert torch.equal(x, self.g.ndata["feat"][inputs]), f"{mode}: other features than DistDGL's"
            assert torch.equal(y, self.g.ndata["label"][seeds]), f"{mode}: other labels than DistDGL's"
            plan_s = max(gather(plan_s))
            say("counts", mode=mode, fanouts=fanouts, plan_s=plan_s, plan_counts=plan_counts, epochs=epochs)

    # ---------------------------------------------------------------- timing

    def time(self, fanouts: tuple[int, ...], rate: int, num_round: int) -> None:
        """Trains in each mode; the plugin's modes begin with an empty store."""
        for mode in self.schedule.timed_modes:
            set_mode("off")
            dgl_hybrid.reset_read_counts()
            model, optimizer = self.make_model(len(fanouts))
            dist.barrier()
            start_s = time.perf_counter()
            set_mode(mode)
            loader = self.make_loader(fanouts)
            dist.barrier()
            plan_s = time.perf_counter() - start_s
            epochs = []
            for _ in range(1 + self.schedule.epochs):
                epochs.append(self.train(loader, model, optimizer))
                say("epoch")
            say(
                "times",
                mode=mode,
                fanouts=fanouts,
                rate_bits_per_s=rate,
                round=num_round,
                plan_s=max(gather(plan_s)),
                epochs=epochs,
                read_counts=_sum(gather(dgl_hybrid.read_counts())),
            )
        set_mode("off")

    def make_model(self, num_layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(self.schedule.seed)
        schedule = self.schedule
        model = SAGE(self.num_features, schedule.hidden, schedule.num_classes, num_layers)
        model = DistributedDataParallel(model)
        return model, torch.optim.Adam(model.parameters(), lr=0.003)

    def train(self, loader: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
        """One epoch; returns the seconds of the slowest rank, and means over ranks of its parts."""
        parts = {"sample_s": 0.0, "read_s": 0.0, "compute_s": 0.0}
        losses = []
        dist.barrier()
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        for inputs, seeds, blocks in _timed(loader, parts):
            read_s = time.perf_counter()
            x = self.g.ndata["feat"][inputs]
            labels = self.g.ndata["label"][seeds]
            compute_s = time.perf_counter()
            loss = F.cross_entropy(model(blocks, x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
            parts["read_s"] += compute_s - read_s
            parts["compute_s"] += time.perf_counter() - compute_s
        dist.barrier()
        elapsed_s = time.perf_counter() - start_s
        cpu_s = time.process_time() - start_cpu_s
        ranks = gather({"elapsed_s": elapsed_s, "cpu_s": cpu_s, "loss": sum(losses) / len(losses), **parts})
        slowest = max(ranks, key=lambda rank: float(rank["elapsed_s"]))
        return {name: sum(rank[name] for rank in ranks) / len(ranks) for name in slowest} | {
            "elapsed_s": slowest["elapsed_s"]
        }

    def shape(self, rate: int) -> None:
        """Has the starting process limit the links."""
        dist.barrier()
        if dist.get_rank() == 0:
            answer = Path(self.schedule.answers, f"shaped-{time.monotonic_ns()}")
            say("shape", rate_bits_per_s=rate, answer=str(answer))
            while not answer.exists():
                time.sleep(0.02)
        dist.barrier()


class _Nothing(StockCounts):
    """Counts nothing: the plugin does."""

    def __enter__(self) -> StockCounts:
        return self

    def __exit__(self, *error: object) -> None:
        return None


def _timed(loader: Any, parts: dict[str, float]) -> Iterator[Any]:
    """Yields batches and adds the time until each to `sample_s`."""
    batches = iter(loader)
    while True:
        start_s = time.perf_counter()
        batch = next(batches, None)
        parts["sample_s"] += time.perf_counter() - start_s
        if batch is None:
            return
        yield batch


def _sorted_rows(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The order of input nodes depends on which machine's answer came first."""
    order = torch.argsort(ids)
    return ids[order], rows[order]


def _sum(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: sum(rank[name] for rank in ranks) for name in ranks[0]}


def main() -> None:
    schedule = Schedule.from_json(sys.argv[1])
    dgl.distributed.initialize(os.environ["DGL_IP_CONFIG"])
    dist.init_process_group("gloo")
    bench = Bench(schedule)
    bench.describe()
    bench.check()
    for fanouts in schedule.fanouts:
        bench.count(fanouts)
    for rate in schedule.rates_bits_per_s:
        bench.shape(rate)
        for fanouts in schedule.fanouts:
            for num_round in range(schedule.rounds):
                bench.time(fanouts, rate, num_round)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
