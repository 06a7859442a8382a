# SPDX-License-Identifier: Apache-2.0
"""How models were called with the blocks of a loader, on this rank: for what plans are made, who is to be checked."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn

from dgl_hybrid.graph.call_template import CallTemplate
from dgl_hybrid.graph.model_copy import without_ddp

Call = tuple[nn.Module, CallTemplate]


MOST_CHECKS = 16
"""Of other models: a script may make a wrapper of its model in every epoch."""


class SeenCalls:
    """Holds no model: a script may drop its own.

    Args:
        planned_for: The model that the loader was given, and has planned for.

    Attributes:
        template: How the model that plans are made for is called; None: not seen yet.
        is_in_pieces: Before any such call one has trained that was not given the blocks of all layers: several modules
            use them in turn, or they came inside an object, where they cannot be replaced. Repeating such a call would
            use those of its epoch.
        has_seen_training: The call that `template` was made of trains.
    """

    def __init__(self, planned_for: nn.Module | None = None) -> None:
        self._planned_for = None if planned_for is None else weakref.ref(planned_for)
        self._is_given = planned_for is not None
        self.template: CallTemplate | None = None
        self.is_in_pieces = False
        self._model: weakref.ref[nn.Module] | None = None
        self.has_seen_training = False
        self._trained: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._num_others = 0
        self._others: list[tuple[weakref.ref[nn.Module], CallTemplate]] = []

    def note(self, module: nn.Module, num_layers: int, make_template: Callable[[], CallTemplate] | None) -> None:
        """Takes a call that is being made.

        Args:
            module: The outermost one.
            num_layers: L.
            make_template: Of its arguments; None: it does not use the blocks of all layers.
        """
        trains = torch.is_grad_enabled()
        if make_template is None:
            self.is_in_pieces |= self.template is None and trains
            return
        # An evaluation may come first, which is called in ways of its own; so may another model than the one given.
        is_first = self.template is None or (trains and not self.has_seen_training)
        takes_over = trains and self._is_given and self._is_planned_for(module) and not self._is_of_planned_for
        if not is_first and not takes_over and (not trains or module in self._trained):
            return
        template = make_template()
        if not template.has_blocks_of_all(num_layers):
            self.is_in_pieces |= self.template is None and trains
            return
        if trains and not self._is_planned_for(module) and self._num_others < MOST_CHECKS:
            self._num_others += 1
            self._others.append((weakref.ref(module), template))
        if trains:
            self._trained.add(module)
        if is_first or takes_over:
            self.has_seen_training = trains
            self._model, self.template = weakref.ref(module), template
            if self._planned_for is None:
                self._planned_for = self._model

    def _is_planned_for(self, module: nn.Module) -> bool:
        """Whether plans are, or will be, made for it, or for it inside of DDP or without that."""
        if self._planned_for is None:
            return True
        planned_for = self._planned_for()
        return planned_for is not None and without_ddp(module) is without_ddp(planned_for)

    @property
    def _is_of_planned_for(self) -> bool:
        """Whether `template` is of the model that plans are made for."""
        model = None if self._model is None else self._model()
        return model is not None and self._is_planned_for(model)

    def first(self) -> Call | None:
        """Returns the model that plans are made for, and how it is called; None: not seen, or gone."""
        model = None if self._model is None else self._model()
        return None if model is None or self.template is None else (model, self.template)

    @property
    def has_other(self) -> bool:
        """Whether another model has trained, which nobody has checked."""
        return bool(self._others)

    def take_others(self) -> list[Call | None]:
        """Returns these, once, in the order in which they came, `MOST_CHECKS` at most; None for one that is gone."""
        others, self._others = self._others, []
        return [None if (model := reference()) is None else (model, template) for reference, template in others]
