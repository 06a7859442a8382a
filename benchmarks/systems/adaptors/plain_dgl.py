# SPDX-License-Identifier: Apache-2.0
"""DGL as it is, one process, the whole graph. What every other system is held to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dgl
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.systems.adaptors.base import Epoch, Sample, System, pick_logits, sample_ids, sketch_model, timed
from dgl_hybrid.launch.workspace import DataConfig


class PlainDGL(System):
    """Nothing of ours but the loading of the graph and the assembly of `dgl.nn` layers."""

    def join(self) -> None:
        pass

    def prepare(self) -> dict[str, Any]:
        dataset = DataConfig(**self.job.data).load()
        graph = dataset.graph
        self.x, self.label = graph.ndata.pop("feat"), graph.ndata.pop("label")
        self.masks = {name: graph.ndata.pop(name) for name in ("train_mask", "val_mask", "test_mask")}
        self.train_ids = self.masks["train_mask"].nonzero().flatten()
        # Both formats that training reads, made now rather than in the first epoch.
        self.graph = graph.formats(["csr", "csc", "coo"])
        self.graph.create_formats_()
        self.model = self.make_model()
        self.optimizer = self.make_optimizer(self.model)
        return {}

    def _train_logits(self) -> Tensor:
        rows: Tensor = self.model([self.graph] * self.job.num_layers, self.x)
        return rows[self.train_ids]

    def _step(self) -> tuple[float, Tensor]:
        logits = self._train_logits()
        loss = F.cross_entropy(logits, self.label[self.train_ids])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss), logits

    def check(self) -> Sample:
        losses, logits, gradients = [], {}, {}
        for epoch in range(self.job.gate_epochs):
            loss, rows = self._step()
            losses.append(loss)
            if epoch == 0:
                logits = pick_logits(self.train_ids, rows, sample_ids(self.job))
                gradients = sketch_model(self.model)
        return Sample(losses=losses, logits=logits, gradients=gradients)

    def run_epoch(self) -> Epoch:
        return timed(self._step)

    def accuracies(self, files: list[Path]) -> list[dict[str, float]]:
        found = []
        model = self.make_model().eval()
        for file in files:
            model.load_state_dict(load_file(str(file)))
            with torch.no_grad():
                is_right = model([self.graph] * self.job.num_layers, self.x).argmax(1) == self.label
            found.append(
                {name.removesuffix("_mask"): float(is_right[mask].float().mean()) for name, mask in self.masks.items()}
            )
        return found


class PlainDGLBlocks(PlainDGL):
    """The same on message-flow graphs from the train vertices down, made once: no row is computed that no loss needs.

    Not for GCN, whose norm takes out-degrees, and those of blocks are not the graph's.
    """

    def prepare(self) -> dict[str, Any]:
        facts = super().prepare()
        sampler = dgl.dataloading.MultiLayerFullNeighborSampler(self.job.num_layers)
        inputs, _, self.blocks = sampler.sample_blocks(self.graph, self.train_ids)
        for block in self.blocks:
            block.create_formats_()
        self.rows = self.x[inputs]
        return facts

    def _train_logits(self) -> Tensor:
        logits: Tensor = self.model(self.blocks, self.rows)
        return logits
