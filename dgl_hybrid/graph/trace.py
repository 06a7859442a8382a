# SPDX-License-Identifier: Apache-2.0
"""Traces a user's model on tiny blocks: what it exchanges, what rows and edges cost, and whether it mixes rows."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import dgl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError
from torch.utils.flop_counter import flop_registry

from dgl_hybrid.errors import BlockError, HybridError
from dgl_hybrid.graph.call_template import CallTemplate, flatten, map_leaves, shape_of
from dgl_hybrid.graph.layer_block import BlockObserver, FusedOp, LayerBlock
from dgl_hybrid.graph.model_copy import copy_of, seed_generators, with_own_randomness
from dgl_hybrid.graph.op_rates import attention_slowdown, row_slowdown, weighted_slowdown
from dgl_hybrid.graph.static_results import StaticResults
from dgl_hybrid.graph.tiny_blocks import build_tiny_blocks
from dgl_hybrid.planner import LayerTrace, LevelTrace, ModelTrace

RowFunction = Callable[[Tensor], Tensor]
ResultT = TypeVar("ResultT")

_logger = logging.getLogger(__name__)

_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"})
"""Namespaces of what torch.distributed does between ranks."""

_MOST_DRAWS = 32
"""How often a model is run until each layer has been used, which it may skip now and then."""

_warned_of: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
"""What was said of a model, which is traced again for every order of its products, and as epochs drift."""


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
    exchanged: set[int] = field(default_factory=set)
    """Layers that exchange in every epoch."""
    kept: set[int] = field(default_factory=set)
    """Layers that keep what they aggregate."""
    summed: set[int] = field(default_factory=set)
    """Layers that do something along edges which can be split by source."""
    attended: set[int] = field(default_factory=set)
    """Those of them whose every edge counts by itself."""
    unsplit: set[int] = field(default_factory=set)
    """Layers that do something along edges which cannot."""
    ordered: set[int] = field(default_factory=set)
    """Layers that asked in which order to sum and multiply."""
    batch_norm_levels: set[int] = field(default_factory=set)
    output_rows: set[int] = field(default_factory=set)
    """How many rows the outputs have that need a gradient."""
    blocks: list[LayerBlock] = field(default_factory=list)
    """What the model runs on."""

    def scale(self, factor: float) -> None:
        """Multiplies all costs."""
        for costs in (self.level_flops, self.level_bytes, self.edge_flops, self.edge_bytes):
            costs[:] = [cost * factor for cost in costs]

    def unused(self) -> list[int]:
        """The layers whose blocks were not used."""
        return [index + 1 for index, fields in enumerate(self.fields) if not fields]

    def add_unused(self, other: _Record) -> None:
        """Takes what another draw of the model did in layers that were not used here, and what it did besides."""
        for index in range(len(self.fields)):
            self.fields[index] = self.fields[index] or other.fields[index]
        for name in ("level_flops", "level_bytes", "level_held", "edge_flops", "edge_bytes", "edge_held"):
            ours, theirs = getattr(self, name), getattr(other, name)
            ours[:] = [max(pair) for pair in zip(ours, theirs, strict=True)]
        for name in ("exchanged", "kept", "summed", "attended", "unsplit", "ordered", "batch_norm_levels"):
            getattr(self, name).update(getattr(other, name))

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
    def __init__(self, record: _Record, num_edges: list[int], device: torch.device) -> None:
        self.record, self.num_edges, self.device = record, num_edges, device
        self.passed: list[tuple[int, Tensor, Callable[[int, int], float]]] = []

    def on_exchange(self, layer: int, fields: list[Tensor]) -> None:
        self.record.exchanged.add(layer)
        for x in fields:
            self.record.fields[layer - 1].append((_row_numel(x), x.element_size(), x.requires_grad))

    def on_kept_result(self, layer: int, operands: tuple[Tensor, ...]) -> None:
        self.record.kept.add(layer)
        for x in operands:
            self.record.fields[layer - 1].append((_row_numel(x), x.element_size(), False))

    def on_choice_of_order(self, layer: int) -> None:
        self.record.ordered.add(layer)

    def on_message_passing(self, layer: int, fields: list[Tensor], *, is_weighted: bool) -> None:
        slowdown = partial(weighted_slowdown, device=self.device) if is_weighted else lambda heads, width: 1.0
        self.passed.extend((layer, x, slowdown) for x in fields)

    def on_attention(self, layer: int, op: FusedOp, x: Tensor, *, has_dropout: bool) -> None:
        self.passed.append((layer, x, partial(attention_slowdown, op, device=self.device, has_dropout=has_dropout)))

    def charge(self) -> None:
        """Adds what was passed to the record, timed and not counted: kernels read each source once for each edge."""
        for layer, x, slowdown in self.passed:
            # Gathered once forward, and once backward if there is one.
            passes = 2 if x.requires_grad else 1
            elements = passes * _row_numel(x) * self.num_edges[layer - 1]
            heads = _row_numel(x) // x.shape[-1] if x.dim() > 2 else 1
            factor = slowdown(heads, _row_numel(x) // heads)
            self.record.edge_flops[layer - 1] += elements
            self.record.edge_bytes[layer - 1] += factor * elements * x.element_size()


class _CostMode(TorchDispatchMode):
    """Charges every operation to the level or layer whose size one of its tensors has."""

    def __init__(self, record: _Record, sizes: list[int], num_edges: list[int]) -> None:
        super().__init__()
        self.record, self.sizes, self.num_edges = record, sizes, num_edges
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
                if dimension in self.sizes:
                    level = self.sizes.index(dimension)
                    self.record.level_flops[level] += flops
                    self.record.level_bytes[level] += self.factor * moved
                    self.record.level_held[level] += held
                    return out
                if dimension in self.num_edges:
                    layer = self.num_edges.index(dimension)
                    self.record.edge_flops[layer] += flops
                    self.record.edge_bytes[layer] += self.factor * moved
                    self.record.edge_held[layer] += held
                    return out
        return out


class _SplitMode(TorchDispatchMode):
    """Notes of which layers the message passing can be split by source, and nothing else."""

    def __init__(self, record: _Record, num_edges: list[int]) -> None:
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


def _note_split(record: _Record, num_edges: list[int], func: Any, args: tuple[Any, ...], inputs: list[Tensor]) -> None:
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


class _NoCollectives(TorchDispatchMode):
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


class _QuietMode(TorchFunctionMode):
    """Notes batch norm and puts a row-local affine map in its place; dropout becomes a product that costs as much."""

    def __init__(
        self, record: _Record, sizes: list[int], costs: _CostMode | None = None, slowdown: float = 1.0
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
        out = input * (1.0 if weight is None else weight)
        return (out if bias is None else out + bias).to(input.dtype)


@dataclass(frozen=True, kw_only=True)
class TraceResult:
    """A model's trace and what decides how far demand closure may go."""

    trace: ModelTrace
    dense_below: int
    """Levels below this one must hold every owned vertex: 1 + the last level that batch norm couples, 0 if none."""


