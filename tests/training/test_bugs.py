# SPDX-License-Identifier: Apache-2.0
"""Bugs that were found in scripts written as users write them; each test tells what went wrong.

Most were silent: gradients of one rank missed their weight, or a row was not what the script took it for. So every test
compares with the same script on the whole graph with plain DGL or, where our dropout masks matter, with the plain way
of writing it on one rank. `power_law` split at random gives ranks different numbers of seeds, so no weight is one.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import dgl
import dgl.nn as dglnn
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dgl import function as fn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dgl_hybrid
from dgl_hybrid import FullGraphLoader, PartitionedGraph
from dgl_hybrid.errors import BlockError
from dgl_hybrid.planner import uniform_topology
from tests.helpers.exactness import Case, assert_close, forced_plan
from tests.helpers.graphs import NUM_CLASSES, NUM_FEATURES, power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.thinning import each_value
from tests.helpers.world import run_ranks, run_ranks_expect_errors

RANKS = 3
EPOCHS = 3


@pytest.fixture
def folder(partitions: PartitionStore) -> str:
    return partitions.get("power_law", power_law(), RANKS)


@pytest.fixture
def folder_of_one(partitions: PartitionStore) -> str:
    return partitions.get("power_law", power_law(), 1)


class TwoLayers(nn.Module):
    """GraphSAGE, then attention: with dropout, on rows of vertices and on edges."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = dglnn.SAGEConv(NUM_FEATURES, 4, "mean")
        self.second = dglnn.GATConv(4, NUM_CLASSES, 2, attn_drop=dropout, allow_zero_in_degree=True)
        self.dropout = nn.Dropout(dropout)

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        h = torch.tanh(self.first(blocks[0], self.dropout(x)))
        return self.second(blocks[1], self.dropout(h)).mean(1)


def open_graph(part_config: str) -> tuple[PartitionedGraph, list[Tensor]]:
    """The graph of this rank, and a plan in which about half of the dependencies are cached."""
    g = PartitionedGraph.open(part_config)
    plan = forced_plan(g, Case(kind="sage_mean", plan="random:1:0.5"))
    assert plan is not None
    return g, plan


def average_gradients(model: nn.Module) -> list[Tensor]:
    """What DDP gives: the mean over ranks."""
    grads = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
        grads.append(parameter.grad.clone())
    return grads


def original_ids(g: PartitionedGraph, ids: Tensor) -> Tensor:
    assert g.partition.orig_node_ids is not None
    return g.fetch_nodes(g.partition.orig_node_ids, ids)


def plain_gradients(
    loss_of: Callable[[nn.Module, dgl.DGLGraph, Tensor], Tensor], model: nn.Module, epochs: int = EPOCHS
) -> tuple[list[float], list[list[Tensor]]]:
    """Losses and gradients of each epoch, by plain DGL on the whole graph, in the steps that `train` takes."""
    graph, losses, grads = power_law(), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = loss_of(model, graph, graph.ndata["train_mask"])
        loss.backward()
        losses.append(loss.item())
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
        optimizer.step()
    return losses, grads


def assert_same_gradients(actual: list[list[Tensor]], expected: list[list[Tensor]], what: str) -> None:
    assert len(actual) == len(expected)
    for epoch, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_close(a, b, f"{what}: gradient {index} in epoch {epoch}")


# -------------------------------------------------------------------------------- the loss weight reaches every output


def train_in_a_way(rank: int, world_size: int, part_config: str, way: str) -> tuple[list[list[Tensor]], float]:
    g, plan = open_graph(part_config)
    model = TwoLayers(dropout=0.4).double()
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=plan, seed=7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grads = []
    for _ in range(EPOCHS):
        for input_nodes, seeds, blocks in loader:
            # A reentrant checkpoint gives gradients only if an argument wants one.
            x = g.ndata["feat"][input_nodes].clone().requires_grad_()
            if way == "plain":
                logits = model(blocks, x)
            else:
                logits = checkpoint(model, blocks, x, use_reentrant=way == "reentrant")
            optimizer.zero_grad()
            F.cross_entropy(logits, g.ndata["label"][seeds]).backward()
            grads.append([*average_gradients(model), g.communicator.sum_((x.grad / world_size).sum(0))])
            optimizer.step()
    return grads, loader.loss_weight


@pytest.mark.parametrize("way", ["reentrant", "nonreentrant"])
def test_a_checkpoint_around_the_whole_model_keeps_the_weight_of_the_rank(
    way: str, folder: str, folder_of_one: str
) -> None:
    """A reentrant checkpoint runs the model without gradients first, so the weighted output is that of the second run.

    That run happens inside backward and was taken for a recomputation whose output had been weighted already.
    """
    expected, _ = run_ranks(1, train_in_a_way, folder_of_one, "plain")[0]
    results = run_ranks(RANKS, train_in_a_way, folder, way)
    assert len({weight for _, weight in results}) > 1
    for grads, _ in results:
        assert_same_gradients(grads, expected, way)


@dataclasses.dataclass
class Answer:
    logits: Tensor
    extra: dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class FrozenAnswer:
    logits: Tensor
    extra: dict[str, Tensor]


class NamedAnswer(NamedTuple):
    logits: Tensor
    extra: dict[str, Tensor]


