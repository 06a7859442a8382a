# SPDX-License-Identifier: Apache-2.0
"""What split layers send and hold: partial sums are fewer bytes and the default over a network; chunks bound memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from dgl import function as fn
from torch import Tensor

from dgl_hybrid import FullGraphLoader, PartitionedGraph, infer
from dgl_hybrid.exchange.connect import RankTransport, create_communicator
from dgl_hybrid.exchange.partial_sums import cover_reads
from dgl_hybrid.graph.optimize import optimize
from tests.helpers.exactness import Case, StepResult, assert_close, assert_same_step, reference_step, step_on
from tests.helpers.graphs import NUM_CLASSES, power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.thinning import each_value, pairwise
from tests.helpers.world import run_ranks


@dataclass(frozen=True, kw_only=True)
class Message:
    """Of a layer, as a rank began it."""

    backward: bool
    num_bytes: int
    longest: int
    """Rows sent or received, whichever are more."""


def noted_messages(g: PartitionedGraph) -> list[Message]:
    """Returns a list that grows with every message of a layer; others, of features and ids, are not for it."""
    start, messages = g.communicator.start_exchange, list[Message]()

    def noted(send: Tensor, send_counts: Any, recv_counts: Any, **options: Any) -> Any:
        if options.get("layer"):
            longest = max(len(send), sum(recv_counts))
            messages.append(Message(backward=options["backward"], num_bytes=send.nbytes, longest=longest))
        return start(send, send_counts, recv_counts, **options)

    g.communicator.start_exchange = noted  # type: ignore[method-assign]
    return messages


# -------------------------------------------------------------------- partial sums


CHOICES = (None, True, False)
"""Of `partial_sums`."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One step, and one evaluation after it."""

    step: StepResult
    sent: dict[str, int]
    """Bytes that left in training, forward and backward, and in the evaluation."""
    rows: dict[str, int]
    """That this rank receives in all layers: plainly, and by the fewest rows and sums."""


def train_and_evaluate(
    rank: int, world_size: int, folder: str, case: Case, transport: RankTransport, partial_sums: bool | None
) -> Trained:
    g = PartitionedGraph.open(folder, communicator=create_communicator(transport=transport))
    messages = noted_messages(g)
    step = step_on(g, g, replace(case, partial_sums=partial_sums), g.partition.orig_node_ids)
    num_trained, nothing = len(messages), [torch.empty(0, dtype=torch.int64)] * case.num_layers
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), case.num_layers, plan=nothing, partial_sums=partial_sums)
    infer(case.build(g.ndata["feat"].shape[1]), g, case.num_layers, loader=loader)
    sent = {
        "forward": sum(m.num_bytes for m in messages[:num_trained] if not m.backward),
        "backward": sum(m.num_bytes for m in messages[:num_trained] if m.backward),
        "evaluation": sum(m.num_bytes for m in messages[num_trained:]),
    }
    layers = loader.sets.layers
    fewest = sum(order.num_wire_rows for layer in layers for order in cover_reads(layer).orders)
    return Trained(step=step, sent=sent, rows={"plain": sum(s.exchange.num_received for s in layers), "fewest": fewest})


def train_each_way(rank: int, world_size: int, *setting: Any) -> list[Trained]:
    return [train_and_evaluate(rank, world_size, *setting, choice) for choice in CHOICES]


@each_value(kind=["gin", "sage_mean", "gcn_none"], transport=["collective", "shared_memory"], world_size=[2, 3, 4])
def test_partial_sums_are_fewer_bytes_and_the_default_over_a_network(
    kind: str, transport: RankTransport, world_size: int, partitions: PartitionStore
) -> None:
    graph = power_law()
    folder, case = partitions.get("power_law", graph, world_size), Case(kind=kind, num_layers=2)
    sent: dict[bool | None, dict[str, int]] = {}
    by_rank = run_ranks(world_size, train_each_way, folder, case, transport)
    for choice, ranks in zip(CHOICES, zip(*by_rank, strict=True), strict=True):
        assert_same_step([one.step for one in ranks], reference_step(graph, case))
        sent[choice] = {way: sum(one.sent[way] for one in ranks) for way in ranks[0].sent}
    rows = {name: sum(one.rows[name] for one in ranks) for name in ("plain", "fewest")}
    assert rows["fewest"] < 0.95 * rows["plain"], "this graph shows nothing: there is little to save"
    for way in ("forward", "backward"):
        assert sent[True][way] < sent[False][way]
    assert sent[None] == sent[transport == "collective"]
    # What is not trained is not worth the search for the fewest rows.
    assert sent[True]["evaluation"] == sent[False]["evaluation"] == sent[False]["forward"]
    if kind == "gin":  # every layer sends rows of its own input's width: the first 5 elements, the second 4
        assert sent[False]["forward"] == sent[False]["backward"]


