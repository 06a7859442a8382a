# SPDX-License-Identifier: Apache-2.0
"""Copies of a model share what stands for something elsewhere, and running them leaves no trace in the process."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dgl_hybrid.errors import BlockError
from dgl_hybrid.graph import model_copy
from dgl_hybrid.graph.model_copy import copy_of, with_own_randomness
from dgl_hybrid.graph.tiny_blocks import build_tiny_blocks


class OnServers:
    """Stands for rows that a server has; a second one of the name would end them."""


class WithOwnCopies:
    def __deepcopy__(self, memo: Any) -> str:
        return "as it was"


class CannotBeCopied:
    def __deepcopy__(self, memo: Any) -> None:
        raise RuntimeError("no copies")


class Model(nn.Module):
    def __init__(self, *parts: Any) -> None:
        super().__init__()
        self.linear, self.parts = nn.Linear(2, 2), list(parts)


@pytest.fixture(autouse=True)
def _on_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_copy, "_OF_ALL", (OnServers, WithOwnCopies, *model_copy._OF_ALL))


def assert_copies_as_before() -> None:
    assert "__deepcopy__" not in vars(OnServers)
    assert copy.deepcopy(WithOwnCopies()) == "as it was"


def test_a_copy_shares_what_lives_on_servers_and_nothing_else() -> None:
    model = Model(OnServers(), WithOwnCopies(), {"nested": [OnServers()]})
    copied = copy_of(model)
    assert copied is not model
    assert copied.parts is not model.parts
    assert copied.parts[0] is model.parts[0]
    assert copied.parts[1] is model.parts[1]
    assert copied.parts[2]["nested"][0] is model.parts[2]["nested"][0]
    assert copied.linear.weight is not model.linear.weight
    assert torch.equal(copied.linear.weight, model.linear.weight)
    assert_copies_as_before()


def test_a_copy_shares_the_block_that_a_model_has_kept() -> None:
    """What was called with one (to look at it later) could not be copied, so its model could not be planned for."""
    (block,) = build_tiny_blocks(1, set())[0]
    model = nn.Linear(1, 1)
    model.last_blocks = [block]  # type: ignore[assignment]
    for _ in range(2):  # afterwards as before
        copied: Any = copy_of(model)
        assert copied.last_blocks[0] is block
        with pytest.raises(BlockError, match=r"a LayerBlock \(rank 0 of 1, layer 1\) cannot be copied: .* Keep"):
            copy.deepcopy(block)


def test_classes_are_as_before_where_a_model_cannot_be_copied() -> None:
    with pytest.raises(RuntimeError, match="no copies"):
        copy_of(Model(OnServers(), CannotBeCopied()))
    assert_copies_as_before()


def draws() -> tuple[float, float, Tensor]:
    return random.random(), float(np.random.random()), torch.rand(3)


@with_own_randomness()
def fail_after_drawing() -> None:
    draws()
    raise ZeroDivisionError


def test_what_a_model_draws_leaves_no_trace() -> None:
    """Ranks run copies as often as they have time for, and would draw different numbers from then on."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    with with_own_randomness():
        expected = draws()
    with pytest.raises(ZeroDivisionError):
        fail_after_drawing()
    for found, wanted in zip(draws(), expected, strict=True):
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(wanted))


def test_what_a_call_has_left_in_attributes_is_copied_without_its_gradients() -> None:
    """A weight that `weight_norm` makes of two in every call, and rows that a model keeps to be looked at."""
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(model.linear)
    model.seen = model.linear(torch.ones(3, 2))
    copied = copy_of(model)
    assert torch.equal(copied.seen, model.seen)
    assert copied.seen is not model.seen
    assert copied.seen.grad_fn is None
    assert torch.equal(copied.linear.weight, model.linear.weight)
    x = torch.randn(4, 2)
    copied.linear.weight_g.data.mul_(2.0)
    assert torch.allclose(copied.linear(x) - copied.linear.bias, 2.0 * (model.linear(x) - model.linear.bias))
    model.seen.sum().backward()
    assert model.linear.weight_v.grad is not None
    assert copied.linear.weight_v.grad is None


def test_what_a_call_has_left_in_containers_is_copied_without_its_gradients() -> None:
    """A list of each layer's rows, or what a hook of another object keeps."""

    class Recorder:
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

        def note(self, module: nn.Module, args: object, output: Tensor) -> None:
            self.seen.append(output)

    model, recorder = Model(), Recorder()
    model.linear.register_forward_hook(recorder.note)
    rows = model.linear(torch.ones(3, 2))
    model.by_name = {"rows": [rows, rows]}
    copied = copy_of(model)
    first, second = copied.by_name["rows"]
    assert torch.equal(first, rows)
    assert first is second
    assert first.grad_fn is None
    copied.linear(torch.ones(3, 2))
    assert len(recorder.seen) == 1
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
