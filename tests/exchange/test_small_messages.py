# SPDX-License-Identifier: Apache-2.0
"""Ranks that are in different places are told so by what they gather first, and get no numbers that nobody sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import dgl_hybrid
from dgl_hybrid import FullGraphLoader, PartitionedGraph
from dgl_hybrid.errors import ExchangeError
from dgl_hybrid.exchange.connect import create_communicator
from dgl_hybrid.exchange.small_messages import MOST_BYTES, NUM_WORDS, data_of, find_difference, pack, sizes_of
from tests.helpers.exactness import Case
from tests.helpers.graphs import NUM_FEATURES
from tests.helpers.world import run_ranks, run_ranks_expect_errors


@pytest.mark.parametrize("size", [0, 1, 8, MOST_BYTES])
def test_short_data_lies_in_the_words(size: int) -> None:
    data = bytes(1 + at % 250 for at in range(size))
    words = pack("a message", "a place", data)
    assert words.shape == (NUM_WORDS,)
    table = np.stack([words, pack("a message", "a place", b"other")])
    assert sizes_of(table) == [size, 5]
    assert data_of(table) == [data, b"other"]
    assert find_difference(table) is None


def test_who_is_elsewhere_is_named() -> None:
    def difference(*calls: tuple[Any, str, int]) -> str | None:
        return find_difference(np.stack([pack(kind, what, bytes(size)) for kind, what, size in calls]))

    same = ("integers", "a metric", 16)
    assert difference(same, same, same) is None
    assert difference(("a message", "", 3), ("a message", "", 3000)) is None, "messages are as long as they are"
    assert difference(same, same, ("a message", "infer", 4)) == "rank 0 of 3 is in a metric, rank 2 is in infer"
    assert difference(same, ("integers", "a metric", 24)) == (
        "rank 0 of 2 gathers 2 integers in a metric, rank 1 gathers 3 integers in a metric"
    )
    assert (
        difference(("integers", "", 8), ("numbers", "", 8))
        == "rank 0 of 2 gathers 1 integers, rank 1 gathers 1 numbers"
    )
    assert difference(("a message", "", 8), same) == "rank 0 of 2 gathers a message, rank 1 is in a metric"
    long = "n" * 100
    assert difference(("a message", long, 8), ("a message", long[:60], 8)) is None


def gather_all(rank: int, world_size: int) -> list[Any]:
    c = create_communicator()
    long = {"rank": rank, "words": ["ü" * (rank * 900)]}
    many = [rank * 1000 + k for k in range(200)]
    return [
        c.gather_ints([rank, -(2**63), 2**63 - 1]),
        c.gather_ints([]),
        c.gather_ints(many),
        c.gather_floats([rank / 3, float("inf"), -0.0, 5e-324]),
        c.gather_json(long),
        c.gather_json(None),
        c.broadcast_json(long),
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_everything_that_is_gathered_arrives(world_size: int) -> None:
    ranks = range(world_size)
    longs = [{"rank": rank, "words": ["ü" * (rank * 900)]} for rank in ranks]
    for told in run_ranks(world_size, gather_all):
        assert told == [
            [[rank, -(2**63), 2**63 - 1] for rank in ranks],
            [[] for _ in ranks],
            [[rank * 1000 + k for k in range(200)] for rank in ranks],
            [[rank / 3, float("inf"), -0.0, 5e-324] for rank in ranks],
            longs,
            [None] * world_size,
            longs[0],
        ]


def gather_other_numbers(rank: int, world_size: int) -> Any:
    return create_communicator().gather_ints([9] if rank == world_size - 1 else list(range(7)))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_lists_of_other_lengths_are_refused_on_all_ranks(world_size: int) -> None:
    """Gloo took eight bytes for fifty-six: six numbers were whatever lay in memory; and it ended the other process."""
    errors = run_ranks_expect_errors(world_size, gather_other_numbers)
    for error in errors:
        assert error.type_name == "ExchangeError"
        assert f"rank 0 of {world_size} gathers 7 integers, rank {world_size - 1} gathers 1 integers" in error.message
        assert "an `if rank == 0: evaluate()` breaks this" in error.message


def evaluate_alone(rank: int, world_size: int, part_config: str, what: str) -> str:
    g = PartitionedGraph.open(part_config)
    model = Case(kind="sage_mean").build(NUM_FEATURES)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, strategy="depcomm")
    try:
        for epoch in range(3):
            for input_nodes, seeds, blocks in loader:
                logits = model(blocks, g.ndata["feat"][input_nodes])
                F.cross_entropy(logits, g.ndata["label"][seeds]).backward()
            if rank == 0 and epoch == 1:
                if what == "infer":
                    dgl_hybrid.infer(model, g, 2)
                elif what == "a metric":
                    dgl_hybrid.global_accuracy(
                        torch.zeros(3, 3), torch.zeros(3, dtype=torch.int64), communicator=g.communicator
                    )
                elif what == "a barrier":
                    g.communicator.barrier()
                else:
                    FullGraphLoader(g, g.owned_nodes(), 2, strategy="depcomm")
    except ExchangeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("what", ["infer", "a metric", "a barrier", "the making of a FullGraphLoader"])
def test_a_rank_that_evaluates_alone_is_told_of_at_once(what: str, folder: str) -> None:
    """The mistake that the documentation names. Gloo ended the process that was right, or it trained on as if nothing
    had been; and where ranks waited it was for the whole timeout.
    """
    for told in run_ranks(3, evaluate_alone, folder, what):
        assert f"rank 0 of 3 is in {what}, rank 1 is in the next epoch of a loader" in told
