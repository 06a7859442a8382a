# SPDX-License-Identifier: Apache-2.0
"""Runs a layer that is split by source: what is held is worked on while messages are in flight.

Forward, the rows of the first message leave, edges from held rows are worked on, and each message's rows are used as
they arrive while the next ones travel. Backward is its mirror: gradients of received rows are made first and go home
while the rest is done.

    forward    pack ─▶ start 1 │ held │ wait 1 ─▶ start 2 │ use 1 │ wait 2 │ use 2
    backward   make 1 ─▶ start 1 │ held │ make 2 │ wait 1 ─▶ start 2 │ add 1 │ wait 2 │ add 2
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from dgl_hybrid.errors import ExchangeError
from dgl_hybrid.exchange.communicator import Communicator, PendingRows
from dgl_hybrid.exchange.parts import RowsPart, SplitLayer
from dgl_hybrid.exchange.row_codecs import RowCodec
from dgl_hybrid.ops.backend import choose_backend
from dgl_hybrid.ops.sparse_graph import Adjacency


@dataclass(frozen=True, slots=True)
class Scale:
    """What rows are multiplied by, without gradients."""

    factors: Tensor
    """(C,) of sources held here, or (N,) of sums; of the rows' dtype."""
    of_sources: bool

    @property
    def source_factors(self) -> Tensor | None:
        return self.factors if self.of_sources else None

    @property
    def row_factors(self) -> Tensor | None:
        return None if self.of_sources else self.factors


