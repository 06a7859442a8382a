# SPDX-License-Identifier: Apache-2.0
"""Times the user's model on a rank's own rows and edges, or part of them: seconds per row, per edge, and per epoch.

Counts of FLOPs and bytes over measured rates miss much of an epoch: calls, the shapes of products, page faults, what
rows of this graph share. So a copy of the model runs forward, loss, backward and optimizer step on blocks of real
structure that need no other rank, with each operation timed by itself:

    blocks of some 60 rows        ──▶  what calls cost, whatever they work on
    blocks of thousands of rows   ──▶  the rest of each operation, charged to the level or layer whose size it has

Operations timed one by one do not quite add up to an epoch (and kernels of DGL itself are not seen by PyTorch), so
their sum is scaled to the time of an epoch that nobody watches.

Where there are several orders of the layers' products to choose from, their epochs take turns: machines change their
speed by more within seconds than orders differ by.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError

from dgl_hybrid.exchange.closure import LevelSets
from dgl_hybrid.graph.call_template import CallTemplate, flatten, shape_of
from dgl_hybrid.graph.layer_block import LayerBlock
from dgl_hybrid.graph.model_copy import copy_of, with_own_randomness, without_ddp
from dgl_hybrid.graph.static_results import StaticResults
from dgl_hybrid.graph.tiny_blocks import build_blocks_like, build_tiny_blocks, sizes_like
from dgl_hybrid.ops import EdgeDropout
from dgl_hybrid.planner import ModelTimes, ModelTrace
from dgl_hybrid.planner.probe import wait_for_device

RowFunction = Callable[[Tensor], Tensor]
AnyWantsMore = Callable[[bool, float], bool]
"""Takes whether this rank wants another epoch, and how many seconds its last one took (0: it had none); tells whether
any rank wants another."""

BUDGET_S = 1.0
"""An epoch on the larger blocks is to take so long at most; it runs a few times."""
FIRST_EDGES = 1 << 16
"""In the run that tells how large the larger blocks may be, and the least they have."""
FIRST_ROWS = 1 << 16
"""The most rows of a level of blocks that are larger than the rank's own, for their edges' sake. Hidden rows may be far
wider than what a model is given; and where there are many rows, few edges matter little."""
MAX_ELEMENTS, MAX_MADE_UP_ELEMENTS = 1 << 25, 1 << 23
"""Of one level's input rows; the second where blocks are larger than the rank's own."""
ROUNDS, MOST_ROUNDS = 3, 12
"""Epochs of one size that are watched and that are not, at least; short ones run unwatched as often as fits half of
`BUDGET_S`, as machines are slower at times. With several orders each has so many."""
PRECISION, MOST_UNSURE_ROUNDS = 0.05, 40
"""They go on until their median is known so well (its standard error over it), for as long as the least rounds may
take: epochs of ranks that share cores differ by a fifth (four on two cores: 64 to 227 ms, the median of five 116 to
180, of forty 141 to 159)."""


def _alone(wants_more: bool, last_s: float) -> bool:
    return wants_more


def time_model(
    model: nn.Module,
    template: CallTemplate,
    sets: LevelSets,
    orders: Sequence[ModelTrace],
    *,
    dropout: RowFunction = F.dropout,
    keep_static: bool = True,
    own_rows: Tensor | None = None,
    budget_s: float = BUDGET_S,
    any_wants_more: AnyWantsMore = _alone,
) -> list[ModelTimes] | None:
    """Runs copies of the model on blocks like this rank's and times them; takes a few `budget_s` for each order.

    All ranks do it at once, as in training, where they share the memory of their hosts, and cores where there are more
    ranks than those. Collective only through `any_wants_more`. Blocks of all orders, with the rows that they read, are
    held at once.

    Args:
        model: As traced; not changed.
        template: How it is called.
        sets: Of this rank, with everything communicated.
        orders: Traces of the model: which layers keep what they aggregate, and which sum before they multiply.
        dropout: What dropout will be in training.
        keep_static: Whether blocks will keep what they make of static tensors.
        own_rows: Positions of the rows of `sets` among the vertices this rank owns; see `CallTemplate.bind`.
        budget_s: For one epoch on the larger blocks.
        any_wants_more: Called before each epoch on the larger blocks, until it returns False: lets ranks begin epochs
            together, as in training, and none be alone before the last has enough. Epochs are of one order after the
            other, beginning anew with the first. Where None is returned or an error is raised it may not have come to
            that.

    Returns:
        The times of each order; None if the model's operations cannot be told apart (it runs its forward again in
        backward, or is on several devices).
    """
    devices = {parameter.device for parameter in model.parameters()} or {torch.device("cpu")}
    if len(devices) > 1:
        return None
    device = devices.pop()
    timers = [
        _Timer(model, template, sets, order, dropout=dropout, keep_static=keep_static, own_rows=own_rows, device=device)
        for order in orders
    ]
    with with_own_randomness(device), torch.inference_mode(False), torch.enable_grad():
        try:
            small = [timer.on(*build_tiny_blocks(timer.num_layers, timer.taken)) for timer in timers]
            calls = measure_in_turns(small, budget_s=budget_s)
            large = [timer.on(*timer.blocks_of(timer.affordable_factor(budget_s))) for timer in timers]
            measured = measure_in_turns(large, budget_s=budget_s, any_wants_more=any_wants_more)
        except CheckpointError:
            return None
    return [fit_times(*of_order) for of_order in zip(calls, measured, orders, strict=True)]


@dataclass
class Measured:
    """One size: an epoch that is not watched, and the seconds of what was watched."""

    rows: list[int]
    edges: list[int]
    elapsed_s: float = float("inf")
    ops: list[float] = field(default_factory=list)
    """Of each operation in program order."""
    charged_to: list[int] = field(default_factory=list)
    """For each: a level (0..L), a layer (L + 1..2L), or -1."""


def fit_times(calls: Measured, large: Measured, trace: ModelTrace) -> ModelTimes:
    """Finds what rows and edges cost from the same program's operations at two sizes. Pure.

    What grows without belonging to any level or layer is spread over those; if nothing that was watched grows, over
    edges and rows as the trace counts their bytes.
    """
    num_layers = trace.num_layers
    counts = [*large.rows, *large.edges]
    grown = [0.0] * len(counts)
    if len(calls.ops) == len(large.ops):
        for before_s, after_s, where in zip(calls.ops, large.ops, large.charged_to, strict=True):
            if where >= 0:
                grown[where] += max(after_s - before_s, 0.0)
    else:
        # Another program at another size (functions of the user's by degree): no operation corresponds to another.
        for measured, sign in ((large, 1.0), (calls, -1.0)):
            for seconds, where in zip(measured.ops, measured.charged_to, strict=True):
                if where >= 0:
                    grown[where] += sign * seconds
        grown = [max(seconds, 0.0) for seconds in grown]
    for index, layer in enumerate(trace.layers):
        if layer.keeps_result:
            grown[num_layers + 1 + index] = 0.0
    if sum(grown) <= 0.0:
        per_item = [level.row_bytes + level.row_flops for level in trace.levels]
        per_item += [0.0 if layer.keeps_result else layer.edge_bytes for layer in trace.layers]
        grown = [cost * count for cost, count in zip(per_item, counts, strict=True)]
    growth_s = max(large.elapsed_s - calls.elapsed_s, 0.0)
    scale = growth_s / sum(grown) if sum(grown) else 0.0
    # The small blocks have rows and edges, too: few, but what they cost is not to be paid twice.
    small = [*calls.rows, *calls.edges]
    per_item = [scale * seconds / max(count - few, 1) for seconds, count, few in zip(grown, counts, small, strict=True)]
    paid_s = sum(cost * few for cost, few in zip(per_item, small, strict=True))
    return ModelTimes(
        row_s=tuple(per_item[: num_layers + 1]),
        edge_s=tuple(per_item[num_layers + 1 :]),
        fixed_s=max(calls.elapsed_s - paid_s, 0.0),
    )


def wants_another_round(elapsed_s: Sequence[float], budget_s: float) -> bool:
    """Tells whether the median of these epochs is to be known better, and may cost another. Pure."""
    count, spent_s = len(elapsed_s), sum(elapsed_s)
    if count < ROUNDS or (count < MOST_ROUNDS and 2 * spent_s < budget_s):
        return True
    is_affordable = count < MOST_UNSURE_ROUNDS and spent_s < ROUNDS * budget_s
    return is_affordable and error_of_median(elapsed_s) > PRECISION


def error_of_median(times_s: Sequence[float]) -> float:
    """Returns the standard error of the median of times, over it, as their quartiles tell it. Pure.

    That of a single one is infinite. Of normal ones it would be 1.253 deviations over the root of their number, and
    their quartiles 1.349 deviations apart; quartiles leave out what disturbs single epochs.
    """
    if len(times_s) < 2:
        return math.inf
    first, median, third = statistics.quantiles(times_s, n=4)
    return 1.253 / 1.349 * (third - first) / math.sqrt(len(times_s)) / max(median, 1e-9)


def measure_in_turns(
    epochs: Sequence[_Epoch],
    *,
    budget_s: float,
    rounds: int | None = None,
    any_wants_more: AnyWantsMore = _alone,
) -> list[Measured]:
    """Takes the median of a few epochs that are not watched, and the least seconds of each operation in others.

    The median is what the next epochs will be like; operations only share it out, so what disturbs one is left out. Of
    several, each has its median share of a round: medians of their own would be those of other rounds, which took
    another time for all of them.

    Args:
        epochs: What is timed, by turns: each has as many as the others.
        budget_s: See `wants_another_round`.
        rounds: How often; None: as `wants_another_round` says of any of them.
        any_wants_more: See `time_model`; nothing else here is collective.

    Returns:
        What `epochs` have measured.
    """
    for epoch in epochs:
        epoch.run()  # makes what is kept, structures, buffers
    elapsed_s: list[list[float]] = [[] for _ in epochs]
    last_s, turn = 0.0, 0

    def wants_more() -> bool:
        if turn % len(epochs):
            return True  # others have had theirs
        if rounds is not None:
            return turn < rounds * len(epochs)
        return any(wants_another_round(of_epoch, budget_s) for of_epoch in elapsed_s)

    while any_wants_more(wants_more(), last_s):
        epoch, of_epoch = epochs[turn % len(epochs)], elapsed_s[turn % len(epochs)]
        start = time.perf_counter()
        epoch.run()
        last_s = time.perf_counter() - start
        of_epoch.append(last_s)
        if len(of_epoch) <= ROUNDS:
            epoch.run_watched()
        turn += 1
    rounds_s = [sum(of_round) for of_round in zip(*elapsed_s, strict=True)]
    for epoch, of_epoch in zip(epochs, elapsed_s, strict=True):
        share = statistics.median(of_epoch[number] / round_s for number, round_s in enumerate(rounds_s))
        epoch.measured.elapsed_s = share * statistics.median(rounds_s)
    return [epoch.measured for epoch in epochs]


@dataclass(frozen=True)
class _Epoch:
    """A forward, loss, backward and optimizer step on blocks of one size."""

    run: Callable[[], None]
    measured: Measured
    device: torch.device

    def run_watched(self) -> None:
        """Runs it once, and notes how long each operation takes at least."""
        measured, watch = self.measured, _Stopwatch(self.measured.rows, self.measured.edges, self.device)
        with watch:
            self.run()
        is_first = len(measured.ops) != len(watch.ops)
        measured.ops = watch.ops if is_first else [min(pair) for pair in zip(measured.ops, watch.ops, strict=True)]
        measured.charged_to = watch.charged_to


class _Timer:
    """One order of a model's products, to be timed on blocks of several sizes."""

    def __init__(
        self,
        model: nn.Module,
        template: CallTemplate,
        sets: LevelSets,
        trace: ModelTrace,
        *,
        dropout: RowFunction,
        keep_static: bool,
        own_rows: Tensor | None,
        device: torch.device,
    ) -> None:
        self.device, self.num_layers = device, trace.num_layers
        self._own_rows, self._sums_first = own_rows, trace.sums_first
        inner = without_ddp(model)
        self._model = copy_of(inner).train()
        self._parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        # What most scripts use; the parameters are few beside the rows. It learns nothing: a model that got better at
        # made-up classes would soon have gradients so small that products of them take many times as long.
        self._optimizer = torch.optim.Adam(self._parameters, lr=0.0) if self._parameters else None
        self._template, self._sets, self._dropout, self._keep_static = template, sets, dropout, keep_static
        self._kept = frozenset(index + 1 for index, layer in enumerate(trace.layers) if layer.keeps_result)
        self.taken = {dimension for parameter in inner.parameters() for dimension in parameter.shape}
        shapes = [shape_of(value) for value in flatten((template.args, template.kwargs))]
        self.taken |= {dimension for shape in shapes for dimension in shape}
        sizes = sizes_like(sets)
        self._num_edges = sum(
            layer.num_edges * sizes[layer.layer] // max(layer.num_dst, 1)
            for layer in sets.layers
            if layer.layer not in self._kept
        )
        width = max((functools.reduce(int.__mul__, shape, 1) for shape in shapes), default=1)
        num_elements = max(width * sizes[0], 1)
        self._largest_factor = min(MAX_ELEMENTS / num_elements, max(MAX_MADE_UP_ELEMENTS / num_elements, 1.0))
        self._most_rows = max(*sizes, 1)

    def affordable_factor(self, budget_s: float) -> float:
        """Returns how large blocks may be, beside the rank's own: at most as large, unless those have next to no edges,
        and such that an epoch takes no longer than the budget, or is a short one.
        """
        # Nearly all edges may be those of a layer whose sums are kept: rows are what there is too much of then.
        factor = min(FIRST_EDGES / max(self._num_edges, 1), self._largest_factor)
        if factor >= 1.0:
            return min(factor, max(FIRST_ROWS / self._most_rows, 1.0))
        (first,) = measure_in_turns([self.on(*self.blocks_of(factor))], budget_s=budget_s, rounds=1)
        scale = max(min(budget_s / max(first.elapsed_s, 1e-6), 1.0 / factor), 1.0)
        return min(factor * scale, self._largest_factor)

    def blocks_of(self, factor: float) -> tuple[list[LayerBlock], list[int], list[int]]:
        # What is kept of sparse rows costs by the entries it has, and those come along the edges.
        without = frozenset[int]() if self._template.has_sparse_rows else self._kept
        return build_blocks_like(self._sets, factor, self.taken, without_edges=without)

    def on(self, blocks: list[LayerBlock], rows: list[int], edges: list[int]) -> _Epoch:
        """Returns an epoch on blocks with so many rows of each level and edges of each layer."""
        blocks = [block.to(self.device) for block in blocks]
        generator = torch.Generator().manual_seed(0)
        args, kwargs, static = self._template.bind(blocks, generator, self._own_rows)
        for block in blocks:
            block.on_edge_dropout = _draw_edge_dropout
            block.sums_first = self._sums_first[block.layer - 1]
            if self._keep_static:
                block.static_results = StaticResults(lambda x: any(x is known for known in static))
        run = functools.partial(self._run, args, kwargs, blocks[0].device.type)
        return _Epoch(run, Measured(rows, edges), self.device)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str) -> None:
        with _DropoutAs(self._dropout), self._template.casting(device_type):
            outputs = [x for x in flatten(self._model(*args, **kwargs)) if isinstance(x, Tensor) and x.requires_grad]
            losses = [_loss_of(x) for x in outputs]
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        if losses:
            torch.autograd.backward(losses)
        if self._optimizer is not None:
            # Adam takes none of a sparse table; whose optimizer takes them touches the rows that were read.
            for parameter in self._parameters:
                if parameter.grad is not None and parameter.grad.layout != torch.strided:
                    parameter.grad = None
            self._optimizer.step()
        wait_for_device(self.device)