def trace_model(
    model: nn.Module,
    template: CallTemplate,
    num_layers: int,
    *,
    dropout: RowFunction = F.dropout,
    keep_static: bool = True,
    sums_first: Sequence[bool] = (),
) -> TraceResult:
    """Runs a copy of the model forward and backward on tiny blocks and records its costs. Not collective.

    Args:
        model: Any module that is called with blocks; not changed.
        template: How it is called.
        num_layers: Number of blocks.
        dropout: What dropout will be in training, for its cost.
        keep_static: Whether blocks will keep what they make of static tensors.
        sums_first: (L,) which layers are to sum before they multiply although that makes rows narrower; empty: none.

    Raises:
        BlockError: If the model uses fewer blocks than there are, normalises over the output level, or mixes rows by
            something other than batch norm, which could not be exact on partitions.
    """
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model

    def trace(where: torch.device) -> TraceResult:
        return _trace_on(
            where, inner, template, num_layers, dropout=dropout, keep_static=keep_static, sums_first=sums_first
        )

    return _in_memory_or_on(_device_of(inner), trace)


def _trace_on(
    where: torch.device,
    inner: nn.Module,
    template: CallTemplate,
    num_layers: int,
    *,
    dropout: RowFunction,
    keep_static: bool,
    sums_first: Sequence[bool],
) -> TraceResult:
    # Counts are the same everywhere; how much slower some operations are than others is not.
    device = _device_of(inner)
    # The caller may be evaluating; the trace needs a backward.
    with with_own_randomness(device), torch.inference_mode(False), torch.enable_grad():
        pristine = _copy_on(where, inner).train()
        blocks, sizes, num_edges = _tiny_blocks_on(where, inner, template, num_layers)
        for block in blocks:
            block.sums_first = bool(sums_first) and sums_first[block.layer - 1]
            # As `_QuietMode` does with other dropout; what it costs is in the op's own time.
            block.on_edge_dropout = lambda block, p: None
        args, kwargs, static = template.bind(blocks, torch.Generator().manual_seed(0))
        if keep_static:
            for block in blocks:
                block.static_results = StaticResults(lambda x: any(x is known for known in static))

        copied = copy_of(pristine)  # the same in all draws: it may draw from a generator of its own
        slowdown = row_slowdown(dropout, device)

        def measure(draw: int) -> _Record:
            record = _Record.empty(num_layers)
            record.blocks = blocks
            _measure(copied, template, args, kwargs, record, sizes, num_edges, device, slowdown, draw)
            return record

        record = _measure_all_layers(measure)
        _check_all_used(record, num_layers)
        if num_layers in record.batch_norm_levels:
            raise BlockError(
                "the model normalises the output of its last layer over rows (batch norm): only the seeds are computed "
                "there, while full-graph statistics run over every vertex. Put the normalisation before the last layer."
            )
        with template.casting(where.type), _NoCollectives():
            outputs = _check_rows_apart(lambda: copy_of(pristine), args, kwargs, blocks, record, sizes, num_edges)
        for kind, text in _notes_on(outputs, record.output_rows, sizes, num_edges):
            if kind not in _warned_of.setdefault(inner, set()):
                _warned_of[inner].add(kind)
                _logger.warning("%s", text)
        if template.autocast is not None:  # whatever the dtypes of their operands; as `LayerBlock.split_of` has it
            record.unsplit |= record.summed
    parameters = sum(parameter.numel() for parameter in inner.parameters())
    dtype = next((str(x.dtype).removeprefix("torch.") for x in inner.parameters() if x.is_floating_point()), "float32")
    return TraceResult(
        trace=_summarise(record, sizes, num_edges, parameters, dtype, sums_first or [False] * num_layers),
        dense_below=1 + max(record.batch_norm_levels, default=-1),
    )