class DictAnswer(collections.OrderedDict[str, Any]):
    """As the outputs of model libraries are: a dict whose entries are attributes, too."""

    @property
    def logits(self) -> Tensor:
        return self["logits"]

    @property
    def extra(self) -> dict[str, Tensor]:
        return self["extra"]


FORMS: dict[str, Callable[[Tensor, dict[str, Tensor]], Any]] = {
    "dataclass": lambda logits, extra: Answer(logits, extra),
    "frozen dataclass": lambda logits, extra: FrozenAnswer(logits, extra),
    "named tuple": lambda logits, extra: NamedAnswer(logits, extra),
    "dict subclass": lambda logits, extra: DictAnswer(logits=logits, extra=extra),
    "namespace": lambda logits, extra: SimpleNamespace(logits=logits, extra=extra),
    "namespace beside a tensor": lambda logits, extra: Answer(logits, cast(Any, SimpleNamespace(**extra))),
}


class Answering(nn.Module):
    """Its output has two tensors that carry loss, the second of them nested."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.model, self.form = TwoLayers(), form

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Any:
        logits = self.model(blocks, x)
        return FORMS[self.form](logits, {"score": torch.sigmoid(2 * logits)})


def loss_of_answer(answer: Any, labels: Tensor) -> Tensor:
    extra = answer.extra if isinstance(answer.extra, dict) else vars(answer.extra)
    return F.cross_entropy(answer.logits, labels) + 0.3 * extra["score"].square().mean()


def train_with_outputs(rank: int, world_size: int, part_config: str) -> dict[str, list[list[Tensor]]]:
    g, plan = open_graph(part_config)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=plan)
    grads: dict[str, list[list[Tensor]]] = {}
    for form in FORMS:
        model = Answering(form).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        grads[form] = []
        for _ in range(EPOCHS):
            for input_nodes, seeds, blocks in loader:
                answer = model(blocks, g.ndata["feat"][input_nodes])
                assert type(answer) is type(FORMS[form](answer.logits, {})), type(answer)
                optimizer.zero_grad()
                loss_of_answer(answer, g.ndata["label"][seeds]).backward()
                grads[form].append(average_gradients(model))
                optimizer.step()
    return grads


def test_outputs_in_dataclasses_named_tuples_and_dict_subclasses_are_weighted(folder: str) -> None:
    """Tensors in a dataclass missed the weight, silently; a dict subclass came back as a dict without attributes."""

    def loss_of(model: nn.Module, graph: dgl.DGLGraph, train: Tensor) -> Tensor:
        answer = model([graph, graph], graph.ndata["feat"])
        seen = Answer(answer.logits[train], {"score": answer.extra["score"][train]})
        return loss_of_answer(seen, graph.ndata["label"][train])

    _, expected = plain_gradients(loss_of, Answering("dataclass").double())
    for grads in run_ranks(RANKS, train_with_outputs, folder):
        for form in FORMS:
            assert_same_gradients(grads[form], expected, form)


class Hidden:
    """Not a container that can be looked into."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Hiding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.way = TwoLayers(), ""

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Any:
        logits = self.model(blocks, x)
        ways: dict[str, Callable[[], Any]] = {
            "Hidden": lambda: Hidden(logits),
            "Normal": lambda: (logits, torch.distributions.Normal(logits, 1.0)),
            "deque": lambda: {"logits": logits, "all": collections.deque([logits.exp()])},
        }
        return ways[self.way]() if self.way else logits


def hide_output(rank: int, world_size: int, part_config: str, way: str) -> tuple[str, list[list[Tensor]]]:
    g, plan = open_graph(part_config)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=plan)
    model = Hiding().double()
    message = ""
    ((input_nodes, seeds, blocks),) = list(loader)
    x = g.ndata["feat"][input_nodes]
    model.way = way
    with torch.no_grad():
        model(blocks, x)  # without gradients there is nothing to weight
    try:
        model(blocks, x)
    except BlockError as error:
        message = str(error)
    model.way = ""
    F.cross_entropy(model(blocks, x), g.ndata["label"][seeds]).backward()
    return message, [average_gradients(model)]


def plain_loss(model: nn.Module, graph: dgl.DGLGraph, train: Tensor) -> Tensor:
    return F.cross_entropy(model([graph, graph], graph.ndata["feat"])[train], graph.ndata["label"][train])


@pytest.mark.parametrize("way", ["Hidden", "Normal", "deque"])
def test_an_output_in_which_no_tensor_is_found_is_refused(way: str, folder: str) -> None:
    """It went through unweighted, silently, also beside tensors that can be found. The step after the error is a good
    one: nothing is left half-entered."""
    _, expected = plain_gradients(plain_loss, TwoLayers().double(), epochs=1)
    for message, grads in run_ranks(RANKS, hide_output, folder, way):
        assert re.search(rf"returned a {way}, in which no tensor can be found.*Return tensors, in tuples", message)
        assert_same_gradients(grads, expected, "after the error")


