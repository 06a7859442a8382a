# SPDX-License-Identifier: Apache-2.0
"""Traces a user's model on tiny blocks: what it exchanges, what a row and an edge cost it, and whether it mixes rows."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from dgl_hybrid.errors import BlockError
from dgl_hybrid.exchange.closure import LayerStructure, LevelSets
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.plan import ExchangePlan
from dgl_hybrid.graph.build import build_layer_blocks
from dgl_hybrid.graph.layer_block import LayerBlock
from dgl_hybrid.planner import LayerTrace, LevelTrace, ModelTrace

_FEATURE_NAMES = ("feat", "features", "feature", "x", "h")


# -------------------------------------------------------------------- how the model is called


@dataclass(frozen=True)
class _BlockAt:
    index: int


@dataclass(frozen=True)
class _RowsOf:
    """A tensor argument by what its rows are: the vertices of a level, or the edges of a layer."""

    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


FieldShapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, kw_only=True)
class StaticFields:
    """Fields that a loader puts into blocks before the model runs: name to row shape and dtype."""

    source: FieldShapes
    """Of the first block."""
    destination: FieldShapes
    """Of the last block."""
    edge: FieldShapes
    """Of every block."""


@dataclass(frozen=True)
class CallTemplate:
    """The arguments of a model's call with blocks and row tensors replaced by what they stand for."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fields: StaticFields

    @staticmethod
    def of_call(
        args: tuple[Any, ...], kwargs: dict[str, Any], blocks: Sequence[LayerBlock], fields: StaticFields
    ) -> CallTemplate:
        """Remembers a call that was seen, without keeping its tensors."""

        def abstract(value: Any) -> Any:
            if isinstance(value, LayerBlock):
                return _BlockAt(value.layer - 1)
            if isinstance(value, Tensor) and value.dim():
                return _abstract_rows(value, blocks)
            return value

        return CallTemplate(_map(args, abstract), _map(kwargs, abstract), fields)

    @staticmethod
    def of_convention(node_fields: Mapping[str, Any], fields: StaticFields) -> CallTemplate:
        """`model(blocks, x)` with `x` the prefetched feature, or the one with a customary name.

        Raises:
            ValueError: If no feature can be told.
        """
        names = [name for name in (*fields.source, *_FEATURE_NAMES) if name in node_fields]
        if not names:
            raise ValueError(
                f"cannot tell which node field is the model's input: name it in the sampler's prefetch_node_feats (got "
                f"fields {sorted(node_fields)}), or leave out `model` to plan from the first forward"
            )
        local = node_fields[names[0]].local
        x = _RowsOf("level", 0, tuple(local.shape[1:]), local.dtype, False)
        return CallTemplate((_ALL_BLOCKS, x), {}, fields)

    def bind(self, blocks: list[LayerBlock], generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns arguments for other blocks, row tensors filled with random numbers (integers with zeros)."""
        for data, shapes, rows in (
            (blocks[0].srcdata, self.fields.source, blocks[0].num_src_nodes()),
            (blocks[-1].dstdata, self.fields.destination, blocks[-1].num_dst_nodes()),
            *((block.edata, self.fields.edge, block.num_edges()) for block in blocks),
        ):
            for name, (shape, dtype) in shapes.items():
                data[name] = _random_rows(rows, shape, dtype, generator)

        def concrete(value: Any) -> Any:
            if value is _ALL_BLOCKS:
                return blocks
            if isinstance(value, _BlockAt):
                return blocks[value.index]
            if isinstance(value, _RowsOf):
                if value.kind == "level":
                    rows = blocks[0].num_src_nodes() if value.index == 0 else blocks[value.index - 1].num_dst_nodes()
                else:
                    rows = blocks[value.index].num_edges()
                return _random_rows(rows, value.shape, value.dtype, generator).requires_grad_(value.requires_grad)
            return value

        return _map(self.args, concrete), _map(self.kwargs, concrete)


_ALL_BLOCKS = object()


def _random_rows(num_rows: int, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if not dtype.is_floating_point:
        return torch.zeros((num_rows, *shape), dtype=dtype)
    # Positive, since edge weights may have to be.
    return (torch.rand((num_rows, *shape), generator=generator, dtype=torch.float64) + 0.5).to(dtype)


def _abstract_rows(value: Tensor, blocks: Sequence[LayerBlock]) -> Any:
    tail, rows = tuple(value.shape[1:]), len(value)
    sizes = [blocks[0].num_src_nodes(), *(block.num_dst_nodes() for block in blocks)]
    if rows in sizes:
        return _RowsOf("level", sizes.index(rows), tail, value.dtype, value.requires_grad)
    edges = [block.num_edges() for block in blocks]
    if rows in edges:
        return _RowsOf("layer", edges.index(rows), tail, value.dtype, value.requires_grad)
    return value.detach().cpu()


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(item, function) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, function) for item in value)
    if isinstance(value, dict):
        return {key: _map(item, function) for key, item in value.items()}
    return function(value)


# -------------------------------------------------------------------- the tiny world


def _tiny_sizes(num_layers: int, taken: set[int]) -> tuple[list[int], list[int]]:
    """Chooses level sizes and edge counts that no dimension of the model equals, so that they identify rows."""
    used = set(taken)
    levels: list[int] = []
    edges: list[int] = []
    size = 61
    for _ in range(num_layers + 1):
        while size in used:
            size += 1
        levels.append(size)
        used.add(size)
        size += 37
    for destinations in levels[:-1]:
        count = destinations * 4 + 3
        while count in used:
            count += 1
        edges.append(count)
        used.add(count)
    # levels[0] is |C_L|; edges[k] belong to the layer with destinations levels[k].
    return levels[::-1], edges[::-1]


def _tiny_blocks(num_layers: int, taken: set[int]) -> tuple[list[LayerBlock], list[int], list[int]]:
    sizes, num_edges = _tiny_sizes(num_layers, taken)
    layers = []
    for layer in range(1, num_layers + 1):
        num_dst, num_held, total = sizes[layer], sizes[layer - 1], num_edges[layer - 1]
        # Every destination reads itself and some others; destination 0 reads itself only and nobody reads it, so that
        # a change of its row can reach another one only through a layer that mixes rows.
        spare = total - num_dst
        dst = torch.cat([torch.arange(num_dst), 1 + torch.arange(spare) % (num_dst - 1)])
        src = torch.cat([torch.arange(num_dst), 1 + (torch.arange(spare) * 7919 + 13) % (num_held - 1)])
        order = torch.argsort(dst, stable=True)
        indptr = torch.zeros(num_dst + 1, dtype=torch.int64)
        torch.cumsum(torch.bincount(dst, minlength=num_dst), 0, out=indptr[1:])
        none = torch.empty(0, dtype=torch.int64)
        exchange = ExchangePlan(
            rank=0,
            world_size=1,
            layer=layer,
            num_rows=num_held,
            send_index=none,
            send_counts=(0,),
            recv_counts=(0,),
            recv_global=none,
        )
        layers.append(
            LayerStructure(
                layer=layer,
                num_dst=num_dst,
                num_held=num_held,
                indptr=indptr,
                indices=src[order],
                eid_global=torch.arange(total),
                exchange=exchange,
                interior=torch.ones(num_dst, dtype=torch.bool),
            )
        )
    rows = torch.arange(sizes[0])
    sets = LevelSets(
        rows_global=rows,
        sizes=tuple(sizes),
        owned=torch.ones(sizes[0], dtype=torch.bool),
        layers=tuple(layers),
        num_borrowed=0,
    )
    blocks = build_layer_blocks(
        sets,
        Communicator(None),
        out_degrees=torch.full((sizes[0],), 4),
        device=torch.device("cpu"),
        weighted_out_degrees=lambda block, weight: torch.ones(block.structure.num_held),
    )
    return blocks, sizes, num_edges


# -------------------------------------------------------------------- what is recorded


@dataclass
class _Record:
    """Sums over one forward and backward; per level or per layer, all rows or edges together."""

    level_flops: list[float]
    level_bytes: list[float]
    level_held: list[float]
    edge_flops: list[float]
    edge_bytes: list[float]
    edge_held: list[float]
    fields: list[list[tuple[int, int, bool]]]
    batch_norm_levels: set[int] = field(default_factory=set)
    output_batch_norm: bool = False

    @staticmethod
    def empty(num_layers: int) -> _Record:
        levels, layers = num_layers + 1, num_layers
        return _Record(
            [0.0] * levels,
            [0.0] * levels,
            [0.0] * levels,
            [0.0] * layers,
            [0.0] * layers,
            [0.0] * layers,
            [[] for _ in range(layers)],
        )


class _Observer:
    def __init__(self, record: _Record, num_edges: list[int]) -> None:
        self.record, self.num_edges = record, num_edges

    def on_exchange(self, layer: int, fields: list[Tensor]) -> None:
        for x in fields:
            self.record.fields[layer - 1].append((_row_numel(x), x.element_size(), x.requires_grad))

    def on_message_passing(self, layer: int, fields: list[Tensor], kind: str) -> None:
        # DGL's kernels are invisible to the dispatcher: gathered once forward, and once backward if there is one.
        for x in fields:
            passes = 2 if x.requires_grad else 1
            self.record.edge_flops[layer - 1] += passes * _row_numel(x) * self.num_edges[layer - 1]
            self.record.edge_bytes[layer - 1] += passes * _row_numel(x) * x.element_size() * self.num_edges[layer - 1]


class _CostMode(TorchDispatchMode):
    """Charges every operation to the level or layer whose size one of its tensors has."""

    def __init__(self, record: _Record, sizes: list[int], num_edges: list[int]) -> None:
        super().__init__()
        self.record, self.sizes, self.num_edges = record, sizes, num_edges
        self.forward = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(item.alias_info is not None and not item.alias_info.is_write for item in func._schema.returns):
            return out  # A view costs nothing.
        outputs = [value for value in _flatten(out) if isinstance(value, Tensor)]
        inputs = [value for value in _flatten((args, kwargs or {})) if isinstance(value, Tensor)]
        counter = flop_registry.get(func.overloadpacket)
        flops = float(counter(*args, **(kwargs or {}), out_val=out)) if counter is not None else 0.0
        moved = float(sum(x.numel() * x.element_size() for x in (*outputs, *inputs))) if counter is None else 0.0
        held = float(sum(x.numel() * x.element_size() for x in outputs)) if self.forward else 0.0
        for x in (*outputs, *inputs):
            for dimension in x.shape:
                if dimension in self.sizes:
                    level = self.sizes.index(dimension)
                    self.record.level_flops[level] += flops
                    self.record.level_bytes[level] += moved
                    self.record.level_held[level] += held
                    return out
                if dimension in self.num_edges:
                    layer = self.num_edges.index(dimension)
                    self.record.edge_flops[layer] += flops
                    self.record.edge_bytes[layer] += moved
                    self.record.edge_held[layer] += held
                    return out
        return out


class _QuietMode(TorchFunctionMode):
    """Notes batch norm and puts a row-local affine map in its place; leaves dropout out."""

    def __init__(self, record: _Record, sizes: list[int]) -> None:
        super().__init__()
        self.record, self.sizes = record, sizes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            x = args[0] if args else kwargs["input"]
            return x * 1.0
        if func is F.batch_norm:
            return self._affine(*args, **kwargs)
        return func(*args, **kwargs)

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
        out = input * (1.0 if weight is None else weight)
        return out if bias is None else out + bias


# -------------------------------------------------------------------- the trace


@dataclass(frozen=True, kw_only=True)
class TraceResult:
    """A model's trace and what decides how far demand closure may go."""

    trace: ModelTrace
    dense_below: int
    """Levels below this one must hold every owned vertex: 1 + the last level that batch norm couples, 0 if none."""


def trace_model(model: nn.Module, template: CallTemplate, num_layers: int) -> TraceResult:
    """Runs a copy of the model forward and backward on tiny blocks and records its costs. Not collective.

    Args:
        model: Any module that is called with blocks; not changed.
        template: How it is called.
        num_layers: Number of blocks.

    Raises:
        BlockError: If the model uses fewer blocks than there are, normalises over the output level, or mixes rows by
            something other than batch norm, which could not be exact on partitions.
    """
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    taken = {dimension for parameter in inner.parameters() for dimension in parameter.shape}
    taken |= {dimension for value in _flatten((template.args, template.kwargs)) for dimension in _shape_of(value)}
    with torch.random.fork_rng(devices=[]), _on_cpu(inner) as copied:
        copied.train()
        blocks, sizes, num_edges = _tiny_blocks(num_layers, taken)
        record = _Record.empty(num_layers)
        for block in blocks:
            block.observer = _Observer(record, num_edges)
        generator = torch.Generator().manual_seed(0)
        args, kwargs = template.bind(blocks, generator)
        with _QuietMode(record, sizes), _CostMode(record, sizes, num_edges) as costs:
            outputs = _differentiable(copied(*args, **kwargs))
            costs.forward = False
            if outputs:
                torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
        _check_all_used(record, num_layers)
        if num_layers in record.batch_norm_levels:
            raise BlockError(
                "the model normalises the output of its last layer over rows (batch norm): only the seeds are computed "
                "there, while full-graph statistics run over every vertex. Put the normalisation before the last layer."
            )
        _check_rows_apart(copied, args, kwargs, record, sizes)
    parameters = sum(parameter.numel() for parameter in inner.parameters())
    dtype = next((str(x.dtype).removeprefix("torch.") for x in inner.parameters() if x.is_floating_point()), "float32")
    return TraceResult(
        trace=_summarise(record, sizes, num_edges, parameters, dtype),
        dense_below=1 + max(record.batch_norm_levels, default=-1),
    )


def _summarise(
    record: _Record, sizes: list[int], num_edges: list[int], num_parameters: int, dtype: str
) -> ModelTrace:
    levels = tuple(
        LevelTrace(
            row_flops=record.level_flops[k] / size,
            row_bytes=record.level_bytes[k] / size,
            held_bytes=record.level_held[k] / size,
        )
        for k, size in enumerate(sizes)
    )
    layers = tuple(
        LayerTrace(
            edge_flops=record.edge_flops[index] / edges,
            edge_bytes=record.edge_bytes[index] / edges,
            operand_bytes_fwd=float(sum(width * size for width, size, _ in record.fields[index])),
            operand_bytes_bwd=float(sum(width * size for width, size, grad in record.fields[index] if grad)),
            operand_width=sum(width for width, _, _ in record.fields[index]),
            static_operand=bool(record.fields[index]) and not any(grad for _, _, grad in record.fields[index]),
            mixes_rows=index in record.batch_norm_levels,
            edge_held_bytes=record.edge_held[index] / edges,
        )
        for index, edges in enumerate(num_edges)
    )
    return ModelTrace(levels=levels, layers=layers, dtype=dtype, num_parameters=num_parameters)


def _check_all_used(record: _Record, num_layers: int) -> None:
    unused = [index + 1 for index in range(num_layers) if not record.fields[index]]
    if unused:
        raise BlockError(
            f"the model does not use the blocks of layers {unused}: the loader was made for {num_layers} layers (the "
            f"length of the sampler's fanouts), the model has {num_layers - len(unused)}. Make them equal."
        )


def _check_rows_apart(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], record: _Record, sizes: list[int]
) -> None:
    """Changes row 0, which no other row reads, and looks whether any other row of the output changes."""

    def disturb(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() and len(value) in sizes:
            changed = value.detach().clone()
            changed[0] = -3.0 * changed[0] + 1.0
            return changed
        return value

    with torch.no_grad(), _QuietMode(record, sizes):
        plain = _tensors(model(*args, **kwargs))
        disturbed = _tensors(model(*_map(args, disturb), **_map(kwargs, disturb)))
    for before, after in zip(plain, disturbed, strict=True):
        rows_of_level = before.dim() and len(before) in sizes
        if rows_of_level and not torch.allclose(before[1:], after[1:], rtol=1e-5, atol=1e-7, equal_nan=True):
            raise BlockError(
                "the model mixes rows of different vertices outside message passing (a norm or a mean over nodes), "
                "which cannot be exact on a partition. BatchNorm1d is supported; use it, or a norm over features such as "
                "LayerNorm."
            )


@contextlib.contextmanager
def _on_cpu(model: nn.Module) -> Iterator[nn.Module]:
    """A copy of the model, so that running statistics, gradients and hooks of the original stay as they are."""
    yield copy.deepcopy(model).cpu()


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in _flatten(value) if isinstance(x, Tensor) and x.is_floating_point()]


def _differentiable(value: Any) -> list[Tensor]:
    return [x for x in _tensors(value) if x.requires_grad]


def _flatten(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _flatten(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _flatten(item)]
    return [value]


def _shape_of(value: Any) -> tuple[int, ...]:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return value.shape if isinstance(value, _RowsOf) else ()


def _row_numel(x: Tensor) -> int:
    return int(torch.Size(x.shape[1:]).numel())