def check_rows_apart(model: nn.Module, template: CallTemplate, num_layers: int) -> None:
    """Runs copies of a model that evaluates on tiny blocks, and looks whether it mixes rows. Not collective.

    Args:
        model: In evaluation mode, called with blocks; not changed.
        template: How it is called.
        num_layers: Number of blocks.

    Raises:
        BlockError: If it mixes rows of different vertices.
    """

    def check(where: torch.device) -> None:
        with with_own_randomness(where), torch.inference_mode(False):
            pristine = _copy_on(where, model)
            blocks, sizes, num_edges = _tiny_blocks_on(where, model, template, num_layers)
            args, kwargs, _ = template.bind(blocks, torch.Generator().manual_seed(0))
            record = _Record.empty(num_layers)
            with template.casting(where.type), _NoCollectives():
                _check_rows_apart(lambda: copy_of(pristine), args, kwargs, blocks, record, sizes, num_edges)

    _in_memory_or_on(_device_of(model), check)


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _in_memory_or_on(device: torch.device, run: Callable[[torch.device], ResultT]) -> ResultT:
    """Runs a copy of a model in host memory, where its numbers are the same for any GPU and cost no launches; on its
    device, if it cannot run elsewhere: it may hold tensors that are neither parameters nor buffers, or name the device.
    """
    try:
        return run(torch.device("cpu"))
    except HybridError:
        raise
    except Exception as error:
        if device.type == "cpu":
            raise
        _logger.debug("the model is traced on %s (in host memory: %s: %s)", device, type(error).__name__, error)
    return run(device)


def _copy_on(where: torch.device, model: nn.Module) -> nn.Module:
    """Returns a copy in host memory, or one that stays where the model is."""
    return copy_of(model).cpu() if where.type == "cpu" else copy_of(model)


def _tiny_blocks_on(
    where: torch.device, model: nn.Module, template: CallTemplate, num_layers: int
) -> tuple[list[LayerBlock], list[int], list[int]]:
    """Returns tiny blocks on a device whose sizes are no dimension of the model or of what it is given."""
    taken = {dimension for parameter in model.parameters() for dimension in parameter.shape}
    taken |= {dimension for value in flatten((template.args, template.kwargs)) for dimension in shape_of(value)}
    blocks, sizes, num_edges = build_tiny_blocks(num_layers, taken)
    return [block.to(where) for block in blocks], sizes, num_edges


