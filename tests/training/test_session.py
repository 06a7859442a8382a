# SPDX-License-Identifier: Apache-2.0
"""Randomness inside a model: replicated where there is a form of it that is, refused where rows would get numbers of
their own rank, left alone where it has nothing to do with rows.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import dgl
import dgl.nn as dglnn
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

from dgl_hybrid import FullGraphLoader, PartitionedGraph, average_gradients, infer
from dgl_hybrid.errors import BlockError
from dgl_hybrid.planner import uniform_topology
from tests.helpers.exactness import assert_close
from tests.helpers.graphs import NUM_CLASSES, NUM_FEATURES, power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks

WIDTH = 4

REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "torch.randn of sizes": lambda h: torch.randn(len(h), WIDTH),
    "torch.randn of a shape": lambda h: torch.randn(h.shape, dtype=h.dtype),
    "torch.randn by keyword": lambda h: torch.randn(size=(len(h), WIDTH)),
    "torch.rand of a vector": lambda h: torch.rand(len(h)),
    "torch.randint": lambda h: torch.randint(0, 7, (len(h),)),
    "torch.randint without low": lambda h: torch.randint(7, [len(h), 2]),
    "torch.randperm": lambda h: torch.randperm(len(h)),
    "torch.randperm by keyword": lambda h: torch.randperm(n=len(h)),
    "torch.normal of means": lambda h: torch.normal(h, 1.0),
    "torch.normal of deviations": lambda h: torch.normal(0.0, h.abs()),
    "torch.normal by keyword": lambda h: torch.normal(mean=h, std=1.0),
    "torch.normal of a shape": lambda h: torch.normal(0.0, 1.0, (len(h), WIDTH)),
    "torch.randn_like": torch.randn_like,
    "torch.randint_like": lambda h: torch.randint_like(h, 7),
    "torch.bernoulli": lambda h: torch.bernoulli(h.sigmoid()),
    "torch.binomial": lambda h: torch.binomial(torch.ones_like(h), h.sigmoid()),
    "torch.native_dropout": lambda h: torch.native_dropout(h, 0.5, True)[0],
    "several draws for each row": lambda h: torch.randn(3, len(h), WIDTH),
    "several draws of a distribution": lambda h: torch.distributions.Normal(h, 1.0).rsample((3,)),
    "torch.distributions.Gamma": lambda h: torch.distributions.Gamma(h.abs() + 1.0, 1.0).rsample(),
    "torch.distributions.Dirichlet": lambda h: torch.distributions.Dirichlet(h.abs() + 1.0).rsample(),
    "torch.multinomial": lambda h: torch.multinomial(h.sigmoid(), 1),
    "torch.poisson": lambda h: torch.poisson(h.abs()),
    "torch.alpha_dropout": lambda h: torch.alpha_dropout(h, 0.5, True),
    "torch.dropout_": lambda h: torch.dropout_(h.clone(), 0.5, True),
    "Tensor.uniform_": lambda h: h.clone().uniform_(),
    "Tensor.normal_": lambda h: torch.empty_like(h).normal_(0.0, 1.0),
    "Tensor.bernoulli": lambda h: h.sigmoid().bernoulli(),
    "Tensor.bernoulli_": lambda h: torch.empty_like(h).bernoulli_(0.5),
    "Tensor.exponential_": lambda h: torch.empty_like(h).exponential_(),
    "Tensor.random_": lambda h: torch.empty_like(h).random_(),
    "nn.AlphaDropout": nn.AlphaDropout(0.5),
    "F.gumbel_softmax": F.gumbel_softmax,
    "dropout of F.scaled_dot_product_attention": lambda h: F.scaled_dot_product_attention(h, h, h, dropout_p=0.1),
    "nn.MultiheadAttention": lambda h: nn.MultiheadAttention(WIDTH, 2, dropout=0.1).double()(h, h, h)[0],
    "nn.LSTM": lambda h: nn.LSTM(WIDTH, WIDTH, 2, dropout=0.1).double()(h)[0],
    "nn.GRU of packed sequences": lambda h: nn.GRU(WIDTH, WIDTH, 2, dropout=0.1).double()(pack_sequence([h, h]))[0],
}

EDGES_REFUSED: dict[str, Callable[[Any], Any]] = {
    "torch.rand of edges": lambda block: torch.rand(block.num_edges()),
    "torch.bernoulli of edges": lambda block: torch.bernoulli(torch.full((block.num_edges(), 1), 0.5)),
    "torch.rand_like of edges": lambda block: torch.rand_like(torch.empty(block.num_edges(), 2)),
}

ALLOWED: dict[str, Callable[[Tensor], Any]] = {
    "noise of weights": lambda h: torch.randn(WIDTH, WIDTH + 1),
    "one number": lambda h: torch.rand(()),
    "one number of a vector": lambda h: torch.rand(1),
    "numbers up to the number of rows": lambda h: torch.randint(len(h), (3,)),
    "an order of columns": lambda h: torch.randperm(h.shape[1]),
    "noise of columns": lambda h: torch.normal(h.detach().mean(0), 1.0),
    "columns that are dropped": lambda h: torch.empty(h.shape[1]).bernoulli_(0.5),
    "as many columns as rows": lambda h: torch.rand(2, len(h)),
    "a layer that is evaluated": nn.AlphaDropout(0.5).eval(),
    "a function that does not train": lambda h: torch.alpha_dropout(h, 0.5, False),
    "native dropout that does not train": lambda h: torch.native_dropout(h, 0.5, False)[0],
    "dropout in place that does not train": lambda h: torch.dropout_(h.clone(), 0.5, False),
    "a function that does not train, by keyword": lambda h: torch.alpha_dropout(h, p=0.5, train=False),
    "leaky units that are evaluated": nn.RReLU().eval(),
    "attention without dropout": lambda h: F.scaled_dot_product_attention(h, h, h),
    "heads that are evaluated": lambda h: nn.MultiheadAttention(WIDTH, 2, dropout=0.1).double().eval()(h, h, h)[0],
    "a recurrence that is evaluated": lambda h: nn.LSTM(WIDTH, WIDTH, 2, dropout=0.1).double().eval()(h)[0],
    "a recurrence without dropout": lambda h: nn.GRU(WIDTH, WIDTH, 2).double()(h)[0],
}


class Drawing(nn.Module):
    """Does something with the rows between its layers."""

    def __init__(self, draw: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = dglnn.SAGEConv(NUM_FEATURES, WIDTH, "mean").double()
        self.second = dglnn.SAGEConv(WIDTH, NUM_CLASSES, "mean").double()
        self.draw = draw

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        h = self.first(blocks[0], x)
        drawn = self.draw(blocks[1] if self.draw in EDGES_REFUSED.values() else h)
        is_of_rows = isinstance(drawn, Tensor) and drawn.shape == h.shape
        out: Tensor = self.second(blocks[1], drawn.to(h.dtype) if is_of_rows else h)
        return out


def draw_inside(rank: int, world_size: int, part_config: str) -> dict[str, str]:
    """Returns, for each way of drawing numbers, what the error said."""
    g = PartitionedGraph.open(part_config)
    loader = FullGraphLoader(g, g.owned_nodes(), 2, plan=[torch.arange(0)] * 2)
    said = {}
    for input_nodes, _, blocks in loader:
        for name, draw in (REFUSED | EDGES_REFUSED | ALLOWED).items():
            try:
                Drawing(draw)(blocks, g.ndata["feat"][input_nodes])
                said[name] = ""
            except BlockError as error:
                said[name] = str(error)
    return said


def test_rows_get_no_numbers_from_their_ranks_own_generator(partitions: PartitionStore) -> None:
    """A row and its replicas on other ranks got different ones from most of these, silently."""
    for said in run_ranks(2, draw_inside, partitions.get("power_law", power_law(), 2)):
        for name in REFUSED | EDGES_REFUSED:
            assert "draws from each rank's own generator" in said[name], name
        assert {name: said[name] for name in ALLOWED} == dict.fromkeys(ALLOWED, "")


def test_one_rank_may_draw_what_it_likes(partitions: PartitionStore) -> None:
    (said,) = run_ranks(1, draw_inside, partitions.get("power_law", power_law(), 1))
    assert set(said.values()) == {""}


class InPlace(Drawing):
    """With an object that holds its blocks, as scripts have."""

    def __init__(self, draw: Callable[[Tensor], Any] = lambda h: h) -> None:
        super().__init__(draw)
        self.blocks: Sequence[Any] = ()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(self.blocks, x)


def change_output(rank: int, world_size: int, part_config: str) -> tuple[list[Tensor], list[Tensor]]:
    g = PartitionedGraph.open(part_config)
    found = []
    for in_place in (True, False):
        model = Drawing(lambda h: h)
        loader = FullGraphLoader(g, g.owned_nodes(), 2, plan=[torch.arange(0)] * 2)
        for input_nodes, seeds, blocks in loader:
            logits = model(blocks, g.ndata["feat"][input_nodes])
            logits = logits.div_(2.0).squeeze_() if in_place else (logits / 2.0).squeeze()
            F.cross_entropy(logits, g.ndata["label"][seeds]).backward()
        average_gradients(model, loader)
        found.append([parameter.grad for parameter in model.parameters()])
    return found[0], found[1]


def test_a_script_may_go_on_in_place_with_the_output(partitions: PartitionStore) -> None:
    """The loss weight made a view of it, which only several ranks have and PyTorch then refuses to change."""
    for world_size in (1, 2):
        for actual, expected in run_ranks(
            world_size, change_output, partitions.get("power_law", power_law(), world_size)
        ):
            for one, other in zip(actual, expected, strict=True):
                assert_close(one, other, f"{world_size} ranks")


def call_after_another_loader(rank: int, world_size: int, part_config: str) -> list[str]:
    g = PartitionedGraph.open(part_config)
    model, said = InPlace(), []
    loader, other = (FullGraphLoader(g, g.owned_nodes(), 2, plan=[torch.arange(0)] * 2) for _ in range(2))
    for between in ("nothing", "an epoch", "a batch"):
        for input_nodes, _, blocks in loader:
            model.blocks = blocks
            for _ in other if between == "an epoch" else ():
                pass
            held = next(iter(other)) if between == "a batch" else None
            try:
                model(g.ndata["feat"][input_nodes])
                said.append("")
            except BlockError as error:
                said.append(str(error))
            del held
    return said


def test_blocks_in_an_object_are_not_taken_for_another_loaders(partitions: PartitionStore) -> None:
    """Dropout, batch norm and the loss weight were left out, or were another loader's, silently."""
    for said in run_ranks(2, call_after_another_loader, partitions.get("power_law", power_law(), 2)):
        alone, after_epoch, after = said
        assert alone == after_epoch == ""
        assert "uses blocks that it was not given as arguments, after another loader has yielded" in after