class Joined(nn.Module):
    """What the error about a head of its own asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.body = TwoLayers()
        self.head = nn.Linear(NUM_CLASSES, NUM_CLASSES)

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(blocks, x)))


class OfList(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, outputs: list[Tensor]) -> Tensor:
        return self.head(outputs[0])


def train_with_heads(rank: int, world_size: int, part_config: str) -> tuple[dict[str, str], list[list[Tensor]]]:
    g, plan = open_graph(part_config)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=plan)
    model = Joined().double()
    ((input_nodes, seeds, blocks),) = list(loader)
    x = g.ndata["feat"][input_nodes]
    messages = {}
    of_list = OfList(model.head)
    for name, call in {
        "itself": model.head,
        "relu": lambda out: model.head(torch.relu(out)),
        "relu and slice": lambda out: model.head(torch.relu(out)[:, :NUM_CLASSES] * 2),
        "by keyword": lambda out: model.head(input=torch.relu(out)),
        "in a list": lambda out: of_list([torch.relu(out)]),
    }.items():
        out = model.body(blocks, x)
        try:
            call(out)
            messages[name] = ""
        except BlockError as error:
            messages[name] = str(error)
    # These do not lose a weight: no parameters, no path of gradients, an output that is no model's.
    out = model.body(blocks, x)
    nn.ReLU()(out)
    model.head(torch.relu(out).detach())
    model.head(torch.zeros(2, NUM_CLASSES, dtype=torch.float64, requires_grad=True) * 1.0)
    F.cross_entropy(model(blocks, x), g.ndata["label"][seeds]).backward()
    return messages, [average_gradients(model)]


def test_a_head_outside_the_model_is_refused_also_behind_an_activation(folder: str) -> None:
    """Only `head(model(...))` was refused; `head(relu(model(...)))` trained the head with gradients of wrong weight."""
    _, expected = plain_gradients(plain_loss, Joined().double(), epochs=1)
    for messages, grads in run_ranks(RANKS, train_with_heads, folder):
        for between, message in messages.items():
            assert re.search(
                r"(Linear|OfList) has parameters and gets the output of .*Put both in one nn.Module", message
            ), between
        assert_same_gradients(grads, expected, "joined")


# -------------------------------------------------------------------------------- which loader's blocks these are


def train_beside_validation(
    rank: int, world_size: int, part_config: str, ways: Sequence[str]
) -> dict[str, tuple[list[list[Tensor]], Tensor, Tensor]]:
    """Gradients of each epoch; original ids and logits of the last validation."""
    g, plan = open_graph(part_config)
    results = {}
    for way in ways:
        model = TwoLayers(dropout=0.4).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=plan, seed=7)
        valid = FullGraphLoader(g, g.owned_nodes()[~g.ndata["train_mask"].local], 2, plan=plan, seed=8)
        grads = []

        def call(blocks: list[Any], x: Tensor, *, model: nn.Module = model, way: str = way) -> Tensor:
            if way.endswith("int"):
                blocks = [block.int() for block in blocks]
            out: Tensor = model(blocks=blocks, x=x) if way.startswith("keywords") else model(blocks, x)
            return out

        for _ in range(EPOCHS):
            for (input_nodes, seeds, blocks), (valid_inputs, _, valid_blocks) in zip(train, valid, strict=True):
                logits = call(blocks, g.ndata["feat"][input_nodes])
                optimizer.zero_grad()
                F.cross_entropy(logits, g.ndata["label"][seeds]).backward()
                grads.append(average_gradients(model))
                with torch.no_grad():
                    model.eval()
                    logits = call(valid_blocks, g.ndata["feat"][valid_inputs])
                    model.train()
                optimizer.step()
        results[way] = grads, original_ids(g, valid.seeds), logits
    return results


def test_blocks_as_keywords_and_copies_by_int_belong_to_their_own_loader(folder: str, folder_of_one: str) -> None:
    """Such blocks were not recognised, and the loader that had yielded last was taken: the validation's, in a zip.

    Dropout then failed on rows of unknown vertices or drew other masks, and outputs got the other loader's weight.
    """
    ways = ("positional", "positional, int", "keywords", "keywords, int")
    expected, ids, logits = run_ranks(1, train_beside_validation, folder_of_one, ways[:1])[0][ways[0]]
    by_node = logits[torch.argsort(ids)]
    results = run_ranks(RANKS, train_beside_validation, folder, ways)
    for way in ways:
        for result in results:
            assert_same_gradients(result[way][0], expected, way)
        order = torch.argsort(torch.cat([result[way][1] for result in results]))
        assert_close(torch.cat([result[way][2] for result in results])[order], by_node, f"{way}: validation")


# -------------------------------------------------------------------------------- rows that a script reads


@dataclasses.dataclass(kw_only=True)
class Reads:
    doubled: list[float]
    """This rank's part of the loss in each epoch, on features multiplied in place."""
    input_ids: Tensor
    input_grads: list[Tensor]
    """Of features that `requires_grad_()` was called on in place, each epoch."""
    grads: list[list[Tensor]]
    """Of the same epochs."""
    was_inference: bool
    after_inference: list[list[Tensor]]


