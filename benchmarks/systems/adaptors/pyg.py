# SPDX-License-Identifier: Apache-2.0
"""PyTorch Geometric on one device with the whole graph, its layers with the initial weights of all systems."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.systems.adaptors.base import Epoch, Sample, Stopwatch, System, pick_logits, sample_ids
from benchmarks.systems.job import Job
from dgl_hybrid.launch.workspace import DataConfig

try:
    from torch_geometric.nn import GATConv, GCNConv, SAGEConv
except ImportError as error:
    raise ModuleNotFoundError("PyTorch Geometric is not installed (pip install torch_geometric)") from error


class PyG(System):
    """PyTorch Geometric, all vertices in one step.

    Args:
        device: Where it trains.
        edges: "index", a (2, E) `edge_index`, or "sparse", a `torch.sparse_csr_tensor`, whose sums are cuSPARSE's.
    """

    def __init__(self, job: Job, *, device: str = "cuda", edges: str = "index") -> None:
        super().__init__(job)
        self._device, self._edges = torch.device(device), edges

    def prepare(self) -> dict[str, Any]:
        graph = DataConfig(**self.job.data).load().graph
        self.x, self.label = graph.ndata["feat"].to(self._device), graph.ndata["label"].to(self._device)
        self.train_ids = graph.ndata["train_mask"].nonzero().flatten()
        self.train_rows = self.train_ids.to(self._device)
        src, dst = (end.to(self._device) for end in graph.edges())
        self.edges = torch.stack([src, dst])
        if self._edges == "sparse":
            ones = torch.ones(len(src), device=self._device)
            size = (graph.num_nodes(), graph.num_nodes())
            self.edges = torch.sparse_coo_tensor(torch.stack([dst, src]), ones, size).coalesce().to_sparse_csr()
        self.layers = nn.ModuleList(convert(layer) for layer in self.make_model().layers).to(self._device)
        self.optimizer = self.make_optimizer(self.layers)
        return {}

    def _logits(self) -> Tensor:
        h = self.x
        for number, layer in enumerate(self.layers, 1):
            h = layer(h, self.edges)
            if number < len(self.layers):
                h = F.elu(h) if isinstance(layer, GATConv) else F.relu(h)
        return h[self.train_rows]

    def _step(self) -> tuple[Tensor, Tensor]:
        logits = self._logits()
        loss = F.cross_entropy(logits, self.label[self.train_rows])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach(), logits.detach()

    def check(self) -> Sample:
        losses, logits = [], {}
        for epoch in range(self.job.gate_epochs):
            loss, rows = self._step()
            losses.append(float(loss))
            if epoch == 0:
                logits = pick_logits(self.train_ids, rows.cpu(), sample_ids(self.job))
        why = "its layers lay out their weights otherwise"
        return Sample(losses=losses, logits=logits, why_no_gradients=why)

    def run_epoch(self) -> Epoch:
        with Stopwatch(self._device) as watch:
            self._step()
        return Epoch(elapsed_s=watch.elapsed_s, cpu_s=watch.cpu_s)

    def facts(self) -> dict[str, Any]:
        return {"gpu_bytes": torch.cuda.max_memory_allocated(self._device)} if self._device.type == "cuda" else {}


def convert(layer: Any) -> nn.Module:
    """Returns the layer of PyTorch Geometric that computes what a layer of `dgl.nn` does, with its weights.

    The graph has self-loops, so that none are added. Normalisation is kept after the first epoch (`cached`).
    """
    name = type(layer).__name__
    with torch.no_grad():
        if name == "GraphConv":
            a, b = layer.weight.shape
            gcn = GCNConv(a, b, add_self_loops=False, cached=True)
            gcn.lin.weight.copy_(layer.weight.t())
            gcn.bias.copy_(layer.bias)
            return gcn
        if name == "SAGEConv":
            b, a = layer.fc_neigh.weight.shape
            sage = SAGEConv(a, b, aggr="mean")
            sage.lin_l.weight.copy_(layer.fc_neigh.weight)
            sage.lin_r.weight.copy_(layer.fc_self.weight)
            sage.lin_l.bias.copy_(layer.bias if layer.fc_self.bias is None else layer.fc_self.bias)
            return sage
        if name == "GATConv":
            heads, width = layer.attn_l.shape[1:]
            gat = GATConv(layer.fc.in_features, width, heads, add_self_loops=False, negative_slope=0.2)
            linear = getattr(gat, "lin", None) or gat.lin_src
            linear.weight.copy_(layer.fc.weight)
            gat.att_src.copy_(layer.attn_l)
            gat.att_dst.copy_(layer.attn_r)
            gat.bias.copy_(layer.bias.flatten())
            return gat
    raise ValueError(f"no layer of PyTorch Geometric is known for {name}")
