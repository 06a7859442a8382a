# SPDX-License-Identifier: Apache-2.0
"""Approximate exchanges of rows, for those who ask for them: narrower rows, or rows that are one epoch old.

Only what a training step exchanges is approximated: rows that are read while gradients are recorded, and gradients on
their way home. Under `torch.no_grad` (evaluation, inference, results that are made once and kept), and for ids and
other integers, the exchange is exact whatever is asked for here, and what is kept for the next epoch is not touched.

[Note: stale rows]
With "stale" an epoch computes with the rows that were sent in the epoch before: activations forward, gradients
backward. The first epoch is exact. So nobody waits for rows of this epoch: they travel while the layer is computed,
until the next exchange begins (PipeGCN, Wan et al., ICLR 2022, shows that such training converges, and measures it).

    epoch          1      2      3
    sent           x₁     x₂     x₃        each after its epoch's last optimizer step
    used           x₁     x₁     x₂

What was received is kept by its place in the program, the n-th exchange of a layer in an epoch, gradients by the n-th
backward of that, so that every rank keeps the same. Blocks that are built anew (another plan) or rows of another shape
begin with an exact epoch again. A layer keeps `MAX_KEPT` of them: whoever takes a batch and trains on it for ever stays
in one epoch, in which each exchange is at another place, so that nothing would be read again.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.profiler import record_function

from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.plan import ExchangePlan
from dgl_hybrid.exchange.row_codecs import RowCodec, is_encoded, make_codec

STALE = "stale"
APPROXIMATIONS = ("bf16", "int8", STALE, f"{STALE}+bf16", f"{STALE}+int8")

MAX_KEPT = 64
"""Exchanges of a layer in an epoch whose rows are kept, backward ones among them; further ones wait for their rows."""

_logger = logging.getLogger(__name__)
_told: weakref.WeakSet[Communicator] = weakref.WeakSet()
"""Whose rank 0 was told that an epoch has more exchanges."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Approximation:
    """What is approximated; the same on every rank."""

    name: str
    codec: RowCodec | None
    """What rows and gradients travel as; None: as they are."""
    is_stale: bool
    """Whether those of the epoch before are used."""

    @classmethod
    def of(cls, name: str) -> Approximation:
        """Returns the approximation of that name.

        Raises:
            ValueError: If there is none.
        """
        if name not in APPROXIMATIONS:
            raise ValueError(
                f"unknown approximation (got {name!r}); choose one of {', '.join(APPROXIMATIONS)}, or None"
            )
        parts = name.split("+")
        codec = next((part for part in parts if part != STALE), None)
        return cls(name=name, codec=make_codec(codec), is_stale=STALE in parts)

    def __str__(self) -> str:
        return describe_approximation(self.name)


def join_approximations(*names: str | None) -> str | None:
    """Returns what a run is called that was trained by one after the other, "bf16+int8" for example; None: exactly."""
    parts = {part for name in names if name is not None for part in name.split("+")}
    return "+".join(sorted(parts, key=lambda part: (part != STALE, part))) or None


def describe_approximation(name: str | None) -> str:
    """Returns what results are called: "exact", "approximate (int8 rows)", …; `name` may be joined of several."""
    if name is None:
        return "exact"
    parts = name.split("+")
    words = [f"{part} rows" for part in parts if part != STALE] + ["rows one epoch old"] * (STALE in parts)
    return f"approximate ({', '.join(words)})"


def agree_on_approximation(name: object, communicator: Communicator) -> Approximation | None:
    """Returns the approximation that every rank asks for, None where none does. Collective.

    Raises:
        ValueError: On every rank, if there is no such approximation, or ranks ask for different ones.
    """
    names = communicator.gather_json(name if name is None or isinstance(name, str) else repr(name))
    for rank, other in enumerate(names):
        if other != names[0]:
            raise ValueError(
                f"approximate must be the same on every rank (got {names[0]!r} on rank 0 and {other!r} on rank {rank})"
            )
    return None if names[0] is None else Approximation.of(names[0])