def read_features(rank: int, world_size: int, part_config: str) -> Reads:
    g, plan = open_graph(part_config)

    def step(loader: FullGraphLoader, change: Callable[[Tensor], Tensor]) -> tuple[float, Tensor, list[Tensor]]:
        ((input_nodes, seeds, blocks),) = list(loader)
        x = change(g.ndata["feat"][input_nodes])
        model = TwoLayers().double()
        loss = F.cross_entropy(model(blocks, x), g.ndata["label"][seeds])
        loss.backward()
        return loss.item() * loader.loss_weight / world_size, x, average_gradients(model)

    def make_loader() -> FullGraphLoader:
        return FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=plan)

    loader = make_loader()
    doubled = [step(loader, lambda x: x.mul_(2))[0] for _ in range(EPOCHS)]
    leaves = [step(loader, lambda x: x.requires_grad_()) for _ in range(EPOCHS)]
    fresh = make_loader()
    with torch.inference_mode():
        was_inference = g.ndata["feat"][fresh.input_nodes].is_inference()
    _, _, after_inference = step(fresh, lambda x: x.requires_grad_())
    return Reads(
        doubled=doubled,
        input_ids=original_ids(g, loader.input_nodes),
        input_grads=[x.grad / world_size for _, x, _ in leaves if x.grad is not None],
        grads=[grads for _, _, grads in leaves],
        was_inference=was_inference,
        after_inference=[after_inference],
    )


def test_what_a_script_does_to_rows_it_read_does_not_reach_the_next_epoch(folder: str) -> None:
    """The same tensor is returned at every read: `x.mul_(2)` doubled the features again each epoch, the gradient of
    `x.requires_grad_()` grew, and a first read under inference mode gave a tensor that could never be trained on."""
    graph, train = power_law(), power_law().ndata["train_mask"]
    model = TwoLayers().double()
    doubled = F.cross_entropy(model([graph] * 2, graph.ndata["feat"] * 2)[train], graph.ndata["label"][train]).item()
    x = graph.ndata["feat"].clone().requires_grad_()
    F.cross_entropy(model([graph] * 2, x)[train], graph.ndata["label"][train]).backward()
    grads = [parameter.grad.clone() for parameter in model.parameters()]

    results = run_ranks(RANKS, read_features, folder)
    assert [sum(r.doubled[epoch] for r in results) for epoch in range(EPOCHS)] == pytest.approx(
        [doubled] * EPOCHS, rel=1e-9
    )
    for epoch in range(EPOCHS):
        summed = torch.zeros_like(x)
        for result in results:
            summed.index_add_(0, result.input_ids, result.input_grads[epoch])
        assert_close(summed, x.grad, f"input gradient of epoch {epoch}")
    for result in results:
        assert_same_gradients(result.grads, [grads] * EPOCHS, "leaves")
        assert not result.was_inference
        assert_same_gradients(result.after_inference, [grads], "after inference mode")


class SetsFields(nn.Module):
    """Sets fields of blocks without a scope, first one for functions of its own and then one for builtins."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in ((NUM_FEATURES, 4), (4, NUM_CLASSES)))

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        for linear, block in zip(self.linears, blocks, strict=True):
            block.srcdata["h"] = linear(x)
            block.update_all(
                lambda edges: {"m": torch.tanh(edges.src["h"])}, lambda nodes: {"o": nodes.mailbox["m"].sum(1)}
            )
            block.srcdata["k"] = torch.exp(linear(x))
            block.update_all(fn.copy_u("k", "m"), fn.sum("m", "p"))
            block.edata["s"] = torch.ones(block.num_edges())
            x = torch.sigmoid(block.dstdata["o"] + block.dstdata["p"])
        return x


def train_with_leftovers(
    rank: int, world_size: int, part_config: str, forwards: int = 1, copies: bool = False
) -> tuple[list[list[Tensor]], list[list[str]]]:
    """Gradients of each epoch, and the fields that are in the blocks at its beginning."""
    g, plan = open_graph(part_config)
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(
        2, prefetch_node_feats=["feat"], prefetch_labels=["label"], prefetch_edge_feats=["w"]
    )
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), sampler, plan=plan)
    model = SetsFields().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grads, names = [], []
    for _ in range(EPOCHS):
        for _, seeds, blocks in loader:
            names.append([f"{f} {sorted(getattr(b, f))}" for b in blocks for f in ("srcdata", "dstdata", "edata")])
            x = blocks[0].srcdata["feat"]
            blocks = [block.int() for block in blocks] if copies else blocks
            for _ in range(forwards):
                optimizer.zero_grad()
                F.cross_entropy(model(blocks, x), g.ndata["label"][seeds]).backward()
                grads.append(average_gradients(model))
                optimizer.step()
    return grads, names


@pytest.mark.parametrize("world_size", [2, 3])
def test_fields_left_in_blocks_are_gone_in_the_next_epoch(world_size: int, partitions: PartitionStore) -> None:
    """A block was the same in every epoch, and functions of one's own get all fields: in the second epoch what the
    first had left was exchanged too, and its gradients went back into a graph that was freed."""
    _, expected = plain_gradients(plain_loss, SetsFields().double())
    results = run_ranks(world_size, train_with_leftovers, partitions.get("power_law", power_law(), world_size))
    for grads, names in results:
        assert_same_gradients(grads, expected, "leftovers")
        assert names[1:] == names[:1] * (EPOCHS - 1)
        assert names[0] == [
            *("srcdata ['_ID', 'feat']", "dstdata ['_ID']", "edata ['_ID', 'w']"),
            *("srcdata ['_ID']", "dstdata ['_ID', 'label']", "edata ['_ID', 'w']"),
        ]


@each_value(world_size=[2, 3], copies=[False, True])
def test_fields_of_a_forward_do_not_travel_for_the_next_of_the_epoch(
    world_size: int, copies: bool, partitions: PartitionStore
) -> None:
    """What the first forward had left was exchanged along with what the second had set, and its backward ran again;
    copies of blocks (`block.int()`, `block.to(device)`) did not hear that there was a second one."""
    _, expected = plain_gradients(plain_loss, SetsFields().double(), 2 * EPOCHS)
    part_config = partitions.get("power_law", power_law(), world_size)
    for grads, _ in run_ranks(world_size, train_with_leftovers, part_config, 2, copies):
        assert_same_gradients(grads, expected, "two forwards an epoch")


class WritesIntoSums(nn.Module):
    """Two layers read the same sums of raw features, one of them to divide them where they are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.of_sums = nn.Linear(NUM_FEATURES, 4)
        self.of_means = nn.Linear(NUM_FEATURES, 4)
        self.of_flat = nn.Linear(NUM_FEATURES, 4)
        self.second = dglnn.SAGEConv(4, NUM_CLASSES, "mean")
        options = {"norm": "none", "weight": False, "bias": False, "allow_zero_in_degree": True}
        self.unweighted = [
            dglnn.GraphConv(NUM_FEATURES, NUM_FEATURES, **options, activation=activation)
            for activation in (None, nn.ReLU(inplace=True))
        ]

    @staticmethod
    def summed(block: Any, x: Tensor) -> Tensor:
        with block.local_scope():
            block.srcdata["h"] = x
            block.update_all(fn.copy_u("h", "m"), fn.sum("m", "total"))
            total: Tensor = block.dstdata["total"]
            return total

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        first, second = blocks
        sums = self.summed(first, x)
        h = self.of_sums(sums)  # which autograd keeps
        means = self.summed(first, x)
        degrees = first.in_degrees()
        means /= degrees.clamp(min=1).unsqueeze(1)
        if bool((degrees == 0).any()):  # not on every rank
            means[degrees == 0] = 1.0
        flat = self.unweighted[0](first, x) - self.unweighted[1](first, x)
        h = torch.tanh(h + self.of_means(means) + self.of_flat(flat))
        return self.second(second, h)


