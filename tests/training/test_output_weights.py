# SPDX-License-Identifier: Apache-2.0
"""Gradients that missed the weight of their rank, or had it twice: outputs of every shape, looked at in every way."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import dgl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dgl_hybrid import FullGraphLoader
from dgl_hybrid.errors import BlockError
from tests.helpers.graphs import NUM_CLASSES
from tests.helpers.world import run_ranks
from tests.training.user_scripts import (
    EPOCHS,
    RANKS,
    TwoLayers,
    assert_same_gradients,
    average_gradients,
    open_graph,
    plain_gradients,
    plain_loss,
)


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
