# SPDX-License-Identifier: Apache-2.0
"""Whether a model mixes rows of different vertices outside message passing, which could not be exact on partitions."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import dgl
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from dgl_hybrid.errors import BlockError
from dgl_hybrid.graph.call_template import CallTemplate, float_tensors_in, map_leaves
from dgl_hybrid.graph.layer_block import BlockObserver, FusedOp, LayerBlock
from dgl_hybrid.graph.model_copy import copy_of, seed_generators, with_own_randomness
from dgl_hybrid.graph.outside_state import outside_state_kept
from dgl_hybrid.graph.tiny_blocks import rows_alone
from dgl_hybrid.graph.tiny_runs import copy_on, device_of, in_memory_or_on, tiny_blocks_on
from dgl_hybrid.graph.trace_modes import NoCollectives, QuietMode
from dgl_hybrid.graph.trace_record import TraceRecord

_logger = logging.getLogger(__name__)

_ROUGH = 1e-5
"""Numbers of fewer digits hide behind their rounding what a mean over rows changes: those are compared by every bit."""


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
            pristine = copy_on(where, model)
            blocks, sizes, num_edges = tiny_blocks_on(where, model, template, num_layers)
            args, kwargs, _ = template.bind(blocks, torch.Generator().manual_seed(0))
            record = TraceRecord.empty(num_layers)
            with template.casting(where.type), NoCollectives():
                compare_rows_apart(lambda: copy_of(pristine), args, kwargs, blocks, record, sizes, num_edges)

    in_memory_or_on(device_of(model), check)


def compare_rows_apart(
    make_model: Callable[[], nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    blocks: list[LayerBlock],
    record: TraceRecord,
    sizes: list[int],
    num_edges: list[int],
    *,
    warns: bool = True,
) -> list[tuple[Tensor, Tensor]]:
    """Changes rows that no other row reads (`rows_alone`), and looks whether any other row of the output changes.

    Those rows of what the model is given, of the fields it finds in the blocks, of the ids of vertices there, by which
    it may read a table of its own, and of what it exchanges; of rows of edges that of row 0, its only one. Once so that
    they have the least numbers of all rows in every column there, and once the greatest: a model that mixes rows by one
    of both does not see the other. What the model keeps in its buffers is compared, too, but for those of batch norm.
    What is made of degrees of all vertices is warned of.

    A model may draw numbers (which layer to skip) and change its own state in every forward (`spectral_norm`): each run
    has a copy and generators in the same state.

    Args:
        make_model: Makes a copy.
        warns: Of what may be right.

    Returns:
        The tensors of the output without a change and with one by which they differ, if there is one; none, where that
        cannot be compared.
    """

    def copied(value: Any) -> Any:
        # Disturbed rows are no static tensor, and layers sum in another order then: so must the plain ones be.
        return value.detach().clone() if isinstance(value, Tensor) else value

    def disturb(sign: float, value: Any) -> Any:
        changed = copied(value)
        if isinstance(value, Tensor) and value.dim() and len(value) in num_edges and value.is_floating_point():
            changed[0] = _extreme_edge(value, sign)
        elif isinstance(value, Tensor) and value.dim() and len(value) in sizes:
            rows = [row for row in alone if row < len(value)]
            if value.is_floating_point():
                changed = _with_extreme_rows(value, rows, sign)
            elif value.dtype == torch.bool:
                changed[rows] = ~value[rows]
            elif value.dtype in (torch.int32, torch.int64):  # ids, of which made-up ones may all be 0
                changed[rows] = torch.where(value[rows] < value.amax(), value[rows] + 1, 0)
                changed[0] = value[0] + 1
        return changed

    alone = rows_alone(sizes)

    def differ_elsewhere(before: Tensor, after: Tensor) -> bool:
        """Whether any other rows than those do, where the tensors have a row for each vertex of a level."""
        if not before.dim() or len(before) not in sizes:
            return False
        if before.shape != after.shape:
            return True
        is_other = torch.ones(len(before), dtype=torch.bool, device=before.device)
        is_other[[row for row in alone if row < len(before)]] = False
        return not _are_close(before[is_other], after[is_other])

    frames = [blocks[0].srcdata, blocks[-1].dstdata, *(block.edata for block in blocks)]
    given = [{name: rows for name, rows in frame.items() if name not in (dgl.NID, dgl.EID)} for frame in frames]

    where = blocks[0].device
    ids = blocks[0].srcdata[dgl.NID]

    def run(
        change: Callable[[Any], Any],
        observer: BlockObserver | None,
        *,
        changes_ids: bool = False,
        changes_degrees: bool = False,
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        for frame, fields in zip(frames, given, strict=True):
            for name, rows in fields.items():
                frame[name] = change(rows)
        blocks[0].rename_sources(change(ids) if changes_ids else ids)
        blocks[0].observer = observer
        model = make_model()
        try:
            with with_own_randomness(where), outside_state_kept(model), contextlib.ExitStack() as degrees:
                for block in blocks if changes_degrees else ():
                    degrees.enter_context(block.raised_degrees_of_first())
                seed_generators(0)
                outputs = float_tensors_in(model(*map_leaves(args, change), **map_leaves(kwargs, change)))
                return outputs, _state_of(model)
        finally:
            blocks[0].observer = None
            blocks[0].rename_sources(ids)

    with torch.no_grad(), QuietMode(record, sizes):
        (plain, state), (again, state_again) = run(copied, None), run(copied, None)
        if not all(map(_are_close, plain, again)):
            if warns:
                _logger.warning(
                    "two forwards of the model from the same state differ, so it was not checked that rows of "
                    "different vertices are only mixed by message passing and batch norm; anything else would not be "
                    "exact. If it keeps state outside of itself, that may be another one on each rank now: keep it in "
                    "its modules"
                )
            return []
        # What differs by itself (a time of day) says nothing of rows.
        state = {
            name: x for name, x in state.items() if name in state_again and _num_changed(x, state_again[name]) == 0
        }
        pairs = list(zip(plain, plain, strict=True))
        for sign in (-1.0, 1.0):
            change = functools.partial(disturb, sign)
            disturbed = None
            with contextlib.suppress(Exception):  # of a table with one row, or ids that are known by identity
                disturbed = run(change, _Disturber(alone, sign), changes_ids=True)
            if disturbed is None:
                with contextlib.suppress(IndexError, RuntimeError):
                    disturbed = run(change, _Disturber(alone, sign))
            if disturbed is None:
                disturbed = run(lambda x: copied(x) if _is_integer(x) else change(x), _Disturber(alone, sign))  # noqa: B023
            outputs, changed_state = disturbed
            _check_state(state, changed_state, len(alone))
            for at, (before, after) in enumerate(zip(plain, outputs, strict=True)):
                if differ_elsewhere(before, after):
                    raise BlockError(
                        "the model mixes rows of different vertices outside message passing (a norm, a mean or a "
                        "maximum over nodes), which cannot be exact on a partition. Use BatchNorm1d, which is "
                        "supported, or a norm over features such as LayerNorm."
                    )
                if _are_close(*pairs[at]):
                    pairs[at] = before, after
        by_degrees = plain
        with contextlib.suppress(Exception):  # of a table of degrees, or of lengths that are no longer those of edges
            by_degrees, _ = run(copied, None, changes_degrees=True)
        if warns and any(map(differ_elsewhere, plain, by_degrees)):
            # No error: who takes degrees for lengths of segments does nothing wrong.
            _logger.warning(
                "what the model makes of vertices depends on how many edges another one has: of degrees of all "
                "vertices (d / d.max(), say) each rank has its own. Scale by numbers of the whole graph instead"
            )
    return pairs


def _state_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns what a model keeps, by name: its buffers, but for those of batch norm, whose statistics are summed."""
    norms = {name for name, module in model.named_modules() if isinstance(module, _NormBase)}
    return {
        name: x.detach()
        for name, x in model.named_buffers()
        if name.rpartition(".")[0] not in norms and not is_lazy(x) and x.layout == torch.strided
    }