def train_and_evaluate(
    rank: int, world_size: int, part_config: str, optimized: bool
) -> tuple[list[list[Tensor]], list[int]]:
    """Gradients of each epoch, and how many exchanges of the first layer it had."""
    g, plan = open_graph(part_config)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=plan)
    model = WritesIntoSums().double()
    if optimized:
        dgl_hybrid.optimize(model)
        for layer in model.unweighted:
            dgl_hybrid.optimize(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grads, exchanges = [], []
    for _ in range(EPOCHS):
        g.communicator.clock.drain()
        for input_nodes, seeds, blocks in loader:
            x = g.ndata["feat"][input_nodes]
            optimizer.zero_grad()
            F.cross_entropy(model(blocks, x), g.ndata["label"][seeds]).backward()
            grads.append(average_gradients(model))
            optimizer.step()
            with torch.no_grad():
                model(blocks, x)
        exchanges.append(sum(event.layer == 1 for event in g.communicator.clock.drain()))
    return grads, exchanges


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_sums_that_are_kept_are_nobodys_to_write_into(
    world_size: int, optimized: bool, partitions: PartitionStore
) -> None:
    """Who divided the sums of raw features in place divided them for all layers, and changed what autograd had kept;
    who did so on some ranks alone let the others wait. All was exchanged anew in every epoch, too."""
    _, expected = plain_gradients(plain_loss, WritesIntoSums().double())
    part_config = partitions.get("power_law", power_law(), world_size)
    for grads, exchanges in run_ranks(world_size, train_and_evaluate, part_config, optimized):
        assert_same_gradients(grads, expected, "sums that are written into")
        assert exchanges[1:] == [0] * (EPOCHS - 1)
        assert exchanges[0] > 0 or world_size == 1


class Repeats(nn.Module):
    """Repeats what it wraps in its backward; a script has looked at that by itself before."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Any:
        return checkpoint(self.inner, blocks, x, use_reentrant=True)


def train_after_a_look(rank: int, world_size: int, part_config: str, looks: str) -> tuple[list[list[Tensor]], float]:
    g, plan = open_graph(part_config)
    model = TwoLayers().double()
    wrapped = Repeats(model)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=plan, seed=7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grads = []
    for _ in range(EPOCHS):
        for input_nodes, seeds, blocks in loader:
            x = g.ndata["feat"][input_nodes].clone().requires_grad_()
            if looks == "before":
                with torch.no_grad():
                    model(blocks, x)
            if looks == "within":  # what is repeated repeats it itself
                logits = checkpoint(
                    lambda *given: checkpoint(model, *given, use_reentrant=True), blocks, x, use_reentrant=True
                )
            else:
                logits = wrapped(blocks, x)
            if looks == "after":
                with torch.no_grad():
                    model(blocks, x)
            loss = F.cross_entropy(logits, g.ndata["label"][seeds])
            if looks == "twice":  # another view, which is repeated by itself, and one that is not
                loss = F.cross_entropy(checkpoint(model, blocks, x, use_reentrant=True), g.ndata["label"][seeds]) + loss
                loss = (loss + F.cross_entropy(model(blocks, x), g.ndata["label"][seeds])) / 3
            optimizer.zero_grad()
            loss.backward()
            grads.append(average_gradients(model))
            optimizer.step()
    return grads, loader.loss_weight


@pytest.mark.parametrize("looks", ["before", "after", "twice", "within"])
def test_what_a_script_looks_at_besides_is_weighted_once(looks: str, folder: str, folder_of_one: str) -> None:
    """Called without gradients, before or after what is repeated in the backward and was weighted as a whole; or called
    besides what was not weighted before it is repeated; or repeated twice.
    """
    expected, _ = run_ranks(1, train_after_a_look, folder_of_one, "never")[0]
    results = run_ranks(RANKS, train_after_a_look, folder, looks)
    assert len({weight for _, weight in results}) > 1
    for grads, _ in results:
        assert_same_gradients(grads, expected, f"looks: {looks}")


class Synchronised(nn.SyncBatchNorm):
    """On the CPU, where PyTorch's own refuses to run."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, self.weight, self.bias, training=True)


def train_synchronised(rank: int, world_size: int, part_config: str) -> str:
    g, plan = open_graph(part_config)
    model = TwoLayers().double()
    model.norm = Synchronised(NUM_FEATURES).double()
    forward = model.forward
    model.forward = lambda blocks, x: forward(blocks, model.norm(x))
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=plan, seed=7)
    for input_nodes, _, blocks in loader:
        x = g.ndata["feat"][input_nodes]
        try:
            model(blocks, x)
        except BlockError as error:
            model.eval()
            assert model(blocks, x).shape[1] == NUM_CLASSES, "the next call is as any other"
            return str(error)
    return ""