def test_every_row_of_the_cover_travels_once(partitions: PartitionStore) -> None:
    """Bytes are those of the fewest rows, counted from the structure."""
    graph = power_law()
    case = Case(kind="gcn_none", num_layers=1)
    ranks = run_ranks(3, train_and_evaluate, partitions.get("power_law", graph, 3), case, "collective", None)
    rows = {name: sum(one.rows[name] for one in ranks) for name in ("plain", "fewest")}
    row_bytes = NUM_CLASSES * 8  # narrowed before it is summed
    for way, count in (("forward", "fewest"), ("backward", "fewest"), ("evaluation", "plain")):
        assert sum(one.sent[way] for one in ranks) == rows[count] * row_bytes


# -------------------------------------------------------------------- chunks


def in_chunks(
    rank: int, world_size: int, folder: str, case: Case, transport: RankTransport
) -> tuple[dict[str, list[int]], Tensor, Tensor]:
    """Rows of every message, and what `infer` returns."""
    g = PartitionedGraph.open(folder, communicator=create_communicator(transport=transport))
    model = optimize(case.build(g.ndata["feat"].shape[1]))
    nothing = [torch.empty(0, dtype=torch.int64)] * case.num_layers
    loader = FullGraphLoader(g, g.owned_nodes(), case.num_layers, plan=nothing, chunk_rows=case.chunk_rows)
    messages = noted_messages(g)
    for input_nodes, seeds, blocks in loader:
        x = g.ndata["feat"][input_nodes].clone().requires_grad_()
        F.cross_entropy(model(blocks, x), g.ndata["label"][seeds]).backward()
    num_trained = len(messages)
    ids, logits = infer(model, g, case.num_layers, chunk_rows=case.chunk_rows)
    longest = [message.longest for message in messages]
    rows = {"training": longest[:num_trained], "inference": longest[num_trained:]}
    return rows, g.partition.orig_node_ids[ids - g.nodes.start], logits


@pairwise(kind=["gin", "gcn_both", "gat", "gatv2"], transport=["collective", "shared_memory"], world_size=[2, 3, 4])
def test_training_and_inference_exchange_no_more_than_a_chunk(
    kind: str, transport: RankTransport, world_size: int, partitions: PartitionStore
) -> None:
    graph = power_law()
    case = Case(kind=kind, chunk_rows=5)
    results = run_ranks(world_size, in_chunks, partitions.get("power_law", graph, world_size), case, transport)
    expected = case.build(graph.ndata["feat"].shape[1])([graph] * case.num_layers, graph.ndata["feat"]).detach()
    for rows, ids, logits in results:
        assert_close(logits, expected[ids], "inference in chunks")
        for way in ("training", "inference"):
            assert max(rows[way]) <= 5, way
            # More messages than one from each peer a layer: what is received is really cut.
            assert len(rows[way]) > case.num_layers * (world_size - 1)


# -------------------------------------------------------------------- fields that travel together


def sum_two_fields(rank: int, world_size: int, folder: str) -> tuple[int, bool]:
    """Messages of two sums of fields that a layer sets before it reads either, and whether both sums are right."""
    g = PartitionedGraph.open(folder)
    messages = noted_messages(g)
    loader = FullGraphLoader(g, g.owned_nodes(), 1, plan=[torch.empty(0, dtype=torch.int64)])
    input_nodes, _, (block,) = next(iter(loader))
    with block.local_scope():
        block.srcdata["a"] = torch.ones(len(input_nodes), 2, requires_grad=True)
        block.srcdata["b"] = torch.ones(len(input_nodes), 3, requires_grad=True)
        for name in ("a", "b"):
            block.update_all(fn.copy_u(name, "m"), fn.sum("m", name))
        degrees = block.in_degrees().float()
        right = all(torch.equal(block.dstdata[name][:, -1], degrees) for name in ("a", "b"))
    return len(messages), right


def test_fields_set_together_are_one_message(partitions: PartitionStore) -> None:
    assert run_ranks(3, sum_two_fields, partitions.get("power_law", power_law(), 3)) == [(1, True)] * 3
