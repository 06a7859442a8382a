# SPDX-License-Identifier: Apache-2.0
"""Messages of a ring and the edges that each of them serves, without processes: everything once, nothing too long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.parts import Message, ring_messages, split_layer, whole_message
from tests.exchange.test_partial_sums import World, random_world
from tests.helpers.thinning import pairwise


class Answering(Communicator):
    """What `gather_ints` returns is known: every rank's values."""

    def __init__(self, values: list[list[int]]) -> None:
        super().__init__(None)
        self._values = values

    def gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        assert list(values) in self._values
        return self._values


def messages_of(world: World, chunk_rows: Sequence[int]) -> list[tuple[Message, ...]]:
    """By rank, which asks for `chunk_rows[rank]`."""
    plans = [structure.exchange for structure in world.structures]
    values = [[rows, *plan.recv_counts] for rows, plan in zip(chunk_rows, plans, strict=True)]
    return [ring_messages(plan, Answering(values), rows) for rows, plan in zip(chunk_rows, plans, strict=True)]


@pairwise(world_size=[2, 3, 4], chunk_rows=[1, 2, 5, 1000], is_sparse=[False, True])
def test_a_ring_carries_every_row_once(world_size: int, chunk_rows: int, is_sparse: bool) -> None:
    world = random_world(world_size, 31, num_edges=60 if is_sparse else 220)
    by_rank = messages_of(world, [chunk_rows] * world_size)
    assert len({len(messages) for messages in by_rank}) == 1
    for together in zip(*by_rank, strict=True):
        receivers = Counter[int]()
        for rank, message in enumerate(together):
            assert max(sum(message.send_counts), sum(message.recv_counts)) <= chunk_rows
            peers = [peer for peer, count in enumerate(message.send_counts) if count]
            assert len(peers) <= 1
            receivers.update(peers)
            for peer, other in enumerate(together):
                assert message.send_counts[peer] == other.recv_counts[rank]
        assert max(receivers.values(), default=0) <= 1
    for structure, messages in zip(world.structures, by_rank, strict=True):
        plan = structure.exchange
        sent = Counter(row for message in messages for begin, end in message.sent for row in range(begin, end))
        received = Counter(row for message in messages for begin, end in message.received for row in range(begin, end))
        assert sent == Counter(range(plan.num_sent))
        assert received == Counter(range(plan.num_received))
    longest = max(max(structure.exchange.recv_counts) for structure in world.structures)
    if chunk_rows >= longest:
        assert len(by_rank[0]) == world_size - 1


def test_the_smallest_chunk_of_all_ranks_counts() -> None:
    world = random_world(3, 31)
    assert messages_of(world, [7, 2, 100]) == messages_of(world, [2, 2, 2])
    assert messages_of(world, [7, 2, 100]) != messages_of(world, [7, 7, 7])


@pytest.mark.parametrize("chunk_rows", [None, 1, 4])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_edge_is_in_one_place(world_size: int, chunk_rows: int | None) -> None:
    """(destination, source) of every entry are those of the edge at its position."""
    world = random_world(world_size, 32)
    rings = messages_of(world, [chunk_rows or 1] * world_size)
    for structure, ring in zip(world.structures, rings, strict=True):
        messages = [whole_message(structure.exchange)] if chunk_rows is None else ring
        split = split_layer(structure, messages)
        dst = torch.repeat_interleave(torch.arange(structure.num_dst), structure.indptr.diff())
        held = split.held.in_edges
        rows = torch.repeat_interleave(torch.arange(structure.num_dst), held.indptr.diff().long())
        positions = split.edge_positions.of_held().long()
        assert torch.equal(rows, dst[positions])
        assert torch.equal(held.indices.long(), structure.indices[positions])
        found = [positions]
        for number, (part, message) in enumerate(zip(split.parts, messages, strict=True)):
            edges, positions = part.edges.in_edges, split.edge_positions.of_part(number).long()
            rows = torch.repeat_interleave(part.dst_rows, edges.indptr.diff().long())
            carried = torch.cat([torch.arange(begin, end) for begin, end in message.received])
            assert torch.equal(rows, dst[positions])
            assert torch.equal(structure.num_held + carried[edges.indices.long()], structure.indices[positions])
            sent = torch.cat([structure.exchange.send_index[begin:end] for begin, end in message.sent])
            assert part.send_index is not None
            assert torch.equal(part.send_index.long(), sent)
            assert (part.send_counts, part.recv_counts) == (message.send_counts, message.recv_counts)
            found.append(positions)
        assert torch.equal(torch.cat(found).sort().values, torch.arange(len(structure.indices)))