def test_statistics_that_pytorch_would_make_global_are_refused(folder: str) -> None:
    """They count a vertex once for each rank that holds it."""
    for told in run_ranks(RANKS, train_synchronised, folder):
        assert "SyncBatchNorm counts vertices that several ranks hold several times. Leave out convert_sync" in told


def divide_kept_sums(rank: int, world_size: int, part_config: str) -> tuple[Tensor, list[Tensor]]:
    """What a layer of one's own makes of the raw features in each epoch, which divides its sum where nobody counts."""
    g = PartitionedGraph.open(part_config)
    loader = FullGraphLoader(g, g.owned_nodes(), 1, plan=[torch.arange(0)])

    class Mean(nn.Module):
        def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
            with blocks[0].local_scope():
                blocks[0].srcdata["h"] = x
                blocks[0].update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
                h = blocks[0].dstdata["h"]
                h.data.div_(blocks[0].in_degrees().clamp(min=1)[:, None])
                return h.clone()

    assert g.partition.orig_node_ids is not None
    found = []
    for _ in range(EPOCHS):
        for input_nodes, _, blocks in loader:
            found.append(Mean()(blocks, g.ndata["feat"][input_nodes]))
    return g.fetch_nodes(g.partition.orig_node_ids, loader.seeds), found


@pytest.mark.parametrize("world_size", [1, 3])
def test_kept_sums_that_a_layer_divides_are_made_anew(world_size: int, partitions: PartitionStore) -> None:
    """In the second epoch they were divided twice, in the third three times."""
    graph = power_law()
    with graph.local_scope():
        graph.update_all(fn.copy_u("feat", "m"), fn.mean("m", "h"))
        expected = graph.ndata["h"]
    part_config = partitions.get("power_law", graph, world_size)
    for ids, found in run_ranks(world_size, divide_kept_sums, part_config):
        for epoch, means in enumerate(found):
            assert_close(means, expected[ids], f"means of epoch {epoch}")


def read_by_other_ids(rank: int, world_size: int, part_config: str) -> dict[str, str]:
    g = PartitionedGraph.open(part_config)
    owned = g.nodes.owned()
    ids: dict[str, Any] = {
        "slice": slice(0, 3),
        "scalar": 3,
        "none": None,
        "mask": torch.ones(len(owned), dtype=torch.bool),
        "table": owned[:, None],
        "list": owned[:2].tolist(),
        "array": owned[:2].numpy(),
    }
    outcomes = {}
    for name, given in ids.items():
        try:
            outcomes[name] = str(torch.equal(g.ndata["feat"][given], g.ndata["feat"].local[:2]))
        except TypeError as error:
            outcomes[name] = str(error)
    return outcomes


def test_slices_scalars_and_masks_as_ids_are_explained(folder: str) -> None:
    """A slice raised an error of torch's about a number, and a scalar returned one row without its dimension."""
    for outcomes in run_ranks(RANKS, read_by_other_ids, folder):
        assert outcomes.pop("list") == outcomes.pop("array") == "True"
        for name, got in {
            "slice": r"slice\(0, 3, None\)",
            "scalar": "3",
            "none": "None",
            "mask": r"torch.bool, shape \(\d+,\)",
            "table": r"torch.int64, shape \(\d+, 1\)",
        }.items():
            assert re.search(rf"'feat' is read by a vector of integer ids \(got {got}\)", outcomes[name]), outcomes