class SplitExchange:
    """The messages of one layer in both directions.

    What is sent together is given as fields, (C, F_k) each with the same rows: a row travels as one, (F,) with all the
    columns side by side, and only rows that travel are ever put together.

    Attributes:
        layer: Structure, on the device of the rows.
        number: Of the layer, from 1.
    """

    def __init__(self, layer: SplitLayer, communicator: Communicator, *, number: int, seed: int = 0) -> None:
        self.layer, self.number = layer, number
        self._communicator, self._seed = communicator, seed
        self._sums_of_sources: dict[int, tuple[Tensor, Adjacency]] = {}
        """By part."""
        counts = [sum(counts) for part in layer.parts for counts in (part.send_counts, part.recv_counts)]
        self._most_rows = max(counts) if len(layer.parts) > 1 else None
        """Of one of several messages, in either direction; None if there is one."""

    def forward(
        self,
        fields: Sequence[Tensor],
        held: Callable[[], None],
        use: Callable[[int, Tensor], None],
        codec: RowCodec | None = None,
        source_factors: Tensor | None = None,
    ) -> None:
        """Sends rows of the fields, and hands over what arrives. Collective.

        Args:
            fields: (C, F_k) contiguous, of one dtype; one only where sums travel or a codec is given.
            held: Called while the first message is in flight.
            use: Called with a part's position and its (rows received, F) rows, which it may only read, and only until
                it returns.
            codec: What rows travel as, approximately; None: as they are.
            source_factors: (C,): what the rows of a single field are multiplied by before they leave.
        """
        parts = self.layer.parts
        pending = self._send_rows(parts[0], fields, codec, source_factors) if parts else None
        with _ended_in_any_case(pending):
            held()
        for position, part in enumerate(parts):
            assert pending is not None
            rows = pending.wait(part.recv_counts)
            following = parts[position + 1] if position + 1 < len(parts) else None
            pending = None if following is None else self._send_rows(following, fields, codec, source_factors)
            with _ended_in_any_case(pending), record_function("dgl_hybrid::use_received"):
                use(position, rows)

    def backward(
        self,
        make: Callable[[int], Sequence[Tensor]],
        held: Callable[[], Sequence[Tensor]],
        codec: RowCodec | None = None,
        source_factors: Tensor | None = None,
    ) -> Sequence[Tensor]:
        """Sends gradients of received rows home and adds up what comes home. Collective.

        Args:
            make: Returns the (rows received, F_k) gradients of a part's rows.
            held: Returns the (C, F_k) gradients of held rows as far as they come from here; changed in place. Called
                while the first message is in flight.
            codec: What gradients travel as, approximately; None: as they are.
            source_factors: (C,): what rows were multiplied by before they left, and their gradients are at home.

        Returns:
            What `held` returned: by now, gradients of held rows.
        """
        parts = self.layer.parts
        pending = self._send_gradients(parts[0], make(0), codec) if parts else None
        with _ended_in_any_case(pending):
            totals = held()
        for position, part in enumerate(parts):
            assert pending is not None
            with _ended_in_any_case(pending):
                following = make(position + 1) if position + 1 < len(parts) else None
            returned = _returned(pending, part)
            sent = None if following is None else self._send_gradients(parts[position + 1], following, codec)
            with _ended_in_any_case(sent):
                self._add_returned(position, returned, totals, source_factors)
            pending = sent
        return totals

    def fetch(self, position: int, fields: Sequence[Tensor], meanwhile: Callable[[], None]) -> Tensor:
        """Exchanges one part alone, for a backward that needs its rows again. Collective.

        Args:
            meanwhile: Called while the message is in flight.

        Returns:
            (rows received, F), to be read before the next exchange begins.
        """
        part = self.layer.parts[position]
        pending = self._send_rows(part, fields)
        with _ended_in_any_case(pending):
            meanwhile()
        return pending.wait(part.recv_counts)

    def return_gradients(self, position: int, grads: Sequence[Tensor], totals: Sequence[Tensor]) -> None:
        """Sends the gradients of one part's rows home and adds what comes home to `totals`. Collective."""
        part = self.layer.parts[position]
        self._add_returned(position, _returned(self._send_gradients(part, grads), part), totals)

    # ---------------------------------------------------------------- messages

    def _send_rows(
        self,
        part: RowsPart,
        fields: Sequence[Tensor],
        codec: RowCodec | None = None,
        source_factors: Tensor | None = None,
    ) -> _Pending:
        with record_function("dgl_hybrid::pack"):
            send = self._take_rows(sum(part.send_counts), fields, codec)
            for x_CF, columns in zip(fields, _columns_of(send, fields), strict=True):
                if part.send_index is None:
                    scale = None if source_factors is None else Scale(source_factors, of_sources=True)
                    columns.copy_(sum_rows(part.pack.in_edges, x_CF, scale=scale))
                    continue
                torch.index_select(x_CF, 0, part.send_index, out=columns)
                if source_factors is not None:
                    columns.mul_(source_factors.index_select(0, part.send_index).unsqueeze(-1))
        return self._start(part.send_counts, part.recv_counts, send, codec, backward=False)

    def _send_gradients(self, part: RowsPart, grads: Sequence[Tensor], codec: RowCodec | None = None) -> _Pending:
        if codec is not None:
            (send,) = grads
        else:
            send = self._take_rows(len(grads[0]), grads, None)
            for grads_RF, columns in zip(grads, _columns_of(send, grads), strict=True):
                columns.copy_(grads_RF)
        return self._start(
            part.recv_counts,
            part.send_counts,
            send,
            codec,
            backward=True,
            is_added_by_rank=part.send_index is not None,
        )

    def _take_rows(self, count: int, fields: Sequence[Tensor], codec: RowCodec | None) -> Tensor:
        """Memory for rows that are sent as they are, or encoded first."""
        take = self._communicator.send_buffer if codec is None else self._communicator.buffers.take
        width, dtype = sum(field.shape[1] for field in fields), fields[0].dtype
        return take((count, width), dtype, fields[0].device, passes_through=self._most_bytes(width * dtype.itemsize))

    def _most_bytes(self, row_bytes: int) -> int | None:
        return None if self._most_rows is None else self._most_rows * row_bytes

    def _start(
        self,
        send_counts: tuple[int, ...],
        recv_counts: tuple[int, ...],
        rows: Tensor,
        codec: RowCodec | None,
        *,
        backward: bool,
        is_added_by_rank: bool = False,
    ) -> _Pending:
        communicator, send, out = self._communicator, rows, None
        if codec is not None:
            shape = (len(rows), codec.row_bytes(rows.shape[1]))
            most_bytes = self._most_bytes(shape[1])
            send = communicator.send_buffer(shape, torch.uint8, rows.device, passes_through=most_bytes)
            key = (self._seed, communicator.num_calls, communicator.rank, int(backward))
            with record_function("dgl_hybrid::encode"):
                codec.encode(rows, key=key, out=send)
        # Rows can be read where they lie, if no message follows while they are: those of one other rank, and gradients
        # that are added rank by rank.
        is_read_by_rank = communicator.world_size == 2 or (backward and is_added_by_rank and codec is None)
        if not is_read_by_rank or len(self.layer.parts) > 1:
            most_bytes = self._most_bytes(send.shape[1] * send.dtype.itemsize)
            shape = (sum(recv_counts), send.shape[1])
            out = communicator.buffers.take(shape, send.dtype, send.device, passes_through=most_bytes)
        pending = communicator.start_exchange(
            send, send_counts, recv_counts, layer=self.number, backward=backward, out=out
        )
        decode = None if codec is None else partial(self._decode, codec, width=rows.shape[1], dtype=rows.dtype)
        return _Pending(pending, out, decode)

    def _decode(self, codec: RowCodec, wire: Tensor, *, width: int, dtype: torch.dtype) -> Tensor:
        most_bytes = self._most_bytes(width * dtype.itemsize)
        rows = self._communicator.buffers.take((len(wire), width), dtype, wire.device, passes_through=most_bytes)
        with record_function("dgl_hybrid::decode"):
            return codec.decode(wire, width, dtype, out=rows)

    def _add_returned(
        self,
        position: int,
        returned: Sequence[Tensor],
        totals: Sequence[Tensor],
        source_factors: Tensor | None = None,
    ) -> None:
        part = self.layer.parts[position]
        with record_function("dgl_hybrid::unpack"):
            if part.send_index is None:
                (rows,) = returned
                # Where they belong: sums of their own would be as many rows as are held here.
                sources, sums = self._sums_by_source(position)
                factors = None if source_factors is None else source_factors.index_select(0, sources)
                for grads_SF, total_CF in zip(_columns_of(rows, totals), totals, strict=True):
                    backend = choose_backend(total_CF)
                    backend.add_sums(total_CF.unsqueeze(1), sources, sums, grads_SF.unsqueeze(1), None, factors)
                return
            # Added, not written: a row sent to several peers gets a gradient from each of them. Peer by peer, as a GPU
            # adds several to one row in no fixed order.
            for targets, rows in zip(part.send_index.split(part.send_counts), returned, strict=True):
                if len(targets) > 0:
                    for grads, total_CF in zip(_columns_of(rows, totals), totals, strict=True):
                        choose_backend(total_CF).add_rows(total_CF, targets, grads, source_factors)

    def _sums_by_source(self, position: int) -> tuple[Tensor, Adjacency]:
        """Returns the held rows that are in any sum which a part sends, ascending, and which sums each is in."""
        if position not in self._sums_of_sources:
            out = self.layer.parts[position].pack.out_neighbours
            counts = out.indptr.diff()
            sources = counts.nonzero().squeeze(1)
            indptr = torch.cat([counts.new_zeros(1), counts[sources].cumsum(0)]).to(out.indptr.dtype)
            self._sums_of_sources[position] = sources, Adjacency(indptr, out.indices, None)
        return self._sums_of_sources[position]