def _loss_of(rows: Tensor) -> Tensor:
    """Stands for the script's: cross-entropy over classes where there are any, each with rows of its own.

    Of logits of at most 1: made-up rows and degrees can give hundreds, and `exp(-100)` is a number that processors take
    many times as long to multiply, all the way back through the layers.
    """
    if rows.dim() == 2 and rows.shape[1] > 1:
        largest = rows.detach().abs().amax().clamp(min=1.0) if len(rows) else 1.0
        return F.cross_entropy(rows / largest, torch.arange(len(rows), device=rows.device) % rows.shape[1])
    return rows.sum()


def _draw_edge_dropout(block: LayerBlock, p: float) -> EdgeDropout | None:
    return EdgeDropout.from_call(p, seed=0, step=0, call_index=0)


class _DropoutAs(TorchFunctionMode):
    def __init__(self, dropout: RowFunction) -> None:
        super().__init__()
        self._dropout = dropout

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (F.dropout, torch.dropout):
            return func(*args, **kwargs)
        given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
        given.setdefault("training", given.get("train", True))
        is_at_work = given["training"] and given.get("p", 0.5) > 0.0
        return self._dropout(given["input"]) if is_at_work else given["input"]


class _Stopwatch(TorchDispatchMode):
    """Times every operation and tells by the sizes of its tensors what it works on.

    On a GPU each is waited for: what is launched ahead of time in training is in the epochs that are not watched.
    """

    def __init__(self, rows: list[int], edges: list[int], device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._places = {size: place for place, size in enumerate([*rows, *edges])}
        self._num_levels = len(rows)
        self.ops: list[float] = []
        self.charged_to: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        wait_for_device(self._device)
        start = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        wait_for_device(self._device)
        self.ops.append(time.perf_counter() - start)
        found = [
            self._places[dimension]
            for value in flatten((out, args, kwargs or {}))
            if isinstance(value, Tensor)
            for dimension in value.shape
            if dimension in self._places
        ]
        # Whatever works along edges is charged to them, though it writes rows.
        layers = [place for place in found if place >= self._num_levels]
        self.charged_to.append(layers[0] if layers else found[0] if found else -1)
        return out
