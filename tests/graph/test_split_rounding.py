# SPDX-License-Identifier: Apache-2.0
"""Random rounding is drawn anew for every message: of each rank, layer, direction and epoch.

Were a key used twice, elements would be rounded alike in every epoch, and errors would add up instead of averaging out.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dgl_hybrid.exchange.approximate import ApproximateRows, Approximation
from dgl_hybrid.exchange.connect import create_communicator
from dgl_hybrid.exchange.parts import whole_message
from dgl_hybrid.exchange.row_codecs import Int8Codec
from dgl_hybrid.exchange.rows import extend_rows
from dgl_hybrid.graph.split_block import SplitBlock
from tests.exchange.test_partial_sums import random_world
from tests.helpers.world import run_ranks

NUM_EPOCHS, NUM_LAYERS, NUM_FIELDS = 3, 2, 2


class NotedCodec(Int8Codec):
    def __init__(self) -> None:
        self.keys: list[tuple[int, ...]] = []

    def encode(self, rows: Tensor, *, key: tuple[int, ...], out: Tensor | None = None) -> Tensor:
        self.keys.append(key)
        return super().encode(rows, key=key, out=out)


def split_keys(rank: int, world_size: int) -> list[tuple[int, ...]]:
    communicator, codec = create_communicator(), NotedCodec()
    structure = random_world(world_size, 21).structures[rank]
    layers = [
        SplitBlock(
            replace(structure, layer=1 + number),
            communicator,
            [whole_message(structure.exchange)],
            device=torch.device("cpu"),
            codec=codec,
        )
        for number in range(NUM_LAYERS)
    ]
    x = torch.ones(structure.num_held, 8, requires_grad=True)
    for _ in range(NUM_EPOCHS):
        sum(layer.sum(x).sum() for layer in layers).backward()
    return codec.keys


def extended_keys(rank: int, world_size: int) -> list[tuple[int, ...]]:
    communicator, codec = create_communicator(), NotedCodec()
    plan = random_world(world_size, 21).structures[rank].exchange
    layers = [ApproximateRows(replace(Approximation.of("int8"), codec=codec)) for _ in range(NUM_LAYERS)]
    x = torch.ones(plan.num_rows, 8, requires_grad=True)
    for _ in range(NUM_EPOCHS):
        for rows in layers:
            rows.begin_epoch()
            fields = extend_rows([x] * NUM_FIELDS, plan, communicator, approximation=rows)
            sum(field.sum() for field in fields).backward()
    return codec.keys


def test_no_key_is_used_twice() -> None:
    for run, num_fields in ((split_keys, 1), (extended_keys, NUM_FIELDS)):
        by_rank = run_ranks(3, run)
        assert all(len(keys) == 2 * NUM_EPOCHS * NUM_LAYERS * num_fields for keys in by_rank)
        keys = [key for keys in by_rank for key in keys]
        assert len(set(keys)) == len(keys)