class _Pending:
    """A message under way, where its rows are to lie if not where they arrive, and what they are made of it."""

    def __init__(self, rows: PendingRows, out: Tensor | None, decode: Callable[[Tensor], Tensor] | None) -> None:
        self._rows, self._out, self._decode = rows, out, decode

    def end(self) -> None:
        """Waits for the rows and drops them."""
        self._rows.wait()

    def wait(self, counts: tuple[int, ...]) -> Tensor:
        """Returns the rows of all ranks; `counts` says how many came from each."""
        by_rank, out = self._rows.wait(), self._out
        self._out = None  # whoever waited holds the rows for as long as they are wanted
        rows = by_rank[max(range(len(counts)), key=counts.__getitem__)] if out is None else out
        return rows if self._decode is None else self._decode(rows)

    def wait_by_rank(self, counts: tuple[int, ...]) -> Sequence[Tensor]:
        """Returns the rows of each rank; `counts` says how many came from each."""
        if self._out is None and self._decode is None:
            return self._rows.wait()
        rows: tuple[Tensor, ...] = self.wait(counts).split(counts)
        return rows


def _returned(pending: _Pending, part: RowsPart) -> Sequence[Tensor]:
    """Waits for gradients that come home: of sums all in one, of rows by rank."""
    if part.send_index is None:
        return [pending.wait(part.send_counts)]
    return pending.wait_by_rank(part.send_counts)


@contextlib.contextmanager
def _ended_in_any_case(pending: _Pending | None) -> Iterator[None]:
    """Ends a message if the work beside it fails, so that who survives the failure can exchange again."""
    try:
        yield
    except Exception:
        if pending is not None:
            with contextlib.suppress(ExchangeError):
                pending.end()
        raise


def _columns_of(rows: Tensor, fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Each field's columns of rows that travel."""
    columns: tuple[Tensor, ...] = rows.split([field.shape[1] for field in fields], dim=1)
    return columns


def sum_rows(rows: Adjacency, x_F: Tensor, weights: Tensor | None = None, scale: Scale | None = None) -> Tensor:
    """(S, F) to (N, F) sums over the entries of each row; (S, H, D) likewise, with (E, H) weights or with factors."""
    x = x_F if x_F.dim() == 3 else x_F.unsqueeze(1)
    summed: Tensor
    if scale is not None:
        summed = torch.ops.dgl_hybrid.scaled_sum(rows.tensors(), [], x, scale.factors, scale.of_sources)
    else:
        summed = torch.ops.dgl_hybrid.spmm_sum(rows.tensors(), [], x, weights)
    return summed if x_F.dim() == 3 else summed.squeeze(1)
