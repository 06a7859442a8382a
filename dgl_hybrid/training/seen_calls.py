# SPDX-License-Identifier: Apache-2.0
"""How models were called with the blocks of a loader, on this rank: for what plans are made, who is to be checked."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from dgl_hybrid.graph.call_template import CallTemplate
from dgl_hybrid.graph.model_copy import without_ddp

Call = tuple[nn.Module, CallTemplate]

_MOST_INNER = 4
"""Inner calls that are remembered: each that cannot be repeated costs an attempt."""


MOST_CHECKS = 16
"""Of other models: a script may make a wrapper of its model in every epoch."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """An outermost call, and how it, or what it has called, can be called with other blocks."""

    outermost: nn.Module
    calls: tuple[Call, ...]
    """The outermost one, if `is_whole`, and those inside of it that were given, and have used, the blocks of all
    layers, too: the outer before the inner."""
    is_whole: bool
    """The outermost one was given all of them, so that others can be put in their place."""


@dataclass(frozen=True, kw_only=True)
class _Remembered:
    """The same, without a hold on any module."""

    outermost: weakref.ref[nn.Module]
    autocast: torch.dtype | None
    template: CallTemplate | None
    """Of the outermost; None: it was not given the blocks of all layers. Then it is not to be held, as what it was
    given may hold the epoch's blocks."""
    inner: tuple[tuple[weakref.ref[nn.Module], CallTemplate], ...]

    def seen(self) -> Seen | None:
        """Returns it with the modules; None: the outermost one is gone, or nothing is left that can be called."""
        outermost = self.outermost()
        if outermost is None:
            return None
        found = [] if self.template is None else [(outermost, self.template)]
        found += [(model, template) for reference, template in self.inner if (model := reference()) is not None]
        return Seen(outermost=outermost, calls=tuple(found), is_whole=self.template is not None) if found else None


class SeenCalls:
    """Holds no model: a script may drop its own.

    Of an outermost call those inside of it are remembered, too, that are given the blocks of all layers and use them.
    Some outermost calls cannot be made on other blocks: a framework may put a function of its own in the place of a
    wrapper's `forward` for the call alone (as PyTorch Lightning does, whose `DistributedDataParallel` is given a batch
    and an index), or a model may wait for other ranks.

    Args:
        planned_for: The model that the loader was given, and has planned for.

    Attributes:
        is_in_pieces: Before any such call one has trained that was not given the blocks of all layers: several modules
            use them in turn, or they came inside an object, where they cannot be replaced. Repeating such a call would
            use those of its epoch. It counts where no call inside of it is left that can be repeated.
        has_seen_training: The first call trains.
    """

    def __init__(self, planned_for: nn.Module | None = None) -> None:
        self._planned_for = None if planned_for is None else weakref.ref(planned_for)
        self._is_given = planned_for is not None
        self.is_in_pieces = False
        self._first: _Remembered | None = None
        self.has_seen_training = False
        self._trained: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._num_others = 0
        self._others: list[_Remembered] = []
        self._inner_of: weakref.ref[nn.Module] | None = None
        self._inner: dict[int, tuple[weakref.ref[nn.Module], CallTemplate]] = {}
        """By `id`, of the call of that module which is being made, or was last; the inner before the outer."""

    @property
    def has_seen_any(self) -> bool:
        """Whether any call is remembered."""
        return self._first is not None

    @property
    def autocast(self) -> torch.dtype | None:
        """What the model that plans are made for is called under; None: under none, or not seen yet."""
        return None if self._first is None else self._first.autocast

    def is_new(self, module: nn.Module) -> bool:
        """Whether a call that is being made may be one that `note` remembers."""
        return self._first is None or (torch.is_grad_enabled() and module not in self._trained)

    def note_inner(self, outermost: nn.Module, module: nn.Module, template: CallTemplate, num_layers: int) -> None:
        """Takes a call that was made inside of an outermost one and has used all blocks, before `note` is told of that.

        Args:
            outermost: The module of that.
            module: Which was called.
            template: Of its arguments.
            num_layers: L.
        """
        if self._inner_of is None or self._inner_of() is not outermost:
            self._inner_of, self._inner = weakref.ref(outermost), {}
        # A module that is given a batch and calls itself by what that holds: this is how it can be called.
        is_new = id(module) not in self._inner
        if is_new and template.has_blocks_of_all(num_layers) and len(self._inner) < _MOST_INNER:
            self._inner[id(module)] = (weakref.ref(module), template)

    def take_inner(self, outermost: nn.Module) -> tuple[tuple[weakref.ref[nn.Module], CallTemplate], ...]:
        """Returns what was called inside of an outermost call that ends, the outer first, and forgets it."""
        is_of_it = self._inner_of is not None and self._inner_of() is outermost
        inner = tuple(reversed(self._inner.values())) if is_of_it else ()
        self._inner_of, self._inner = None, {}
        return inner

    def note(self, module: nn.Module, num_layers: int, make_template: Callable[[], CallTemplate] | None) -> None:
        """Takes a call that is being made.

        Args:
            module: The outermost one.
            num_layers: L.
            make_template: Of its arguments; None: it does not use the blocks of all layers.
        """
        trains, inner = torch.is_grad_enabled(), self.take_inner(module)
        if make_template is None:
            self.is_in_pieces |= self._first is None and trains
            return
        # An evaluation may come first, which is called in ways of its own; so may another model than the one given.
        is_first = self._first is None or (trains and not self.has_seen_training)
        takes_over = trains and self._is_given and self._is_planned_for(module) and not self._is_of_planned_for
        if not is_first and not takes_over and (not trains or module in self._trained):
            return
        template = make_template()
        is_whole = template.has_blocks_of_all(num_layers)
        self.is_in_pieces |= not is_whole and self._first is None and trains
        if self._is_given and self._is_planned_for(module):
            inner = ()  # it was planned for itself
        if not is_whole and not inner:
            return
        remembered = _Remembered(
            outermost=weakref.ref(module),
            autocast=template.autocast,
            template=template if is_whole else None,
            inner=inner,
        )
        if trains and not self._is_planned_for(module) and self._num_others < MOST_CHECKS:
            self._num_others += 1
            self._others.append(remembered)
        if trains:
            self._trained.add(module)
        if is_first or takes_over:
            self.has_seen_training = trains
            self._first = remembered
            if self._planned_for is None:
                self._planned_for = remembered.outermost

    def _is_planned_for(self, module: nn.Module) -> bool:
        """Whether plans are, or will be, made for it, or for it inside of DDP or without that."""
        if self._planned_for is None:
            return True
        planned_for = self._planned_for()
        return planned_for is not None and without_ddp(module) is without_ddp(planned_for)

    @property
    def _is_of_planned_for(self) -> bool:
        """Whether the first call is of the model that plans are made for."""
        model = None if self._first is None else self._first.outermost()
        return model is not None and self._is_planned_for(model)

    def first(self) -> Seen | None:
        """Returns how the model that plans are made for is called, and what it calls; None: not seen, or gone."""
        return None if self._first is None else self._first.seen()

    def forget_inner_calls(self) -> None:
        """Drops what was called inside of the first call, as that can be made itself: arguments go with it."""
        if self._first is not None:
            self._first = replace(self._first, inner=())

    @property
    def has_other(self) -> bool:
        """Whether another model has trained, which nobody has checked."""
        return bool(self._others)

    def take_others(self) -> list[Seen | None]:
        """Returns these, once, in the order in which they came, `MOST_CHECKS` at most; None for one that is gone."""
        others, self._others = self._others, []
        return [other.seen() for other in others]