# -------------------------------------------------------------------------------- planning from the first forward


class Weighted(nn.Module):
    """Takes one vector of edge weights for each layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        widths = [NUM_FEATURES, 4, 4, NUM_CLASSES]
        self.layers = nn.ModuleList(
            dglnn.GraphConv(a, b, norm="right", allow_zero_in_degree=True) for a, b in itertools.pairwise(widths)
        )

    def forward(self, blocks: Sequence[Any], x: Tensor, weights: list[Tensor]) -> Tensor:
        for layer, block, weight in zip(self.layers, blocks, weights, strict=True):
            x = torch.tanh(layer(block, x, edge_weight=weight))
        return x


def train_with_edge_weights(rank: int, world_size: int, part_config: str) -> tuple[list[float], list[bool], list[int]]:
    g = PartitionedGraph.open(part_config)
    loader = FullGraphLoader(g, g.owned_nodes(), 3, topology=uniform_topology(world_size))
    num_edges = [block.num_edges() for block in loader.blocks]
    model = Weighted().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, planned = [], []
    for _ in range(EPOCHS):
        for input_nodes, seeds, blocks in loader:
            weights = [g.edata["w"][block.edata[dgl.EID]] * k for k, block in enumerate(blocks, start=1)]
            logits = model(blocks, g.ndata["feat"][input_nodes], weights)
            loss = F.cross_entropy(logits, g.ndata["label"][seeds])
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model)
            optimizer.step()
            losses.append(loss.item() * loader.loss_weight / world_size)
            planned.append(loader.outcome is not None)
    return losses, planned, num_edges


def test_edge_weights_of_layers_with_equally_many_edges_are_told_apart(folder: str) -> None:
    """With all nodes as seeds every block of the first epoch has the same edges; every list entry was then taken for
    weights of the first layer, and planning from that forward failed."""

    def loss_of(model: nn.Module, graph: dgl.DGLGraph, train: Tensor) -> Tensor:
        weights = [graph.edata["w"] * k for k in (1, 2, 3)]
        return F.cross_entropy(model([graph] * 3, graph.ndata["feat"], weights), graph.ndata["label"])

    expected, _ = plain_gradients(loss_of, Weighted().double())
    results = run_ranks(RANKS, train_with_edge_weights, folder)
    for _, planned, num_edges in results:
        assert len(set(num_edges)) == 1
        assert planned == [False, True, True]
    total = [sum(losses) for losses in zip(*(losses for losses, _, _ in results), strict=True)]
    assert total == pytest.approx(expected, rel=1e-9)


# -------------------------------------------------------------------------------- one rank is not like the others


class LostPlan:
    """Of a script's own, which reads ids as they are asked for."""

    def __iter__(self) -> Iterator[Tensor]:
        raise OSError("the disk is gone")


def fail_on_one_rank(rank: int, world_size: int, part_config: str, mistake: str) -> None:
    g, plan = open_graph(part_config)
    if mistake == "assertion":
        with g.communicator.agreed():
            assert rank != 1
    given: Any = LostPlan() if rank == 1 else plan
    FullGraphLoader(g, g.owned_nodes("train_mask"), 2, plan=given)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [("assertion", "AssertionError"), ("plan", "OSError: the disk is gone")],
)
def test_a_peers_error_of_unknown_kind_keeps_its_name_and_words(mistake: str, message: str, folder: str) -> None:
    """The other ranks raised an error without words where a peer had failed at an assertion."""
    errors = run_ranks_expect_errors(RANKS, fail_on_one_rank, folder, mistake)
    assert errors[1].type_name == message.partition(":")[0]
    for error in (errors[0], errors[2]):
        assert error.type_name == "HybridError"
        assert f"rank 1 of {RANKS}: {message}" in error.message


def train_without_seeds_on_one_rank(
    rank: int, world_size: int, part_config: str
) -> list[tuple[Tensor, float, list[list[Tensor]]]]:
    """For each kind of emptiness: original ids of this rank's seeds, its part of the loss, gradients."""
    g, plan = open_graph(part_config)
    results = []
    for nothing in ([], np.array([]), torch.tensor([])):
        seeds: Any = nothing if rank == 1 else g.owned_nodes("train_mask")
        loader = FullGraphLoader(g, seeds, 2, plan=plan)
        assert (loader.num_seeds == 0) == (rank == 1)
        model = TwoLayers().double()
        for input_nodes, seeds, blocks in loader:
            loss = F.cross_entropy(model(blocks, g.ndata["feat"][input_nodes]), g.ndata["label"][seeds])
            loss.backward()
            share = loss.item() * loader.loss_weight / world_size
            ids = original_ids(g, seeds)[: loader.num_seeds]
            results.append((ids, share, [average_gradients(model)]))
    return results


