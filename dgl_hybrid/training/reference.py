# SPDX-License-Identifier: Apache-2.0
"""The same training with plain DGL: one process, the whole graph, nothing of ours. What every other run is held to."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid.datasets import GraphDataset
from dgl_hybrid.training.config import TrainJob
from dgl_hybrid.training.models import build_model
from dgl_hybrid.training.report import PLAIN_DGL, Accuracy, EpochReport, LayerReport, TrainReport
from dgl_hybrid.training.resident_memory import current_rss_bytes, peak_rss_bytes


def train_reference(job: TrainJob, dataset: GraphDataset, *, base_rss_bytes: int | None = None) -> TrainReport:
    """Trains on the whole graph in this process. Dropout, if any, is PyTorch's own: then losses differ from ours.

    Args:
        job: `part_config` and `strategy` are not used.
        dataset: The graph.
        base_rss_bytes: What the process held before the graph was loaded; None: what it holds now, graph included.
    """
    if base_rss_bytes is None:
        base_rss_bytes = current_rss_bytes()
    run = ReferenceRun(job, dataset)
    config, graph, model = job.training, dataset.graph, run.model
    epochs = [run.run_epoch() for _ in range(config.epochs)]
    model.eval()
    with torch.no_grad():
        right = model(run.blocks, run.x).argmax(1) == graph.ndata["label"]
    final = Accuracy(
        epoch=config.epochs,
        train=_share(right, graph.ndata["train_mask"]),
        val=_share(right, graph.ndata["val_mask"]),
        test=_share(right, graph.ndata["test_mask"]),
    )
    return TrainReport(
        strategy=PLAIN_DGL,
        ranks=1,
        model=job.model.model,
        dataset=dataset.name,
        dtype=config.dtype,
        epochs=tuple(epochs),
        layers=tuple(
            LayerReport(layer=layer + 1, cached=0, communicated=0, forward_bytes=0, backward_bytes=0)
            for layer in range(job.model.num_layers)
        ),
        best=final,
        final=final,
        peak_rss_bytes=(peak_rss_bytes(),),
        base_rss_bytes=(base_rss_bytes,),
        gradient_bytes=_gradient_bytes(model),
        predicted_epoch_s=None,
        chosen_plan="none",
    )


class ReferenceRun:
    """The same, an epoch at a time."""

    def __init__(self, job: TrainJob, dataset: GraphDataset) -> None:
        graph, config = dataset.graph, job.training
        dtype = getattr(torch, config.dtype)
        self.x = graph.ndata["feat"].to(dtype)
        self.blocks = [graph] * job.model.num_layers
        self.model = build_model(
            job.model.model,
            int(self.x.shape[1]),
            job.model.hidden,
            dataset.num_classes,
            job.model.num_layers,
            dropout=job.model.dropout,
            heads=job.model.heads,
            seed=config.seed,
            dtype=dtype,
        )
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        self._label, self._train_mask = graph.ndata["label"], graph.ndata["train_mask"]

    def run_epoch(self) -> EpochReport:
        """Trains one epoch."""
        self.model.train()
        start_s = time.perf_counter()
        logits = self.model(self.blocks, self.x)
        loss = F.cross_entropy(logits[self._train_mask], self._label[self._train_mask])
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        time_s = time.perf_counter() - start_s
        return EpochReport(loss=loss.item(), time_s=time_s, bytes_sent=0, compute_s=time_s, exchange_s=0.0, wait_s=0.0)


def _share(right: Tensor, mask: Tensor) -> float:
    return float(right[mask].double().mean())


def _gradient_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
