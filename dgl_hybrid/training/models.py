# SPDX-License-Identifier: Apache-2.0
"""The usual models, of unmodified `dgl.nn` layers, called as `model(blocks, x)`.

They run on blocks, on `LayerBlock`s and, with `[graph] * num_layers`, on a plain `DGLGraph`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import dgl.nn as dglnn
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid.training.config import ModelConfig


class GraphStack(nn.Module):
    """Layers of one kind with an activation between them.

    Args:
        layers: Called as `layer(block, h)`; of several heads, joined between layers and averaged after the last.
        activation: Between layers; None where layers have their own.
        dropout: Before every layer; layers that drop their own inputs are given 0.
        drops_inputs: Whether dropout applies before the first layer, too.
        norms: For every layer but the last, or None.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        activation: Callable[[Tensor], Tensor] | None,
        *,
        dropout: float = 0.0,
        drops_inputs: bool = True,
        norms: Sequence[nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(norms) if norms is not None else None
        self.dropout = nn.Dropout(dropout)
        self.drops_inputs = drops_inputs
        self.activation = activation

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        """Returns (num_seeds, num_classes) logits.

        Args:
            blocks: One for each layer.
            x: (num_input_nodes, in_feats).
        """
        h = x
        for index, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            h = layer(block, self.dropout(h) if index > 0 or self.drops_inputs else h)
            is_last = index == len(self.layers) - 1
            if h.dim() == 3:
                h = h.flatten(1) if not is_last or h.shape[1] == 1 else h.mean(1)
            if not is_last:
                if self.norms is not None:
                    h = self.norms[index](h)
                h = h if self.activation is None else self.activation(h)
        return h


def build_model(
    name: str,
    in_feats: int,
    hidden: int,
    num_classes: int,
    num_layers: int,
    *,
    dropout: float = 0.0,
    heads: int = 4,
    seed: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> GraphStack:
    """Builds a model. Vertices without in-edges are allowed everywhere.

    Args:
        name: "gcn" (GraphConv, norm "both"), "sage" (SAGEConv, mean), "gat", "gatv2", or "gin" (sum, a two-layer
            perceptron, batch norm between layers).
        in_feats: F.
        hidden: Width of the hidden layers, all heads together.
        num_classes: Width of the output.
        num_layers: L.
        dropout: Before every layer ("sage", "gin": every hidden layer), and on attention.
        heads: Of hidden attention layers; the last has one.
        seed: Weights are drawn after `torch.manual_seed(seed)`, in float32 whatever `dtype`; None goes on with the
            generator as it is.
        dtype: Of the parameters.
    Raises:
        ValueError: An argument is out of range or the name unknown.
    """
    ModelConfig(model=name, num_layers=num_layers, hidden=hidden, heads=heads, dropout=dropout)
    if seed is not None:
        torch.manual_seed(seed)
    widths = [in_feats] + [hidden] * (num_layers - 1) + [num_classes]
    pairs = list(itertools.pairwise(widths))
    # Inside the layer, where an optimised one takes it along with its product.
    activations = [F.relu] * (num_layers - 1) + [None]
    if name == "gcn":
        layers = [
            dglnn.GraphConv(a, b, norm="both", allow_zero_in_degree=True, activation=relu)
            for (a, b), relu in zip(pairs, activations, strict=True)
        ]
        model = GraphStack(layers, None, dropout=dropout)
    elif name == "sage":
        # As DGL's own GraphSAGE: features go in whole. They are then the same in every epoch, and free to cache.
        layers = [
            dglnn.SAGEConv(a, b, "mean", activation=relu) for (a, b), relu in zip(pairs, activations, strict=True)
        ]
        model = GraphStack(layers, None, dropout=dropout, drops_inputs=False)
    elif name == "gin":
        layers = [dglnn.GINConv(_perceptron(a, b), "sum", learn_eps=True) for a, b in pairs]
        norms = [nn.BatchNorm1d(b) for _, b in pairs[:-1]]
        model = GraphStack(layers, F.relu, dropout=dropout, drops_inputs=False, norms=norms)
    else:
        kind = dglnn.GATConv if name == "gat" else dglnn.GATv2Conv
        layers = []
        for index, (a, b) in enumerate(pairs):
            is_last = index == num_layers - 1
            k, elu = (1, None) if is_last else (heads, F.elu)
            dropouts = {"feat_drop": dropout, "attn_drop": dropout}
            layers.append(kind(a, b // k, k, activation=elu, allow_zero_in_degree=True, **dropouts))
        model = GraphStack(layers, None)
    return model.to(dtype)


def _perceptron(in_feats: int, out_feats: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(in_feats, out_feats), nn.ReLU(), nn.Linear(out_feats, out_feats))
