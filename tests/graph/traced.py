# SPDX-License-Identifier: Apache-2.0
"""Small models, and how they are traced."""

from __future__ import annotations

import random
import time

import dgl.nn as dglnn
import numpy as np
import torch
from torch import Tensor, nn

from dgl_hybrid.graph.call_template import CallTemplate, StaticFields
from dgl_hybrid.graph.trace import TraceResult, trace_model

IN, HIDDEN, OUT = 5, 9, 3


class Field:
    """Stands for a graph's field: the trace asks for its row shape and dtype, and where it has zeros."""

    def __init__(self, width: int, value: float = 0.0) -> None:
        self.local = torch.full((1, width), value)


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module, norm: nn.Module | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers, self.norm, self.dropout = nn.ModuleList(layers), norm, nn.Dropout(dropout)

    def forward(self, blocks: list[object], x: Tensor) -> Tensor:
        h = x
        for index, layer in enumerate(self.layers):
            h = layer(blocks[index], self.dropout(h) if self.dropout.p else h)
            h = h.flatten(1)
            if index == 0 and self.norm is not None:
                h = self.norm(h)
        return h


def trace(model: nn.Module, *, in_feats: int = IN, num_layers: int = 2, value: float = 0.0) -> TraceResult:
    fields = StaticFields(source={}, destination={}, edge={})
    template = CallTemplate.of_convention({"feat": Field(in_feats, value)}, fields)
    return trace_model(model, template, num_layers)


class Drawing(Stack):
    """Does something to its rows that differs from one forward to the next."""

    def __init__(self, way: str) -> None:
        super().__init__(dglnn.GraphConv(IN, HIDDEN), dglnn.GraphConv(HIDDEN, OUT))
        self.way = way
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        if way == "spectral norm":
            nn.utils.parametrizations.spectral_norm(self.linear)
        self.register_buffer("num_steps", torch.zeros(()))

    def forward(self, blocks: list[object], x: Tensor) -> Tensor:
        h = self.layers[0](blocks[0], x)
        if self.way == "dropout of torch":
            h = torch.dropout(h, 0.4, True)
        elif self.way == "noise of weights":
            h = h @ torch.randn(HIDDEN, HIDDEN)
        elif self.way == "noise of rows":
            h = h + torch.randn_like(h)
        elif self.way == "a layer that is skipped":
            h = self.linear(h) if random.random() + np.random.rand() < 1.0 else h
        elif self.way == "spectral norm":
            h = self.linear(h)
        elif self.way == "schedule":
            self.num_steps += 1
            h = h * self.num_steps
        elif self.way == "the clock":
            h = h * (time.perf_counter_ns() % 1_000_003)
        return self.layers[1](blocks[1], h)
