# SPDX-License-Identifier: Apache-2.0
"""Exact full-graph training of a GraphSAGE under PyTorch Lightning, one process for each part.

    pip install pytorch-lightning
    dgl-hybrid partition --data powerlaw --ranks 2 --out parts
    python examples/lightning_full_graph_sage.py parts/powerlaw.json

The loaders are a data module's; layers, step and optimizer are as for sampled blocks. What Lightning logs is the mean
over ranks, which have different numbers of seeds: accuracy is counted over all ranks before it is logged.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import dgl
import dgl.nn as dglnn
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dgl_hybrid

Batch = tuple[Tensor, Tensor, list[dgl.DGLGraph]]


class FullGraph(pl.LightningDataModule):
    def __init__(self, part_config: str) -> None:
        super().__init__()
        self.part_config = part_config

    def setup(self, stage: str) -> None:
        self.g = dgl_hybrid.PartitionedGraph.open(self.part_config)
        labels = self.g.ndata["label"].local
        # A rank may own no vertex.
        tops = self.g.communicator.gather_ints([int(labels.max()) if len(labels) else -1])
        self.num_classes = 1 + max(top for (top,) in tops)
        sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
            2, prefetch_node_feats=["feat"], prefetch_labels=["label"]
        )
        self.train = dgl_hybrid.FullGraphLoader(self.g, self.g.owned_nodes("train_mask"), sampler)
        # Its blocks are built once; there is nothing to plan for an evaluation now and then.
        self.val = dgl_hybrid.FullGraphLoader(self.g, self.g.owned_nodes("val_mask"), sampler, strategy="depcomm")

    def train_dataloader(self) -> dgl_hybrid.FullGraphLoader:
        return self.train

    def val_dataloader(self) -> dgl_hybrid.FullGraphLoader:
        return self.val


class SAGE(pl.LightningModule):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.dropout = nn.Dropout(0.5)

    def configure_model(self) -> None:
        if hasattr(self, "layers"):
            return  # Lightning asks before it fits and before it tests
        graph = self.trainer.datamodule
        in_feats = graph.g.ndata["feat"].shape[1]
        self.layers = nn.ModuleList(
            [dglnn.SAGEConv(in_feats, self.hidden, "mean"), dglnn.SAGEConv(self.hidden, graph.num_classes, "mean")]
        )

    def forward(self, blocks: list[dgl.DGLGraph], x: Tensor) -> Tensor:
        h = F.relu(self.layers[0](blocks[0], x))
        return self.layers[1](blocks[1], self.dropout(h))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        _, _, blocks = batch
        return F.cross_entropy(self(blocks, blocks[0].srcdata["feat"]), blocks[-1].dstdata["label"])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        _, _, blocks = batch
        loader = self.trainer.datamodule.val
        logits = self(blocks, blocks[0].srcdata["feat"])[: loader.num_seeds]
        labels = blocks[-1].dstdata["label"][: loader.num_seeds]
        accuracy = dgl_hybrid.global_accuracy(logits, labels, communicator=loader.communicator)
        self.log("val_acc", accuracy, batch_size=1, sync_dist=True)  # the same on every rank

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part_config")
    parser.add_argument("--num-epochs", type=int, default=40)
    args = parser.parse_args()

    config: dict[str, Any] = json.loads(Path(args.part_config).read_text("utf-8"))
    graph = FullGraph(args.part_config)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=config["num_parts"],
        strategy="ddp",
        max_epochs=args.num_epochs,
        check_val_every_n_epoch=10,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    pl.seed_everything(0)
    trainer.fit(SAGE(64), datamodule=graph)
    if trainer.is_global_zero:
        print(f"validation accuracy {trainer.callback_metrics['val_acc'].item():.4f}")


if __name__ == "__main__":
    main()