def _measure(
    copied: nn.Module,
    template: CallTemplate,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    record: _Record,
    sizes: list[int],
    num_edges: list[int],
    device: torch.device,
    slowdown: float,
    draw: int,
) -> None:
    """Runs a copy twice, the second time backward, too, and adds what that costs to the record.

    Args:
        slowdown: Of dropout.
        draw: What the model draws in both runs.
    """
    blocks = record.blocks
    where = blocks[0].device
    observer = _Observer(record, num_edges, device)
    # The first epoch makes what is kept, results and structures; what the others cost is of interest.
    # A GPU's generator is not seeded: the second run begins where the first did, and the next draw where that ends.
    with with_own_randomness(where):
        seed_generators(draw)
        with _NoCollectives(), template.casting(where.type), _QuietMode(record, sizes), _SplitMode(record, num_edges):
            copied(*args, **kwargs)
    for block in blocks:
        block.observer = observer
    costs = _CostMode(record, sizes, num_edges)
    try:
        with _NoCollectives(), _QuietMode(record, sizes, costs, slowdown), costs:
            seed_generators(draw)
            with template.casting(where.type):
                outputs = _differentiable(copied(*args, **kwargs))
            record.output_rows = {len(x) for x in outputs if x.dim()}
            costs.forward = False
            try:
                if outputs:
                    torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
            except CheckpointError:
                # A forward that is run again in backward is out of reach of the modes here and does not match the
                # first. It costs a forward, and the backward two.
                record.scale(4.0)
    finally:
        for block in blocks:
            block.observer = None
    del outputs
    observer.charge()


def _measure_all_layers(measure: Callable[[int], _Record]) -> _Record:
    """Measures a model, and again by other draws while there are layers that it has skipped.

    With stochastic depth it skips some at random: one forward says nothing of which blocks it uses, and those that it
    skips would cost nothing.
    """
    record = measure(0)
    for draw in range(1, _MOST_DRAWS):
        if not record.unused():
            break
        record.add_unused(measure(draw))
    return record


def _summarise(
    record: _Record,
    sizes: list[int],
    num_edges: list[int],
    num_parameters: int,
    dtype: str,
    sums_first: Sequence[bool],
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
            can_sum_first=index + 1 in record.ordered,
            sums_first=sums_first[index],
            can_split=index + 1 in record.summed - record.unsplit,
            can_sum_apart=index + 1 in record.summed - record.unsplit - record.attended,
            keeps_result=index + 1 in record.kept - record.exchanged,
            mixes_rows=index in record.batch_norm_levels,
            edge_held_bytes=record.edge_held[index] / edges,
        )
        for index, edges in enumerate(num_edges)
    )
    return ModelTrace(levels=levels, layers=layers, dtype=dtype, num_parameters=num_parameters)


def _check_all_used(record: _Record, num_layers: int) -> None:
    unused = record.unused()
    if unused:
        raise BlockError(
            f"the model does not use the blocks of layers {unused}: the loader was made for {num_layers} layers (the "
            f"length of the sampler's fanouts), the model has {num_layers - len(unused)}. Make them equal."
        )


