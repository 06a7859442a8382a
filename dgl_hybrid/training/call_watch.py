# SPDX-License-Identifier: Apache-2.0
"""What steps tell of module calls on their blocks, for a loader to know what it is to plan for."""

from __future__ import annotations

from typing import Any

from torch import nn

from dgl_hybrid.graph.call_template import CallTemplate
from dgl_hybrid.training.ddp_sums import DdpSums
from dgl_hybrid.training.partitioned_graph import PartitionedGraph
from dgl_hybrid.training.prefetch import Prefetch
from dgl_hybrid.training.seen_calls import SeenCalls
from dgl_hybrid.training.session import steps_of
from dgl_hybrid.training.step import Step


class CallWatch:
    """Remembers calls, without their rows.

    A loader holds its step, so what that tells does not hold the loader, which the script may have dropped
    (`next(iter(FullGraphLoader(...)))`); the graph still hears of the calls.

    Args:
        graph: Of the loader.
        calls: Where they are remembered.
        prefetch: The fields that blocks have before the model runs.
        num_layers: L.
    """

    def __init__(self, graph: PartitionedGraph, calls: SeenCalls, prefetch: Prefetch, num_layers: int) -> None:
        self._graph, self._calls, self._prefetch, self._num_layers = graph, calls, prefetch, num_layers
        self._ddp_sums = DdpSums(graph.communicator)

    def outermost(self, step: Step, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Takes an outermost call that has used the step's last block, before it returns."""
        self._graph.note_forward()
        self._ddp_sums.note(module)
        if len(steps_of((args, kwargs))) > 1:
            self._calls.take_inner(module)
            return  # plans are for calls with blocks of one loader
        is_whole = step.all_blocks_used and len(step.held_blocks()) == self._num_layers
        self._calls.note(module, self._num_layers, (lambda: self._template(step, args, kwargs)) if is_whole else None)

    def inner(
        self, step: Step, outermost: nn.Module, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Takes a call inside of an outermost one in which all blocks were used, before either returns."""
        self._ddp_sums.note(module)
        if not self._calls.is_new(outermost) or len(steps_of((args, kwargs))) != 1:
            return
        if len(step.held_blocks()) == self._num_layers:
            self._calls.note_inner(outermost, module, self._template(step, args, kwargs), self._num_layers)

    def _template(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallTemplate:
        return CallTemplate.of_call(args, kwargs, step.held_blocks(), self._prefetch.shapes(self._graph))
