# SPDX-License-Identifier: Apache-2.0
"""What calls of a model change outside of it is put back: on its classes, in closures, in globals of the script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from dgl_hybrid.graph.outside_state import outside_state_kept

_num_calls = 0
_history: list[float] = []
_untouched = [1.0]


class Schedule:
    def __init__(self) -> None:
        self.temperature = 1.0
        self.rows = torch.ones(2)

    def step(self) -> float:
        self.temperature *= 0.5
        return self.temperature


_schedule = Schedule()


def count() -> None:
    global _num_calls
    _num_calls += 1
    _history.append(0.5)


class Changing(nn.Module):
    calls = 0
    seen: ClassVar[dict[str, int]] = {}
    total = torch.zeros(3)

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        Changing.calls += 1
        self.seen["x"] = self.seen.get("x", 0) + 1
        self.total.add_(1.0)
        count()
        return self.activation(x) * _schedule.step() + len(_untouched)


def closure() -> tuple[Callable[[Tensor], Tensor], Callable[[], list[Any]]]:
    temperature, log, own = 1.0, {1.0}, Schedule()
    empty: int

    def activation(x: Tensor) -> Tensor:
        nonlocal temperature, empty
        temperature *= 0.9
        log.add(temperature)
        own.step()
        empty = 1
        return x * temperature

    return activation, lambda: [temperature, set(log), own.temperature]


def state(of_closure: Callable[[], list[Any]]) -> list[Any]:
    return [
        *(Changing.calls, dict(Changing.seen), Changing.total.tolist(), _num_calls, list(_history)),
        *(_schedule.temperature, *of_closure()),
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_all_of_it_is_put_back(fails: bool) -> None:
    activation, of_closure = closure()
    model = nn.Sequential(Changing(activation))
    model(torch.ones(2))
    before, objects = state(of_closure), (Changing.seen, Changing.total, _history)
    try:
        with outside_state_kept(model):
            model(torch.ones(2))
            model(torch.ones(2))
            after = state(of_closure)
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert all(a != b for a, b in zip(before, after, strict=True))
    assert state(of_closure) == before
    assert all(a is b for a, b in zip(objects, (Changing.seen, Changing.total, _history), strict=True))


def test_what_is_put_in_anothers_place_is_put_back() -> None:
    model = Changing(torch.relu)
    kept = Changing.seen
    with outside_state_kept(model):
        Changing.seen = {"another": 1}
        Changing.calls = "text"  # type: ignore[assignment]
    assert Changing.seen is kept
    assert isinstance(Changing.calls, int)


def test_libraries_are_left_alone() -> None:
    """Theirs is no state of the script's; and data is not copied."""

    class Holds(nn.Linear):
        table = torch.zeros(5000)

    with outside_state_kept(Holds(1, 1)):
        nn.Linear.some_number = 3  # type: ignore[attr-defined]
        Holds.table.add_(1.0)
    assert nn.Linear.__dict__["some_number"] == 3
    del nn.Linear.some_number  # type: ignore[attr-defined]
    assert bool((Holds.table == 1).all())