def test_an_empty_list_or_array_of_seeds_on_one_rank_is_no_seeds(folder: str) -> None:
    """`[]` and `np.array([])` are floating-point to torch, and were refused as ids that are no integers."""
    by_rank = run_ranks(RANKS, train_without_seeds_on_one_rank, folder)
    seeds = torch.cat([results[0][0] for results in by_rank])
    assert 0 < len(seeds) < int(power_law().ndata["train_mask"].sum()), "rank 1 owns some that are left out"

    def loss_of(model: nn.Module, graph: dgl.DGLGraph, train: Tensor) -> Tensor:
        return F.cross_entropy(model([graph] * 2, graph.ndata["feat"])[seeds], graph.ndata["label"][seeds])

    losses, expected = plain_gradients(loss_of, TwoLayers().double(), epochs=1)
    for kind in range(3):
        assert sum(results[kind][1] for results in by_rank) == pytest.approx(losses[0], rel=1e-9)
        for results in by_rank:
            assert_same_gradients(results[kind][2], expected, f"kind {kind}")


def train_with_class_weights(rank: int, world_size: int, part_config: str) -> list[tuple[float, list[list[Tensor]]]]:
    """For each class that weighs nothing: this rank's loss as it sees it, and gradients. Rank 1 has no seeds."""
    g = PartitionedGraph.open(part_config)
    seeds = g.owned_nodes("train_mask")[: 0 if rank == 1 else None]
    results = []
    for ignored in range(NUM_CLASSES):
        weight = class_weights(ignored)
        denominator = float(weight[g.ndata["label"][seeds]].sum())
        loader = FullGraphLoader(g, seeds, 2, plan=[torch.arange(0)] * 2, loss_denominator=denominator)
        model = TwoLayers().double()
        for input_nodes, ids, blocks in loader:
            logits = model(blocks, g.ndata["feat"][input_nodes])
            loss = F.cross_entropy(logits, g.ndata["label"][ids], weight=weight)
            loss.backward()
            results.append((loss.item(), [average_gradients(model)]))
    return results


def class_weights(ignored: int) -> Tensor:
    weight = torch.arange(1, NUM_CLASSES + 1, dtype=torch.float64)
    weight[ignored] = 0.0
    return weight


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_loss_of_a_borrowed_seed_may_be_nan(world_size: int, partitions: PartitionStore) -> None:
    """The mean over one seed whose class weighs nothing is 0 / 0, and 0 times its gradient was NaN on all ranks."""
    graph = power_law()
    folder = partitions.get("power_law", graph, world_size)
    by_rank = run_ranks(world_size, train_with_class_weights, folder)
    assert any(math.isnan(loss) for loss, _ in by_rank[1]), "the borrowed seed is of some class"
    seeds = torch.cat(run_ranks(world_size, seeds_but_of_rank_one, folder))
    for ignored in range(NUM_CLASSES):

        def loss_of(model: nn.Module, graph: dgl.DGLGraph, train: Tensor, ignored: int = ignored) -> Tensor:
            logits = model([graph, graph], graph.ndata["feat"])[seeds]
            return F.cross_entropy(logits, graph.ndata["label"][seeds], weight=class_weights(ignored))

        _, expected = plain_gradients(loss_of, TwoLayers().double(), epochs=1)
        for results in by_rank:
            assert_same_gradients(results[ignored][1], expected, f"class {ignored} ignored")


def normalise_weights(rank: int, world_size: int, part_config: str) -> None:
    """One weight in the part of rank 1 is 0."""
    g = PartitionedGraph.open(part_config)
    weights = g.edata["w"].local.clone()
    if rank == 1:
        weights[0] = 0.0
    g.edata["w"] = weights
    sampler = dgl.dataloading.NeighborSampler([1], prefetch_edge_feats=["w"])
    loader = FullGraphLoader(g, g.owned_nodes(), sampler, plan=[torch.empty(0, dtype=torch.int64)])
    for _, _, (block,) in loader:
        dglnn.EdgeWeightNorm("both")(block, block.edata["w"])


def test_a_weight_that_is_not_positive_is_refused_on_all_ranks(folder: str) -> None:
    """Its rank raised, and the others waited for it to sum weights of out-edges."""
    errors = run_ranks_expect_errors(RANKS, normalise_weights, folder, timeout=60)
    assert [error.type_name for error in errors] == ["HybridError", "DGLError", "HybridError"]
    for error in errors:
        assert "edge weights must be positive with norm='both'" in error.message
        assert error.rank == 1 or "rank 1 of 3" in error.message


def seeds_but_of_rank_one(rank: int, world_size: int, part_config: str) -> Tensor:
    g = PartitionedGraph.open(part_config)
    return original_ids(g, g.owned_nodes("train_mask")[: 0 if rank == 1 else None])


class OnGpu:
    """What a step asks of a block that it is told is used."""

    layer, device = 1, torch.device("cuda", 0)

    def fields_to_train(self) -> list[torch.Tensor]:
        return []


def test_a_script_that_moves_its_blocks_is_measured_where_it_runs(
    folder_of_one: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a loader on the CPU times of launches were taken for those of epochs, and rates of the CPU for a GPU's."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    g = PartitionedGraph.open(folder_of_one)
    loader, moved = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, topology=uniform_topology(1)), OnGpu()
    for _, _, blocks in loader:
        assert blocks[0].on_use is not None
        blocks[0].on_use(cast(Any, moved))
        loader._step.was_trained = True
    assert waited == [OnGpu.device]
    for _ in loader:
        pass
    assert waited == [OnGpu.device] * 2, "before the next epoch, which trained nothing"
    assert loader._choice.maker.device == OnGpu.device
    assert caplog.text.count("the script moves its blocks from cpu to cuda:0") == 1