class Trainer(nn.Module):
    """Runs epochs in its own forward."""

    def __init__(self, loader: FullGraphLoader, model: nn.Module, field: Any) -> None:
        super().__init__()
        self.loader, self.model, self.field = loader, model, field

    def forward(self) -> list[Tensor]:
        return [self.model(blocks, self.field[inputs]) for _ in range(2) for inputs, _, blocks in self.loader]


def iterate_inside_a_module(rank: int, world_size: int, part_config: str) -> list[Tensor]:
    g = PartitionedGraph.open(part_config)
    model = Drawing(lambda h: F.dropout(h, 0.4))
    loader = FullGraphLoader(g, g.owned_nodes(), 2, plan=[torch.arange(0)] * 2, seed=3)
    trainer = Trainer(loader, model, g.ndata["feat"])
    outputs = [*trainer(), *trainer()]
    order = g.fetch_nodes(g.partition.orig_node_ids, loader.seeds)
    return [order, *(output.detach() for output in outputs)]


def test_a_module_may_iterate_a_loader_inside_its_forward(partitions: PartitionStore) -> None:
    graph = power_law()
    ((ids, *alone),) = run_ranks(1, iterate_inside_a_module, partitions.get("power_law", graph, 1))
    expected = [torch.empty_like(output).index_copy(0, ids, output) for output in alone]
    assert len(expected) == 4
    for ids, *outputs in run_ranks(2, iterate_inside_a_module, partitions.get("power_law", graph, 2)):
        for output, whole in zip(outputs, expected, strict=True):
            assert_close(output, whole[ids], "dropout is replicated in every epoch")


