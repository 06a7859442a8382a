# SPDX-License-Identifier: Apache-2.0
"""Hooks are put around functions that are as expected, and leave no trace when they are taken away."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from dgl_hybrid.compat.hook_set import Hook, HookSet
from dgl_hybrid.errors import CompatError


class Client:
    def pull(self, name: str, id_tensor: Any) -> str:
        return f"{name} of {id_tensor}"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    made = ModuleType("made_up_module")
    made.Client = Client  # type: ignore[attr-defined]
    made.greet = lambda name, times=1: name * times  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_up_module", made)
    original = Client.__dict__["pull"]
    yield made
    Client.pull = original  # type: ignore[method-assign]


def hook(name: str, parameters: str, action: Callable[..., Any]) -> Hook:
    return Hook(module="made_up_module", name=name, parameters=parameters, action=action)


def test_an_action_gets_the_original_and_the_arguments(module: Any) -> None:
    original = module.greet
    hooks = HookSet((hook("greet", "name times", lambda f, name, times=1: f(name + "!", times=times + 1)),))
    hooks.install()
    assert module.greet("a") == "a!a!"
    hooks.remove()
    assert module.greet is original


def test_methods_are_hooked_on_their_class(module: Any) -> None:
    original = Client.__dict__["pull"]
    client = Client()
    hooks = HookSet((hook("Client.pull", "self name id_tensor", lambda f, *args: "held " + f(*args)),))
    hooks.install()
    assert client.pull("feat", 3) == "held feat of 3"
    hooks.remove()
    assert Client.__dict__["pull"] is original


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("greet", "name", "to have the parameters 'name' \\(got 'name times'\\)"),
        ("Client.push", "self", "expected made_up_module.Client.push in this DGL \\(got none\\)"),
        ("Nobody.pull", "self", "expected made_up_module.Nobody.pull in this DGL"),
    ],
)
def test_all_hooks_are_installed_or_none(module: Any, name: str, parameters: str, words: str) -> None:
    original = Client.__dict__["pull"]
    good = hook("Client.pull", "self name id_tensor", lambda f, *args: f(*args))
    with pytest.raises(CompatError, match=words):
        HookSet((good, hook(name, parameters, good.action))).install()
    assert Client.__dict__["pull"] is original


def test_a_hook_under_somebody_elses_goes_quiet(module: Any) -> None:
    hooks = HookSet((hook("greet", "name times", lambda f, *args, **kwargs: "hooked"),))
    hooks.install()
    ours = module.greet
    module.greet = lambda *args, **kwargs: "wrapped " + ours(*args, **kwargs)
    assert module.greet("a") == "wrapped hooked"
    hooks.remove()
    assert module.greet("a") == "wrapped a"


def put_around(module: Any) -> Callable[..., Any]:
    """Puts a profiler around `greet`, as well-behaved ones do it."""
    inner = module.greet

    @functools.wraps(inner)
    def timed(*args: Any, **kwargs: Any) -> Any:
        return "timed " + inner(*args, **kwargs)

    module.greet = timed
    return timed


def test_a_hook_under_somebody_elses_is_not_woken_by_the_next(module: Any) -> None:
    """It was, and what the next one took for DGL's own led to it: calls went round without end."""

    def below(original: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
        return f"hooked {hooks.originals[0](*args, **kwargs)}"

    hooks = HookSet((hook("greet", "name times", below),))
    hooks.install()
    timed = put_around(module)
    assert module.greet("a") == "timed hooked a"
    hooks.remove()
    assert module.greet("a") == "timed a"
    hooks.install()
    assert module.greet("a") == "hooked timed a"
    hooks.remove()
    assert module.greet is timed


@pytest.mark.parametrize("is_taken_off", ["before the next", "under the next"])
def test_a_hook_that_somebody_uncovers_is_taken_away(module: Any, is_taken_off: str) -> None:
    """A profiler that ends puts back what it found: a hook of ours that nobody else would have removed any more."""
    original = module.greet
    hooks = HookSet((hook("greet", "name times", lambda f, *args, **kwargs: "hooked " + f(*args, **kwargs)),))
    hooks.install()
    found = module.greet
    put_around(module)
    hooks.remove()
    if is_taken_off == "before the next":
        module.greet = found
        hooks.install()
        assert hooks.originals == (original,)
        assert module.greet("a") == "hooked a"
    else:
        hooks.install()
        module.greet = found
        assert module.greet("a") == "a"
    hooks.remove()
    assert module.greet is original


def test_sets_may_be_removed_in_any_order(module: Any) -> None:
    original = module.greet
    first, second = (
        HookSet((hook("greet", "name times", lambda f, *args, word=word, **kwargs: word + f(*args, **kwargs)),))
        for word in ("first ", "second ")
    )
    first.install()
    second.install()
    assert module.greet("a") == "second first a"
    first.remove()
    assert module.greet("a") == "second a"
    second.remove()
    assert module.greet is original


def test_a_function_under_two_names_stays_one(module: Any) -> None:
    """`pickle` looks it up by the name that it says it has, and refuses another object."""
    module.also_greet = module.greet
    action = lambda f, *args: f(*args)  # noqa: E731  one object for both
    hooks = HookSet((hook("greet", "name times", action), hook("also_greet", "name times", action)))
    original = module.greet
    hooks.install()
    assert module.greet is module.also_greet is not original
    hooks.remove()
    assert module.greet is module.also_greet is original


def test_a_second_installation_does_nothing(module: Any) -> None:
    original = module.greet
    hooks = HookSet((hook("greet", "name times", lambda f, name, times=1: f(name + "!", times)),))
    assert not hooks.is_installed
    hooks.install()
    once = module.greet
    hooks.install()
    assert module.greet is once
    assert hooks.is_installed
    hooks.remove()
    hooks.remove()
    assert module.greet is original
    assert not hooks.is_installed
