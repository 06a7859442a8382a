# SPDX-License-Identifier: Apache-2.0
"""Modes of PyTorch under which a model is traced: they charge operations, note them, or put others in their place."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from dgl_hybrid.graph.call_template import flatten
from dgl_hybrid.graph.trace_record import TraceRecord

_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"})
"""Namespaces of what torch.distributed does between ranks."""


class CostMode(TorchDispatchMode):
    """Charges every operation to the level or layer whose size one of its tensors has."""

    def __init__(self, record: TraceRecord, sizes: list[int], num_edges: list[int]) -> None:
        super().__init__()
        self.record, self.num_edges = record, num_edges
        self._costs = (
            (sizes, (record.level_flops, record.level_bytes, record.level_held)),
            (num_edges, (record.edge_flops, record.edge_bytes, record.edge_held)),
        )
        self.forward = True
        self.factor = 1.0
        """On the next operations' traffic, for an operation that stands for a dearer one."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(item.alias_info is not None and not item.alias_info.is_write for item in func._schema.returns):
            return out  # A view costs nothing.
        outputs = [value for value in flatten(out) if isinstance(value, Tensor)]
        inputs = [value for value in flatten((args, kwargs or {})) if isinstance(value, Tensor)]
        if self.forward:
            _note_split(self.record, self.num_edges, func, args, inputs)
        counter = flop_registry.get(func.overloadpacket)
        flops = float(counter(*args, **(kwargs or {}), out_val=out)) if counter is not None else 0.0
        is_charged = counter is not None or _is_message_passing(func)
        moved = 0 if is_charged else sum(x.numel() * x.element_size() for x in (*outputs, *inputs))
        held = float(sum(x.numel() * x.element_size() for x in outputs)) if self.forward else 0.0
        for x in (*outputs, *inputs):
            for dimension in x.shape:
                for counts, (flops_of, bytes_of, held_of) in self._costs:
                    if dimension in counts:
                        at = counts.index(dimension)
                        flops_of[at] += flops
                        bytes_of[at] += self.factor * moved
                        held_of[at] += held
                        return out
        return out


class SplitMode(TorchDispatchMode):
    """Notes of which layers the message passing can be split by source, and nothing else."""

    def __init__(self, record: TraceRecord, num_edges: list[int]) -> None:
        super().__init__()
        self.record, self.num_edges = record, num_edges

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs = [value for value in flatten((args, kwargs or {})) if isinstance(value, Tensor)]
        _note_split(self.record, self.num_edges, func, args, inputs)
        return func(*args, **(kwargs or {}))


_STRUCTURE_OPS = ("out_edges", "out_neighbours")
"""Put edges in order by source, once, whatever runs over them."""
_ROW_OPS = ("drop_rows",)
"""Work on rows, which may be those of edges, one by one."""


def _note_split(
    record: TraceRecord, num_edges: list[int], func: Any, args: tuple[Any, ...], inputs: list[Tensor]
) -> None:
    """Notes whether a layer that an op of ours works on can be split: sums of rows can, of rows times constants, and
    fused attention. Sums without weights alone can travel in place of their sources.
    """
    layers = [num_edges.index(n) + 1 for x in inputs for n in x.shape[:1] if n in num_edges]
    if func.namespace != "dgl_hybrid" or func._opname in (*_STRUCTURE_OPS, *_ROW_OPS) or not layers:
        return
    if any(block.is_normalising for block in record.blocks):
        return
    is_scaled = func._opname == "scaled_sum"  # by factors of rows, which are constants
    is_of_sources = func._opname == "spmm_sum" and args[2] is not None
    is_sum = is_scaled or (is_of_sources and (args[3] is None or not args[3].requires_grad))
    is_plain_sum = is_scaled or (is_sum and args[3] is None)
    is_wide = all(x.dtype in (torch.float32, torch.float64) for x in inputs if x.is_floating_point())
    can_be_split = is_wide and (is_sum or func._opname in ("gat", "gatv2"))
    (record.summed if can_be_split else record.unsplit).add(layers[0])
    if not is_plain_sum:
        record.attended.add(layers[0])


def _is_message_passing(func: Any) -> bool:
    """Whether this is an op of ours that gathers rows along edges, which the observer charges."""
    is_of_rows = func._opname.startswith("edge_softmax") or func._opname in _ROW_OPS
    return func.namespace == "dgl_hybrid" and not is_of_rows


class NoCollectives(TorchDispatchMode):
    """Raises where a model talks to other ranks, which do not run it: it would wait for them for ever."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in _COLLECTIVES:
            raise RuntimeError(
                f"its forward calls torch.distributed ({func}), which would wait for the other ranks, where only one "
                f"runs it"
            )
        return func(*args, **(kwargs or {}))


class QuietMode(TorchFunctionMode):
    """Notes batch norm and puts a row-local affine map in its place; dropout becomes a product that costs as much."""

    def __init__(
        self, record: TraceRecord, sizes: list[int], costs: CostMode | None = None, slowdown: float = 1.0
    ) -> None:
        super().__init__()
        self.record, self.sizes, self.costs, self.slowdown = record, sizes, costs, slowdown

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return self._product(*args, **kwargs)
        if func is torch.dropout:
            return self._product(*args, **{("training" if k == "train" else k): v for k, v in kwargs.items()})
        if func is F.batch_norm:
            return self._affine(*args, **kwargs)
        return func(*args, **kwargs)

    def _product(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if p == 0.0 or not training:
            return input
        if self.costs is None:
            return input * 1.0
        # Its backward is charged as one product, so the rest of a slower backward is charged here.
        self.costs.factor = 2.0 * self.slowdown - 1.0
        try:
            return input * 1.0
        finally:
            self.costs.factor = 1.0

    def _affine(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        *rest: Any,
        **options: Any,
    ) -> Tensor:
        if len(input) in self.sizes:
            self.record.batch_norm_levels.add(self.sizes.index(len(input)))
        # (n, F, …): features are not the last dimension there.
        of_features = (-1, *(1,) * (input.dim() - 2))
        out = input * (1.0 if weight is None else weight.view(of_features))
        return (out if bias is None else out + bias.view(of_features)).to(input.dtype)