def call_after_inference(rank: int, world_size: int, part_config: str) -> list[str]:
    g = PartitionedGraph.open(part_config)
    model, said = InPlace(torch.rand_like), []
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=[torch.arange(0)] * 2)
    for is_between in (False, True):
        for input_nodes, _, blocks in loader:
            if is_between:
                infer(Drawing(lambda h: h), g, 2)
            model.blocks = blocks
            try:
                model(g.ndata["feat"][input_nodes])
                said.append("")
            except BlockError as error:
                said.append(str(error))
    return said


def test_inference_in_between_leaves_the_epoch_watched(partitions: PartitionStore) -> None:
    """Its own epoch was the latest, and over: nothing was watched any more."""
    for before, after in run_ranks(2, call_after_inference, partitions.get("power_law", power_law(), 2)):
        assert "draws from each rank's own generator" in before
        assert after == before


def use_after_interrupt(rank: int, world_size: int, part_config: str) -> tuple[bool, list[Tensor | None]]:
    g = PartitionedGraph.open(part_config)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=[torch.arange(0)] * 2)
    for input_nodes, seeds, blocks in loader:
        model, x = Interrupted(), g.ndata["feat"][input_nodes]
        with contextlib.suppress(KeyboardInterrupt):
            model(blocks, x)
        torch.manual_seed(rank)
        drawn = [F.dropout(x), torch.rand(len(x)), nn.Dropout()(x)]
        torch.manual_seed(rank)
        is_plain = torch.equal(drawn[0], torch.dropout(x, 0.5, True)) and torch.equal(drawn[1], torch.rand(len(x)))
        F.cross_entropy(model(blocks, x), g.ndata["label"][seeds]).backward()
    average_gradients(model, loader)
    return is_plain, [parameter.grad for parameter in model.parameters()]