def _check_state(before: dict[str, Tensor], after: dict[str, Tensor], num_alone: int) -> None:
    """Checks that a forward keeps nothing that is made of several rows, which each rank would have of its own rows.

    Tables of which each row is one vertex's (the last embedding of each, say) have changed in few rows.

    Raises:
        BlockError: It does.
    """
    for name, one in before.items():
        num_changed = _num_changed(one, after[name]) if name in after else 0
        # Ids of those rows change, too: what was kept of one vertex may be that of another.
        is_table = one.dim() > 0 and len(one) > 4 * num_alone and num_changed <= 2 * num_alone
        if num_changed and not is_table:
            raise BlockError(
                f"the model keeps in its buffer {name!r} what a forward makes of rows of different vertices (a running "
                f"mean, centres of clusters, a count): each rank would have that of its own rows, and training, or an "
                f"evaluation that reads it, would not be exact. Use BatchNorm1d, which is supported, or keep it "
                f"outside of the model and make it the same on all ranks."
            )


def _num_changed(one: Tensor, other: Tensor) -> int:
    """Returns how many rows of a buffer differ; of one that has another shape or dtype now, none can be compared."""
    if one.shape != other.shape or one.dtype != other.dtype or not one.numel():
        return 0
    if one.is_floating_point():
        one, other = (x.float() if x.element_size() < 4 else x for x in (one, other))
        differs = ~torch.isclose(one, other, 1e-5, 1e-7, equal_nan=True)
    else:
        differs = one != other
    return int(differs.reshape(len(one) if one.dim() else 1, -1).any(1).sum())


