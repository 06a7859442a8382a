# SPDX-License-Identifier: Apache-2.0
"""Traces a user's model on tiny blocks: what it exchanges, what rows and edges cost, and whether it mixes rows."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from dgl_hybrid.errors import BlockError
from dgl_hybrid.graph.call_template import CallTemplate, float_tensors_in
from dgl_hybrid.graph.layer_block import LayerBlock
from dgl_hybrid.graph.model_copy import copy_of, seed_generators, with_own_randomness, without_ddp
from dgl_hybrid.graph.op_rates import row_slowdown
from dgl_hybrid.graph.rows_apart import compare_rows_apart, notes_on
from dgl_hybrid.graph.static_results import StaticResults
from dgl_hybrid.graph.tiny_runs import copy_on, device_of, in_memory_or_on, tiny_blocks_on
from dgl_hybrid.graph.trace_modes import CostMode, NoCollectives, QuietMode, SplitMode
from dgl_hybrid.graph.trace_record import TraceObserver, TraceRecord
from dgl_hybrid.planner import LayerTrace, LevelTrace, ModelTrace

RowFunction = Callable[[Tensor], Tensor]

_logger = logging.getLogger(__name__)

_MOST_DRAWS = 32
"""How often a model is run until each layer has been used, which it may skip now and then."""

_evaluated: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models that were run in evaluation mode, too."""

_warned_of: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
"""What was said of a model, which is traced again for every order of its products, and as epochs drift."""


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
    inner = without_ddp(model)

    def trace(where: torch.device) -> TraceResult:
        return _trace_on(
            where, inner, template, num_layers, dropout=dropout, keep_static=keep_static, sums_first=sums_first
        )

    return in_memory_or_on(device_of(inner), trace)


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
    device = device_of(inner)
    # The caller may be evaluating; the trace needs a backward.
    with with_own_randomness(device), torch.inference_mode(False), torch.enable_grad():
        pristine = copy_on(where, inner).train()
        blocks, sizes, num_edges = tiny_blocks_on(where, inner, template, num_layers)
        for block in blocks:
            block.sums_first = bool(sums_first) and sums_first[block.layer - 1]
            # As `QuietMode` does with other dropout; what it costs is in the op's own time.
            block.on_edge_dropout = lambda block, p: None
        args, kwargs, static = template.bind(blocks, torch.Generator().manual_seed(0))
        if keep_static:
            for block in blocks:
                block.static_results = StaticResults(lambda x: any(x is known for known in static))

        copied = copy_of(pristine)  # the same in all draws: it may draw from a generator of its own
        slowdown = row_slowdown(dropout, device)

        def measure(draw: int) -> TraceRecord:
            record = TraceRecord.empty(num_layers)
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
        with template.casting(where.type), NoCollectives():
            outputs = compare_rows_apart(
                lambda: _opened(copy_of(pristine)), args, kwargs, blocks, record, sizes, num_edges
            )
            if not sums_first and inner not in _evaluated:
                _evaluated.add(inner)
                _look_at_evaluation(pristine, args, kwargs, blocks, sizes, num_edges)
        for kind, text in notes_on(outputs, record.output_rows, sizes, num_edges):
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


def _look_at_evaluation(
    pristine: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    blocks: list[LayerBlock],
    sizes: list[int],
    num_edges: list[int],
) -> None:
    """Warns where a model keeps rows apart in training and mixes them as it evaluates: `infer` refuses that, and a
    script's own evaluation is not looked at.
    """
    record = TraceRecord.empty(len(blocks))
    try:
        compare_rows_apart(
            lambda: copy_of(pristine).eval(), args, kwargs, blocks, record, sizes, num_edges, warns=False
        )
    except BlockError as error:
        _logger.warning("in evaluation mode this holds, so that what the model evaluates to is not exact: %s", error)
    except Exception as error:  # it may never be evaluated
        _logger.debug("the model could not be run in evaluation mode (%s: %s)", type(error).__name__, error)


def _opened(model: nn.Module) -> nn.Module:
    """Fills weights that are trained and begin as zeros: a gate among them hides what training will let through."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point() and parameter.numel() and not parameter.any():
                parameter.fill_(0.5)
    return model


def _measure(
    copied: nn.Module,
    template: CallTemplate,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    record: TraceRecord,
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
    observer = TraceObserver(record, num_edges, device)
    # The first epoch makes what is kept, results and structures; what the others cost is of interest.
    # A GPU's generator is not seeded: the second run begins where the first did, and the next draw where that ends.
    with with_own_randomness(where):
        seed_generators(draw)
        with NoCollectives(), template.casting(where.type), QuietMode(record, sizes), SplitMode(record, num_edges):
            copied(*args, **kwargs)
    for block in blocks:
        block.observer = observer
    costs = CostMode(record, sizes, num_edges)
    try:
        with NoCollectives(), QuietMode(record, sizes, costs, slowdown), costs:
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


def _measure_all_layers(measure: Callable[[int], TraceRecord]) -> TraceRecord:
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
    record: TraceRecord,
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
            beside_flops=record.beside_flops.get(index + 1, 0.0) / sizes[index + 1],
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


def _check_all_used(record: TraceRecord, num_layers: int) -> None:
    unused = record.unused()
    if unused:
        raise BlockError(
            f"the model does not use the blocks of layers {unused}: the loader was made for {num_layers} layers (the "
            f"length of the sampler's fanouts), the model has {num_layers - len(unused)}. Make them equal."
        )


def _differentiable(value: Any) -> list[Tensor]:
    return [x for x in float_tensors_in(value) if x.requires_grad]