def test_an_interrupted_forward_is_over_at_once(partitions: PartitionStore) -> None:
    """Until a loader was iterated again random functions were refused, and no later call was outermost."""
    graph = power_law()
    whole = Drawing(lambda h: h)
    train = graph.ndata["train_mask"].bool()
    F.cross_entropy(whole([graph, graph], graph.ndata["feat"])[train], graph.ndata["label"][train]).backward()
    for is_plain, found in run_ranks(3, use_after_interrupt, partitions.get("power_law", graph, 3)):
        assert is_plain
        for one, other in zip(found, whole.parameters(), strict=True):
            assert one is not None
            assert other.grad is not None
            assert_close(one, other.grad, "beside the whole graph")


class Interrupted(Drawing):
    def __init__(self) -> None:
        super().__init__(self.interrupt)
        self.is_due = True

    def interrupt(self, h: Tensor) -> Tensor:
        if self.is_due:
            self.is_due = False
            raise KeyboardInterrupt
        return h


def train_after_interrupt(rank: int, world_size: int, part_config: str) -> list[Tensor]:
    g = PartitionedGraph.open(part_config)
    model, found = Interrupted(), []
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=[torch.arange(0)] * 2)
    for _ in range(2):
        with contextlib.suppress(KeyboardInterrupt):
            for input_nodes, seeds, blocks in loader:
                loss = F.cross_entropy(model(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds])
                loss.backward()
                average_gradients(model, loader)
                found = [parameter.grad for parameter in model.parameters()]
    torch.rand(len(blocks[0].srcdata[dgl.NID]))  # nothing watches that any more
    model.is_due, expected = False, Drawing(lambda h: h)
    for input_nodes, seeds, blocks in loader:
        F.cross_entropy(expected(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds]).backward()
    average_gradients(expected, loader)
    for one, other in zip(found, expected.parameters(), strict=True):
        assert_close(one, other.grad, f"rank {rank}")
    return found


