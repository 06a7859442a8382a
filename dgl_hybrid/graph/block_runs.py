# SPDX-License-Identifier: Apache-2.0
"""What DGL runs on a block whose sources are all there: builtin and user-defined functions, also on a rank that has no
edges in this layer, where DGL's own result would have another shape, no gradient, or none at all.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from dgl import function as fn
from dgl.udf import EdgeBatch, NodeBatch
from torch import Tensor

from dgl_hybrid.errors import HybridError
from dgl_hybrid.graph.edgeless_reduce import messages_of_nothing, reduce_of_nothing
from dgl_hybrid.graph.message_functions import source_fields_of


class BlockRuns:
    """Message passing on the real block behind a `LayerBlock`, which has handed it the fields that are read.

    Args:
        block: The real block.
        sources: All fields of sources, without received rows.
    """

    def __init__(self, block: Any, sources: Mapping[str, Tensor]) -> None:
        self._block, self._sources = block, sources
        self.is_dry_run = False
        """Whether the user's functions are being run on one made-up edge, whose result nobody reads."""
        self.is_reducing = False
        """Whether a reduce of the user's is being run, on the destinations of one in-degree after those of another."""

    def update_all(self, message_func: Any, reduce_func: Any) -> None:
        """As `DGLGraph.update_all`; what the reduce returns is set also where there are no edges."""
        reduce_func = self._noted(reduce_func)
        if self._block.num_edges() == 0:
            if not isinstance(reduce_func, fn.BuiltinFunction):
                # Whatever the reduce returns is set, also where a field of that name was there before.
                for name, zeros in self._reduce_nothing(message_func, reduce_func).items():
                    self._block.dstdata[name] = zeros
                return
            message_func, reduce_func = self._taking_no_edges(message_func), _of_nothing(reduce_func)
        with _without_empty_edge_warning():
            self._block.update_all(message_func, reduce_func)

    def reduced(self, message_func: Any, reduce_func: Any) -> dict[str, Tensor]:
        """Returns what a function applied after the reduce sees of destinations; nothing is set yet."""
        reduce_func = self._noted(reduce_func)
        has_edges = self._block.num_edges() > 0
        if not has_edges and not isinstance(reduce_func, fn.BuiltinFunction):
            return self._reduce_nothing(message_func, reduce_func)
        message_func = self._taking_no_edges(message_func)
        seen: dict[str, Tensor] = {}

        def look(nodes: NodeBatch) -> dict[str, Tensor]:
            seen.update(nodes.data)
            return {}

        with _without_empty_edge_warning():
            self._block.update_all(message_func, reduce_func if has_edges else _of_nothing(reduce_func), look)
        if not has_edges and _is_extremum(reduce_func):
            infinity = float("-inf") if reduce_func.name == "max" else float("inf")
            rows = seen[reduce_func.out_field]
            seen[reduce_func.out_field] = rows + infinity if rows.is_floating_point() else rows
        return seen

    def apply_nodes(
        self, apply_node_func: Callable[[NodeBatch], Mapping[str, Tensor]], reduce_func: Any, ids: Tensor, rows: Any
    ) -> None:
        """Sets what a function makes of destinations.

        Not by DGL's `apply_nodes`: sources and destinations are of one type's name, which DGL takes for the sources'.

        Args:
            apply_node_func: The user's.
            reduce_func: What ran before it.
            ids: Of the destinations.
            rows: Their fields, with those that were reduced.
        """
        results = dict(apply_node_func(NodeBatch(self._block, ids, self._block.dsttypes[0], rows)))
        if _is_extremum(reduce_func) and results:
            # DGL drops the infinities of destinations without in-edges after the function has seen them, and of the
            # first field that it returns.
            name, first = next(iter(results.items()))
            results[name] = first.masked_fill(torch.isinf(first), 0)
        for name, result in results.items():
            self._block.dstdata[name] = result

    def apply_edges(self, func: Any) -> None:
        """As `DGLGraph.apply_edges` on all edges."""
        with _without_empty_edge_warning():
            self._block.apply_edges(self._taking_no_edges(func))

    def names_read_by(self, func: Any) -> list[str]:
        """Returns the source fields that a message function reads, all where that cannot be told."""
        names = source_fields_of(func)
        return list(self._sources) if names is None else names

    def _reduce_nothing(self, message_func: Any, reduce_func: Any) -> dict[str, Tensor]:
        """A user-defined reduce on a rank without edges: zeros that take part in the backward as they do elsewhere."""
        with self._dry_run():
            return reduce_of_nothing(
                message_func,
                reduce_func,
                sources=self._sources_read_by(message_func),
                destinations=dict(self._block.dstdata),
                edges=dict(self._block.edata),
                num_dst=self._block.num_dst_nodes(),
            )

    def _taking_no_edges(self, message_func: Any) -> Any:
        """Returns a function that gives messages of no edges where the user's may fail at them, on this rank alone:
        `h.reshape(len(h), -1)` cannot tell how wide no rows are.
        """
        if self._block.num_edges() or isinstance(message_func, fn.BuiltinFunction):
            return message_func

        def run(edges: EdgeBatch) -> dict[str, Tensor]:
            # As it is first: what it has taken from around it by edge has no rows either, and does not fit to one.
            before = torch.get_rng_state()
            try:
                messages: dict[str, Tensor] = message_func(edges)
                return messages
            except HybridError:
                raise
            except Exception:
                torch.set_rng_state(before)  # a random call that is repeated so counts once, as on other ranks
                with self._dry_run():
                    return messages_of_nothing(
                        message_func,
                        sources=self._sources_read_by(message_func),
                        destinations=dict(self._block.dstdata),
                        edges=dict(self._block.edata),
                    )

        return run

    def _noted(self, reduce_func: Any) -> Any:
        """Returns a function that says while the user's runs."""
        if isinstance(reduce_func, fn.BuiltinFunction):
            return reduce_func

        def run(nodes: NodeBatch) -> dict[str, Tensor]:
            self.is_reducing = True
            try:
                results: dict[str, Tensor] = reduce_func(nodes)
                return results
            finally:
                self.is_reducing = False

        return run

    @contextlib.contextmanager
    def _dry_run(self) -> Iterator[None]:
        self.is_dry_run = True
        try:
            yield
        finally:
            self.is_dry_run = False

    def _sources_read_by(self, message_func: Any) -> dict[str, Tensor]:
        """Returns all source fields, those that are read with their received rows."""
        return {**self._sources, **{name: self._block.srcdata[name] for name in self.names_read_by(message_func)}}


def _is_extremum(reduce_func: Any) -> bool:
    return isinstance(reduce_func, fn.BuiltinFunction) and reduce_func.name in ("max", "min")


def _of_nothing(reduce_func: Any) -> Any:
    """Returns the builtin that runs where there are no edges: zeros as well, but DGL's backward of a maximum or minimum
    fails for messages without rows.
    """
    return fn.sum(reduce_func.msg_field, reduce_func.out_field) if _is_extremum(reduce_func) else reduce_func


@contextlib.contextmanager
def _without_empty_edge_warning() -> Iterator[None]:
    # A rank without edges in a layer is ordinary here; DGL warns of it at every user-defined message function.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The input graph for the user-defined edge function")
        yield