def notes_on(
    outputs: list[tuple[Tensor, Tensor]], differentiable: set[int], sizes: list[int], num_edges: list[int]
) -> Iterator[tuple[str, str]]:
    """Yields what is to be said of outputs over which a loss may not be exact, each with a name of its kind.

    Args:
        outputs: From `compare_rows_apart`.
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
        is_other = before.shape != after.shape or not torch.allclose(before, after, equal_nan=True)
        if not is_of_rows and is_other:
            yield (
                "scalar",
                f"the model returns a tensor of shape {tuple(before.shape)} that is made of rows. On each rank it is "
                f"made of the rows held there: right for a mean over the seeds (a loss), wrong for one over the rows "
                f"of a lower level, also where those are returned and reduced outside. {advice}",
            )


def _with_extreme_rows(rows: Tensor, alone: list[int], sign: float) -> Tensor:
    """Returns a copy whose rows `alone` are beyond all others in every column, on the side of the sign: the first by
    little, the others by so much that means over rows have that sign, too.
    """
    first, *others = alone
    changed = rows.detach().clone()
    changed[first] = _extreme_row(rows, sign)
    for turn, row in enumerate(others, 1):
        changed[row] = sign * turn * (1.0 + 2.0 * rows.abs().sum(0))
    return changed


def _extreme_row(rows: Tensor, sign: float) -> Tensor:
    """Returns a row that is beyond all of these in every column, on the side of the sign, and other than row 0."""
    return sign * (1.0 + 2.0 * rows.abs().amax(0) + rows[0].abs())


def _extreme_edge(rows: Tensor, sign: float) -> Tensor:
    """As `_extreme_row`, but positive among positive ones: weights of edges may have to be."""
    if sign < 0 and len(rows) and bool((rows > 0).all()):
        return 0.5 * rows.amin(0)
    return _extreme_row(rows, sign)


def _are_close(before: Tensor, after: Tensor) -> bool:
    """Whether they differ by rounding at most: of rows from which one and the same number was subtracted, say."""
    if before.shape != after.shape:
        return False
    atol, eps = 1e-7, torch.finfo(before.dtype).eps
    if eps < _ROUGH and before.numel():
        atol = max(atol, 32.0 * eps * float(before.detach().nan_to_num(0.0, 0.0, 0.0).abs().amax()))
    return torch.allclose(before, after, rtol=1e-5, atol=atol, equal_nan=True)


def _is_integer(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point()


class _Disturber:
    """Changes rows of whatever a block exchanges, in copies: rows may be one row repeated, or a parameter's."""

    def __init__(self, alone: list[int], sign: float) -> None:
        self._alone, self._sign = alone, sign

    def on_exchange(self, layer: int, fields: list[Tensor]) -> None:
        for position, rows in enumerate(fields):
            if rows.is_floating_point() and len(rows):
                alone = [row for row in self._alone if row < len(rows)]
                fields[position] = _with_extreme_rows(rows, alone, self._sign)

    def on_message_passing(self, layer: int, fields: list[Tensor], *, is_weighted: bool) -> None: ...

    def on_attention(self, layer: int, op: FusedOp, x: Tensor, *, has_dropout: bool) -> None: ...

    def on_kept_result(self, layer: int, operands: tuple[Tensor, ...]) -> None: ...

    def on_choice_of_order(self, layer: int) -> None: ...

    def on_work_beside(self, layer: int, flops: float) -> None: ...