def test_an_interrupted_forward_is_over_in_the_next_epoch(partitions: PartitionStore) -> None:
    """Without, no later call was outermost: no loss weight, and dropout of the rows of a step that is gone."""
    graph = power_law()
    whole = Drawing(lambda h: h)
    train = graph.ndata["train_mask"].bool()
    F.cross_entropy(whole([graph, graph], graph.ndata["feat"])[train], graph.ndata["label"][train]).backward()
    for found in run_ranks(3, train_after_interrupt, partitions.get("power_law", graph, 3)):
        for one, other in zip(found, whole.parameters(), strict=True):
            assert other.grad is not None
            assert_close(one, other.grad, "beside the whole graph")


def train_in_pieces(rank: int, world_size: int, part_config: str, in_pieces: bool) -> list[float]:
    """Trains without a model given, so that one is to be found."""
    g = PartitionedGraph.open(part_config)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dgl_hybrid.training").addHandler(handler)
    model = Drawing(lambda h: h)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, topology=uniform_topology(world_size))
    losses = []
    for _ in range(4):
        for input_nodes, seeds, blocks in loader:
            x = g.ndata["feat"][input_nodes]
            logits = model.second(blocks[1], model.first(blocks[0], x)) if in_pieces else model(blocks, x)
            loss = F.cross_entropy(logits, g.ndata["label"][seeds])
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model, loader)
            optimizer.step()
            losses.append(loss.item() * loader.loss_weight)
    assert loader.is_settled == in_pieces, "without a model given, trials have only begun; of pieces there are none"
    logging.getLogger("dgl_hybrid.training").removeHandler(handler)
    of_weight = [message for message in messages if "not where a script adds something to it" in message]
    assert len(of_weight) == (in_pieces and rank == 0), "said once"
    return losses


def test_a_model_in_pieces_trains_without_a_plan(partitions: PartitionStore) -> None:
    """In its second epoch the last piece alone was taken for the model, which does not use the other blocks."""
    part_config = partitions.get("power_law", power_law(), 3)
    whole = sum(torch.tensor(losses) for losses in run_ranks(3, train_in_pieces, part_config, False))
    pieces = sum(torch.tensor(losses) for losses in run_ranks(3, train_in_pieces, part_config, True))
    assert_close(pieces, whole, "losses")


DROPOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.dropout": lambda h: F.dropout(h, 0.4, True),
    "torch.dropout": lambda h: torch.dropout(h, 0.4, True),
    "torch.dropout by keyword": lambda h: torch.dropout(h, p=0.4, train=True),
    "torch.dropout of nothing": lambda h: torch.dropout(F.dropout(h, 0.4), 0.4, False),
}


def drop_inside(rank: int, world_size: int, part_config: str) -> tuple[Tensor, dict[str, Tensor]]:
    g = PartitionedGraph.open(part_config)
    assert g.partition.orig_node_ids is not None
    outputs = {}
    for name, draw in DROPOUTS.items():
        loader = FullGraphLoader(g, g.owned_nodes(), 2, plan=[torch.arange(0)] * 2, seed=3)
        for input_nodes, _, blocks in loader:
            outputs[name] = Drawing(draw)(blocks, g.ndata["feat"][input_nodes]).detach()
    return g.fetch_nodes(g.partition.orig_node_ids, loader.seeds), outputs