def _check_rows_apart(
    make_model: Callable[[], nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    blocks: list[LayerBlock],
    record: _Record,
    sizes: list[int],
    num_edges: list[int],
) -> list[tuple[Tensor, Tensor]]:
    """Changes row 0, which no other row reads, and looks whether any other row of the output changes.

    Row 0 of what the model is given, of the fields it finds in the blocks, and of what it first exchanges, which may
    come from a table of its own.

    A model may draw numbers (which layer to skip) and change its own state in every forward (`spectral_norm`): each run
    has a copy and generators in the same state.

    Args:
        make_model: Makes a copy.

    Returns:
        The tensors of the output without that change and with it; none, where that cannot be compared.
    """

    def copied(value: Any) -> Any:
        # Disturbed rows are no static tensor, and layers sum in another order then: so must the plain ones be.
        return value.detach().clone() if isinstance(value, Tensor) else value

    def disturb(value: Any) -> Any:
        changed = copied(value)
        if isinstance(value, Tensor) and value.dim() and len(value) in sizes:
            if value.is_floating_point():
                changed[0] = -3.0 * changed[0] + 1.0
            elif value.dtype in (torch.int32, torch.int64):
                changed[0] += 1  # an id: made-up ones are all 0
        return changed

    frames = [blocks[0].srcdata, blocks[-1].dstdata]
    given = [{name: rows for name, rows in frame.items() if name != dgl.NID} for frame in frames]

    where = blocks[0].device

    def run(change: Callable[[Any], Any], observer: BlockObserver | None) -> list[Tensor]:
        for frame, fields in zip(frames, given, strict=True):
            for name, rows in fields.items():
                frame[name] = change(rows)
        blocks[0].observer = observer
        model = make_model()
        try:
            with with_own_randomness(where):
                seed_generators(0)
                return _tensors(model(*map_leaves(args, change), **map_leaves(kwargs, change)))
        finally:
            blocks[0].observer = None

    with torch.no_grad(), _QuietMode(record, sizes):
        plain, again = run(copied, None), run(copied, None)
        if not all(map(_are_close, plain, again)):
            _logger.warning(
                "two forwards of the model from the same state differ, so it was not checked that rows of different "
                "vertices are only mixed by message passing and batch norm; anything else would not be exact"
            )
            return []
        try:
            disturbed = run(disturb, _Disturber())
        except (IndexError, RuntimeError):  # of a table with one row
            disturbed = run(lambda x: copied(x) if _is_integer(x) else disturb(x), _Disturber())
    for before, after in zip(plain, disturbed, strict=True):
        rows_of_level = before.dim() and len(before) in sizes
        if rows_of_level and not _are_close(before[1:], after[1:]):
            raise BlockError(
                "the model mixes rows of different vertices outside message passing (a norm or a mean over nodes), "
                "which cannot be exact on a partition. Use BatchNorm1d, which is supported, or a norm over features "
                "such as LayerNorm."
            )
    return list(zip(plain, disturbed, strict=True))


def _notes_on(
    outputs: list[tuple[Tensor, Tensor]], differentiable: set[int], sizes: list[int], num_edges: list[int]
) -> Iterator[tuple[str, str]]:
    """Yields what is to be said of outputs over which a loss may not be exact, each with a name of its kind.

    Args:
        outputs: From `_check_rows_apart`.
        differentiable: How many rows those have that need a gradient.
    """
    advice = (
        "Take losses over rows of the seeds, which are the first ones at every level: h[:len(seeds)], and reduce those "
        "outside of the model."
    )
    for before, after in outputs:
        rows = len(before) if before.dim() else 0
        of_lower_level, of_edges = rows in sizes[:-1], rows in num_edges
        if (of_lower_level or of_edges) and rows in differentiable:
            what = f"the vertices of level {sizes.index(rows)}" if of_lower_level else "the edges of a layer"
            yield (
                what,
                f"the model returns a tensor with a row for each of {what}, through which gradients may come. Each "
                f"rank holds those that its seeds need, some of them for several ranks, and weighs its loss by its "
                f"number of seeds: a loss over all of these rows would not be that of the full graph. {advice}",
            )
        is_of_rows = of_lower_level or of_edges or rows == sizes[-1]
        if not is_of_rows and not torch.allclose(before, after, equal_nan=True):
            yield (
                "scalar",
                f"the model returns a tensor of shape {tuple(before.shape)} that is made of rows. On each rank it is "
                f"made of the rows held there: right for a mean over the seeds (a loss), wrong for one over the rows "
                f"of a lower level, also where those are returned and reduced outside. {advice}",
            )


def _are_close(before: Tensor, after: Tensor) -> bool:
    return before.shape == after.shape and torch.allclose(before, after, rtol=1e-5, atol=1e-7, equal_nan=True)


def _is_integer(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point()


class _Disturber:
    """Changes row 0 of whatever a block exchanges, in copies: rows may be one row repeated, or a parameter's."""

    def on_exchange(self, layer: int, fields: list[Tensor]) -> None:
        for position, rows in enumerate(fields):
            if rows.is_floating_point() and len(rows):
                fields[position] = rows.clone()
                fields[position][0] = -3.0 * rows[0] + 1.0

    def on_message_passing(self, layer: int, fields: list[Tensor], *, is_weighted: bool) -> None: ...

    def on_attention(self, layer: int, op: FusedOp, x: Tensor, *, has_dropout: bool) -> None: ...

    def on_kept_result(self, layer: int, operands: tuple[Tensor, ...]) -> None: ...

    def on_choice_of_order(self, layer: int) -> None: ...


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in flatten(value) if isinstance(x, Tensor) and x.is_floating_point()]


def _differentiable(value: Any) -> list[Tensor]:
    return [x for x in _tensors(value) if x.requires_grad]


def _row_numel(x: Tensor) -> int:
    return int(torch.Size(x.shape[1:]).numel())
