# SPDX-License-Identifier: Apache-2.0
"""SAR (github.com/IntelLabs/SAR), sequential aggregation and rematerialisation, from the user's own checkout."""

from __future__ import annotations

import importlib.util
import sys
import time
import types
from pathlib import Path
from typing import Any

import dgl.nn.pytorch.conv.gatconv as gatconv
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

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
    sketch_model,
)
from benchmarks.systems.job import Job


class SAR(System):
    """The layers of `dgl.nn` on SAR's graph.

    Args:
        blocks: "full": every layer on the whole graph, as in SAR's examples; "mfg": message-flow graphs, which compute
            only what the train vertices need.
        rematerialise: "yes" (SAR's default) fetches rows again in backward instead of keeping them.
    """

    def __init__(self, job: Job, *, blocks: str = "full", rematerialise: str = "yes") -> None:
        super().__init__(job)
        self._has_mfgs = blocks == "mfg"
        self._is_rematerialising = rematerialise == "yes"

    def join(self) -> None:
        dist.init_process_group("gloo", timeout=PATIENCE)  # of one rank, too: SAR cannot do without

    def prepare(self) -> dict[str, Any]:
        job = self.job
        self.sar = sar = import_sar(Path(job.peers))
        sar.initialize_comms(self.rank, job.world_size, "", "gloo")
        sar.Config.disable_sr = not self._is_rematerialising
        # SAR's own patch for attention knows one of its two graph classes only; its edge softmax takes both.
        gatconv.edge_softmax = lambda graph, logits: sar.edge_softmax(graph, logits)
        part = sar.load_dgl_partition_data(job.part_config, self.rank, torch.device("cpu"))
        features = sar.suffix_key_lookup(part.node_features, "feat")
        label = sar.suffix_key_lookup(part.node_features, "label").long()
        own = sar.suffix_key_lookup(part.node_features, "train_mask").bool().nonzero().flatten()
        first = part.node_ranges[self.rank][0]
        if self._has_mfgs:
            self.blocks = sar.construct_mfgs(part, own + first, job.num_layers)
            self.x, self.rows = features[self.blocks[0].input_nodes], slice(None)
        else:
            self.blocks = [sar.construct_full_graph(part)] * job.num_layers
            self.x, self.rows = features, own
        self.label, self.seeds = label[own], own + first
        del part, features, label
        count = torch.tensor([len(own)])
        dist.all_reduce(count)
        self.num_train = int(count)
        self.model = self.make_model()
        self.optimizer = self.make_optimizer(self.model)
        self.exchange_s = 0.0
        self._time_exchanges()
        return {"blocks": "mfg" if self._has_mfgs else "full", "rematerialises": self._is_rematerialising}

    def _time_exchanges(self) -> None:
        """Adds up the seconds inside SAR's exchanges. (Its communication thread overlaps them with work.)"""
        module = sys.modules["sar.core.sar_aggregation"]
        exchange = module.exchange_single_tensor

        def timed_exchange(*args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return exchange(*args, **kwargs)
            finally:
                self.exchange_s += time.perf_counter() - start_s

        module.exchange_single_tensor = timed_exchange  # type: ignore[attr-defined]

    def _step(self) -> tuple[Tensor, Tensor]:
        logits = self.model(self.blocks, self.x)[self.rows]
        loss = F.cross_entropy(logits, self.label, reduction="sum") / self.num_train
        self.optimizer.zero_grad()
        loss.backward()
        self.sar.gather_grads(self.model)
        self.optimizer.step()
        return loss.detach(), logits

    def check(self) -> Sample:
        losses, logits, gradients = [], {}, {}
        for epoch in range(self.job.gate_epochs):
            loss, rows = self._step()
            losses.append(mean_over_ranks(float(loss), 1 / self.job.world_size))
            if epoch == 0:
                logits = pick_logits(original_ids(self.job)[self.seeds], rows, sample_ids(self.job))
                gradients = sketch_model(self.model)
        return Sample(losses=losses, logits=logits, gradients=gradients)

    def run_epoch(self) -> Epoch:
        self.exchange_s = 0.0
        with Stopwatch() as watch:
            self._step()
        return Epoch(elapsed_s=watch.elapsed_s, cpu_s=watch.cpu_s, exchange_s=self.exchange_s)


def import_sar(peers: Path) -> Any:
    """Imports SAR from `peers/SAR`; it wants a package to find interfaces, which is not asked when we have joined."""
    if importlib.util.find_spec("ifaddr") is None:
        stub = types.ModuleType("ifaddr")
        stub.get_adapters = list  # type: ignore[attr-defined]
        sys.modules["ifaddr"] = stub
    sys.path.insert(0, str(peers / "SAR"))
    import sar  # type: ignore[import-not-found]

    return sar