class ApproximateRows:
    """How one layer's rows are approximated, and those it received in the epoch before.

    Args:
        approximation: What is asked for.
        seed: Of random rounding; equal on all ranks.
    """

    def __init__(self, approximation: Approximation, *, seed: int = 0) -> None:
        self.approximation, self.seed = approximation, seed
        self._num_uses = 0
        self._num_backwards: dict[int, int] = {}
        self._received: dict[tuple[int, int], Tensor] = {}
        """Of the epoch before, by use and by which backward of it; 0: forward."""

    def begin_epoch(self) -> None:
        """Counts the exchanges of this layer from the beginning; drops what more losses have left than there were."""
        self._num_uses = 0
        for use, nth in list(self._received):
            if 0 < self._num_backwards.get(use, 0) < nth:
                del self._received[use, nth]
        self._num_backwards.clear()

    def applies_to(self, fields: list[Tensor]) -> bool:
        """Whether fields of one dtype that travel together are approximated. Alike on all ranks."""
        if not (torch.is_grad_enabled() and fields[0].dtype.is_floating_point):
            return False
        codec = self.approximation.codec
        return self.approximation.is_stale or any(is_encoded(codec, field.shape[1], field.dtype) for field in fields)

    def extend(self, fields: list[Tensor], plan: ExchangePlan, communicator: Communicator) -> tuple[Tensor, ...]:
        """Appends the received rows to fields for which `applies_to` holds, (C, F) each. Collective; differentiable.

        Derivatives are approximated too and cannot be differentiated again.
        """
        use, self._num_uses = self._num_uses, self._num_uses + 1
        extended: tuple[Tensor, ...] = _ExtendApproximately.apply(self, use, plan, communicator, *fields)
        return extended

    def exchange(
        self,
        send: Tensor,
        plan: ExchangePlan,
        communicator: Communicator,
        *,
        use: int,
        backward: bool,
    ) -> list[Tensor]:
        """Sends the wire rows of this epoch; returns those of each rank to work with, to be read only. Collective."""
        send_counts, recv_counts = plan.send_counts, plan.recv_counts
        if backward:
            send_counts, recv_counts = recv_counts, send_counts
        if not self.approximation.is_stale:
            return communicator.borrow(send, send_counts, recv_counts, layer=plan.layer, backward=backward)
        fresh = communicator.buffers.take((sum(recv_counts), send.shape[1]), send.dtype, send.device)
        pending = communicator.start_exchange(
            send, send_counts, recv_counts, layer=plan.layer, backward=backward, out=fresh
        )
        # Several losses may go back through one forward, each as it did in the epoch before.
        nth = self._num_backwards.get(use, 0) + 1 if backward else 0
        older = self._received.get((use, nth))
        if older is None and len(self._received) >= MAX_KEPT:  # alike on all ranks: they keep the same
            _say_that_epoch_is_long(communicator)
            pending.wait()
            return list(fresh.split(list(recv_counts)))
        if backward:
            self._num_backwards[use] = nth
        self._received[use, nth] = fresh
        if older is None or older.shape != fresh.shape or older.dtype != fresh.dtype:
            pending.wait()
            return list(fresh.split(list(recv_counts)))
        pending.leave()
        return list(older.split(list(recv_counts)))


def _say_that_epoch_is_long(communicator: Communicator) -> None:
    if communicator.rank > 0 or communicator in _told:
        return
    _told.add(communicator)
    _logger.warning(
        "approximate='stale' keeps %d exchanges of an epoch for each layer, and this epoch has more: further ones wait "
        "for rows of this epoch. A batch that is used for ever is one epoch: iterate the loader in every epoch",
        MAX_KEPT,
    )