def test_dropout_of_torch_is_the_same_as_the_functional_one(partitions: PartitionStore) -> None:
    """It drew from each rank's own generator where `F.dropout` is replicated."""
    graph = power_law()
    ((ids, alone),) = run_ranks(1, drop_inside, partitions.get("power_law", graph, 1))
    expected = torch.empty_like(alone["F.dropout"])
    expected[ids] = alone["F.dropout"]
    whole = Drawing(lambda h: h)([graph, graph], graph.ndata["feat"]).detach()
    assert float((expected - whole).abs().max()) > 0.1, "nothing was dropped"
    for world_size in (1, 2):
        for ids, outputs in run_ranks(world_size, drop_inside, partitions.get("power_law", graph, world_size)):
            for name, output in outputs.items():
                is_same = torch.equal(output, outputs["F.dropout"])
                assert is_same, name
                assert_close(output, expected[ids], f"{name} on {world_size} ranks")


class Training(nn.Module):
    """Takes its loss and backs it inside its forward, as a step of a trainer that wraps the model does."""

    def __init__(self, model: nn.Module, checkpoints: bool, back: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.model, self.checkpoints, self.back = model, checkpoints, back

    def forward(self, blocks: Sequence[Any], x: Tensor, labels: Tensor) -> float:
        out = checkpoint(self.model, blocks, x, use_reentrant=False) if self.checkpoints else self.model(blocks, x)
        loss = F.cross_entropy(out, labels)
        self.back(loss)
        return loss.item()


def back_by_grad(loss: Tensor) -> None:
    """`torch.autograd.grad` takes gradients for other ends than a step: they stay what they are."""
    h = torch.ones((), dtype=loss.dtype, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss * h, h, retain_graph=True)
    assert torch.equal(gradient, loss.detach())
    loss.backward()


BACKWARDS: dict[str, Callable[[Tensor], None]] = {
    "of the tensor": Tensor.backward,
    "after torch.autograd.grad": back_by_grad,
    "torch.autograd.backward": torch.autograd.backward,
    "of a list": lambda loss: torch.autograd.backward([loss]),
    "of two": lambda loss: torch.autograd.backward([0.25 * loss, 0.75 * loss]),
    "with a gradient": lambda loss: torch.autograd.backward(2.0 * loss, torch.full_like(loss, 0.5)),
    "with two gradients": lambda loss: torch.autograd.backward(
        (loss, loss), grad_tensors=[torch.full_like(loss, 0.25), torch.full_like(loss, 0.75)]
    ),
}


def back_inside(
    rank: int, world_size: int, part_config: str, inside: bool, checkpoints: bool, way: str = "of the tensor"
) -> list[Tensor]:
    g = PartitionedGraph.open(part_config)
    seeds = g.owned_nodes()
    loader = FullGraphLoader(g, seeds[: len(seeds) - 7 * rank], 2, plan=[torch.arange(0)] * 2, seed=3)
    model = Drawing(lambda h: F.dropout(h, 0.5))
    step = Training(model, checkpoints, BACKWARDS[way])
    for input_nodes, seeds, blocks in loader:
        x, labels = g.ndata["feat"][input_nodes], g.ndata["label"][seeds]
        if inside:
            step(blocks, x, labels)
        else:
            F.cross_entropy(model(blocks, x), labels).backward()
    average_gradients(model, loader)
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_a_loss_that_is_backed_inside_of_the_forward_is_weighted(partitions: PartitionStore) -> None:
    """Ranks have different numbers of seeds, so the mean over them is none of their means."""
    folder = partitions.get("power_law", power_law(), 3)
    outsides = run_ranks(3, back_inside, folder, False, False)
    for way in BACKWARDS:
        for checkpoints in (False, True) if way in ("of the tensor", "torch.autograd.backward") else (False,):
            insides = run_ranks(3, back_inside, folder, True, checkpoints, way)
            for inside, outside in zip(insides, outsides, strict=True):
                assert len(inside) == len(outside) > 0
                for gradient, expected in zip(inside, outside, strict=True):
                    assert_close(gradient, expected, f"gradient, {way}, checkpoints: {checkpoints}")
