# SPDX-License-Identifier: Apache-2.0
"""How models were called with the blocks of a loader, on this rank: for what plans are made, who is to be checked."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn

from dgl_hybrid.graph.call_template import CallTemplate

Call = tuple[nn.Module, CallTemplate]


class SeenCalls:
    """Holds no model: a script may drop its own.

    Attributes:
        template: How the model that plans are made for is called; None: not seen yet.
        is_in_pieces: Before any such call one has trained that was not given the blocks of all layers: several modules
            use them in turn, or they came inside an object, where they cannot be replaced. Repeating such a call would
            use those of its epoch.
    """

    def __init__(self) -> None:
        self.template: CallTemplate | None = None
        self.is_in_pieces = False
        self._model: weakref.ref[nn.Module] | None = None
        self._has_seen_training = False
        self._trained: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._other: tuple[weakref.ref[nn.Module], CallTemplate] | None = None

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
        # An evaluation may come first, which is called in ways of its own.
        is_first = self.template is None or (trains and not self._has_seen_training)
        if not is_first and (not trains or module in self._trained):
            return
        template = make_template()
        if not template.has_blocks_of_all(num_layers):
            self.is_in_pieces |= self.template is None and trains
            return
        if trains:
            self._trained.add(module)
        if is_first:
            self._has_seen_training = trains
            self._model, self.template = weakref.ref(module), template
        else:
            self._other = weakref.ref(module), template

    def first(self) -> Call | None:
        """Returns the model that plans are made for, and how it is called; None: not seen, or gone."""
        model = None if self._model is None else self._model()
        return None if model is None or self.template is None else (model, self.template)

    @property
    def has_other(self) -> bool:
        """Whether another model has trained, which nobody has checked."""
        return self._other is not None

    def take_other(self) -> Call | None:
        """Returns that one, once; None if it is gone."""
        other, self._other = self._other, None
        model = None if other is None else other[0]()
        return None if other is None or model is None else (model, other[1])