class _Wire:
    """How the fields of one message lie side by side in its rows."""

    def __init__(self, widths: list[int], dtype: torch.dtype, codec: RowCodec | None) -> None:
        self.widths, self.dtype, self.codec = widths, dtype, codec
        self.wire_dtype = dtype if codec is None else torch.uint8
        self.columns = [self._columns_of(width) for width in widths]

    def _columns_of(self, width: int) -> int:
        if self.codec is None:
            return width
        return self.codec.row_bytes(width) if is_encoded(self.codec, width, self.dtype) else width * self.dtype.itemsize

    def shape(self, num_rows: int) -> tuple[int, int]:
        return num_rows, sum(self.columns)

    def write(self, position: int, rows: Tensor, wire: Tensor, key: tuple[int, ...]) -> None:
        """Writes the (W, F) rows of a field into its columns of the (W, B) wire rows."""
        columns = wire.split(self.columns, dim=1)[position]
        if self.codec is not None and is_encoded(self.codec, self.widths[position], self.dtype):
            self.codec.encode(rows, key=(*key, position), out=columns)
        else:
            columns.copy_(rows.contiguous().view(self.wire_dtype))

    def read(self, position: int, wire: Tensor, out: Tensor) -> Tensor:
        """Reads a field's columns into (R, F) contiguous rows."""
        columns, width = wire.split(self.columns, dim=1)[position], self.widths[position]
        if self.codec is not None and is_encoded(self.codec, width, self.dtype):
            return self.codec.decode(columns, width, self.dtype, out=out)
        out.view(self.wire_dtype).copy_(columns)
        return out


class _ExtendApproximately(torch.autograd.Function):
    """(C, F) -> (C + R, F), for each field: as `rows._ExtendRows`, but for what `ApproximateRows` does to them."""

    @staticmethod
    def forward(
        ctx: Any, rows: ApproximateRows, use: int, plan: ExchangePlan, communicator: Communicator, *fields_CF: Tensor
    ) -> tuple[Tensor, ...]:
        dtype, device = fields_CF[0].dtype, fields_CF[0].device
        wire = _Wire([field.shape[1] for field in fields_CF], dtype, rows.approximation.codec)
        ctx.rows, ctx.use, ctx.plan, ctx.communicator, ctx.wire = rows, use, plan, communicator, wire
        with record_function("dgl_hybrid::pack"):
            send = communicator.send_buffer(wire.shape(plan.num_sent), wire.wire_dtype, device)
            key = (rows.seed, communicator.num_calls, communicator.rank, 0)
            for position, field in enumerate(fields_CF):
                gathered = communicator.buffers.take((plan.num_sent, field.shape[1]), dtype, device)
                wire.write(position, torch.index_select(field, 0, plan.send_index, out=gathered), send, key)
        parts = rows.exchange(send, plan, communicator, use=use, backward=False)
        with record_function("dgl_hybrid::unpack"):
            extended = []
            for position, field in enumerate(fields_CF):
                shape = (plan.num_rows + plan.num_received, field.shape[1])
                whole = communicator.buffers.take(shape, dtype, device)
                whole[: plan.num_rows].copy_(field)
                tail = whole[plan.num_rows :]
                for begin, part in zip(plan.recv_offsets, parts, strict=False):
                    wire.read(position, part, tail[begin : begin + len(part)])
                extended.append(whole)
        return tuple(extended)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_XF: Tensor) -> tuple[Tensor | None, ...]:
        rows, plan, communicator, wire = ctx.rows, ctx.plan, ctx.communicator, ctx.wire
        dtype, device = grads_XF[0].dtype, grads_XF[0].device
        with record_function("dgl_hybrid::pack"):
            send = communicator.send_buffer(wire.shape(plan.num_received), wire.wire_dtype, device)
            key = (rows.seed, communicator.num_calls, communicator.rank, 1)
            for position, grad in enumerate(grads_XF):
                wire.write(position, grad[plan.num_rows :], send, key)
        parts = rows.exchange(send, plan, communicator, use=ctx.use, backward=True)
        with record_function("dgl_hybrid::unpack"):
            totals = []
            for position, grad in enumerate(grads_XF):
                total = communicator.buffers.take((plan.num_rows, grad.shape[1]), dtype, device)
                total.copy_(grad[: plan.num_rows])
                for index, part in zip(plan.send_index.split(plan.send_counts), parts, strict=True):
                    come_home = communicator.buffers.take((len(part), grad.shape[1]), dtype, device)
                    # Added, not written: a row sent to several peers gets a gradient from each of them.
                    total.index_add_(0, index, wire.read(position, part, come_home))
                totals.append(total)
        return None, None, None, None, *totals
