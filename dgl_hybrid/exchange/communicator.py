# SPDX-License-Identifier: Apache-2.0
"""The one door through which ranks talk to each other: rows, ids, sums and agreement over a transport of our own.

Everything here is collective over the communicator's ranks and runs in program order. A world of one rank needs no
transport at all.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from dgl_hybrid.errors import ExchangeError, HybridError
from dgl_hybrid.exchange.buffers import BufferPool
from dgl_hybrid.exchange.clock import ExchangeClock, ExchangeEvent
from dgl_hybrid.exchange.small_messages import MOST_BYTES, Kind, Words, data_of, find_difference, pack, sizes_of
from dgl_hybrid.exchange.transport import SAME_CALLS, ExchangeTag, PeerLeftError, Transport, as_stored

_MOVED_AS_BYTES = frozenset(
    {torch.bool, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2}
)
"""What gloo or NCCL does not send as it is."""

_ON_ALL_RANKS = "_dgl_hybrid_is_on_all_ranks"
_OR_IS_GONE = "Of several hosts one, or the network between them, may be gone."


def is_on_all_ranks(error: Exception) -> bool:
    """Tells whether all ranks have raised this error, or its words, at the same place: see `Communicator.agreed`."""
    return getattr(error, _ON_ALL_RANKS, False)


class Communicator:
    """Rank `rank` of `world_size`, with a transport that only exchanges use.

    Args:
        transport: What carries tensors between the ranks, or None for a world of one rank.
        name: Names the ranks' group where peers that did not take part are looked for.
        timeout_s: For how long the transport waits for a peer.

    Attributes:
        rank, world_size: This process and their number.
        clock: Every exchange of rows, for the time split and the bytes sent.
        buffers: Memory for the rows of layers, used again from epoch to epoch.
    """

    def __init__(self, transport: Transport | None, *, name: str = "exchange", timeout_s: float = float("inf")) -> None:
        self.transport = transport
        self.name, self.timeout_s = name, timeout_s
        self.rank = 0 if transport is None else transport.rank
        self.world_size = 1 if transport is None else transport.world_size
        self.backend = "none" if transport is None else transport.backend
        self.clock = ExchangeClock()
        self.buffers = BufferPool()
        self.num_calls = 0
        self._pending: PendingRows | None = None
        self._left: PendingRows | None = None
        self._interrupted: str | None = None
        """The operation that Ctrl-C, or what else is no `Exception`, has broken off: peers may have done it, or not."""
        self.cross_check = False
        """Compare what every rank is about to exchange, before each exchange. Costs one small gather each; loaders turn
        it on for their first step."""
        self.always_cross_check = False
        """Leave it on: for finding out where ranks part ways."""
        self._clock_offset_s: float | None = None

    @property
    def moves_in_background(self) -> bool:
        """Whether transfers cost the computing thread next to nothing; else it copies or asks for the rows itself."""
        return self.backend in ("gloo", "nccl", "mixed")

    # ---------------------------------------------------------------- rows

    def exchange(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        layer: int = 0,
        backward: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Sends `send_counts[q]` consecutive rows to every peer q and receives `recv_counts[q]` from it. Collective.

        Args:
            send: (sum(send_counts), ...) any dtype, on CPU or CUDA, ordered by receiving rank.
            send_counts, recv_counts: Rows by peer, `world_size` entries each.
            layer, backward: What the rows are for; recorded, and named if a peer does not take part.
            out: Contiguous memory for the result; None makes a new tensor.

        Returns:
            (sum(recv_counts), ...) of the same dtype and device, ordered by sending rank.

        Raises:
            ExchangeError: If the collective fails or a peer does not take part in time.
        """
        received = send.new_empty((sum(recv_counts), *send.shape[1:])) if out is None else out
        self.start_exchange(send, send_counts, recv_counts, layer=layer, backward=backward, out=received).wait()
        return received

    def borrow(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        layer: int = 0,
        backward: bool = False,
    ) -> list[Tensor]:
        """As `exchange`, but leaves the rows where they arrived, for those who read each of them once. Collective.

        Returns:
            (recv_counts[q], ...) from each rank q. To be read before the next exchange, and not to be written to.
        """
        return self.start_exchange(send, send_counts, recv_counts, layer=layer, backward=backward).wait()

    def start_exchange(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        *,
        layer: int = 0,
        backward: bool = False,
        out: Tensor | None = None,
    ) -> PendingRows:
        """Begins an exchange and returns while the rows travel. Collective, as is the end of it: `PendingRows.wait`.

        At most one exchange is under way. Where nothing can travel in the background (`kvstore`), it is over when
        this returns.

        Args:
            send, send_counts, recv_counts, layer, backward: As of `exchange`; `send` is not to be written to before the
                end.
            out: Contiguous memory for the rows; None leaves them where they arrive, to be read before the next
                exchange begins.

        Raises:
            ExchangeError: Also if the one before was neither waited for nor left.
        """
        self._begin()
        self.num_calls += 1
        if send.is_cuda and self.transport is not None and self.transport.device.type != "cuda":
            # The copy to the host waits for it anyway: work of before is no part of the exchange.
            torch.cuda.current_stream(send.device).synchronize()
        start_s = time.perf_counter()
        tag = ExchangeTag(call=self.num_calls, layer=layer, backward=backward)
        moved, transport = _as_moved(as_stored(send)), self.transport
        finish: Callable[[], list[Tensor]]
        if transport is None:
            received = send if out is None else out.copy_(send)
            finish = lambda: [received]  # noqa: E731
        else:
            if self.cross_check:
                self._cross_check(moved, send_counts, recv_counts, layer, backward)
            with self.naming(_name_of(tag)):
                if out is None and transport.can_lend and send.device == transport.device:
                    borrow = transport.start_borrowing(moved, list(recv_counts), list(send_counts), tag)
                    finish = partial(_read_as, borrow, send, recv_counts)
                else:
                    if out is None:
                        out = self.buffers.take((sum(recv_counts), *send.shape[1:]), send.dtype, send.device)
                    finish = self._start_into(transport, out, moved, list(recv_counts), list(send_counts), tag)
        row_bytes = moved.element_size() * (moved[0].numel() if len(moved) else 0)
        own = send_counts[self.rank] if len(send_counts) > self.rank else 0
        pending = PendingRows(
            communicator=self,
            tag=tag,
            bytes_sent=(sum(send_counts) - own) * row_bytes,
            start_s=start_s,
            finish=finish,
        )
        self._pending = pending
        return pending

    def settle(self) -> None:
        """Waits for the exchange that was left under way, if there is one. Collective then.

        Whatever else is exchanged does so first.
        """
        if self._left is not None:
            left, self._left = self._left, None
            left.wait()

    def _begin(self) -> None:
        """Comes before every operation but the end of an exchange. Collective where an exchange was left under way.

        Raises:
            ExchangeError: One was not ended, or was interrupted. Peers would take the next one for that.
        """
        self.settle()
        if self._pending is not None:
            raise ExchangeError(
                f"an exchange for layer {self._pending.layer} is under way on rank {self.rank} of {self.world_size}: "
                f"wait for its rows before the next one begins. If an exception or Ctrl-C came in between, ranks no "
                f"longer agree: end all of them and start again"
            )

    def _start_into(
        self,
        transport: Transport,
        received: Tensor,
        send: Tensor,
        recv_counts: list[int],
        send_counts: list[int],
        tag: ExchangeTag,
    ) -> Callable[[], list[Tensor]]:
        """Rows that a backend cannot move from where they are are taken to where it can: those of the GPU to pinned
        memory, and with NCCL ids and static data, which are on the host, to the GPU.
        """
        place = _as_moved(received)
        if transport.device.type != "cpu" and send.device.type == "cpu":
            staged_recv = torch.empty(place.shape, dtype=place.dtype, device=transport.device)
            end_there = transport.start_all_to_all(
                staged_recv, send.to(transport.device), recv_counts, send_counts, tag
            )

            def finish_there() -> list[Tensor]:
                end_there()
                place.copy_(staged_recv)
                return list(received.split(recv_counts))

            return finish_there
        if not (send.is_cuda and transport.device.type == "cpu"):
            end = transport.start_all_to_all(place, send, recv_counts, send_counts, tag)

            def finish() -> list[Tensor]:
                end()
                return list(received.split(recv_counts))

            return finish
        host_send = torch.empty(send.shape, dtype=send.dtype, pin_memory=True)
        host_recv = torch.empty(place.shape, dtype=place.dtype, pin_memory=True)
        host_send.copy_(send)
        end_staged = transport.start_all_to_all(host_recv, host_send, recv_counts, send_counts, tag)

        def finish_staged() -> list[Tensor]:
            end_staged()
            # Not waited for: what is launched next comes after it, and PyTorch gives pinned memory to nobody else
            # before the copies that were made from it are done.
            place.copy_(host_recv, non_blocking=True)
            return list(received.split(recv_counts))

        return finish_staged

    def send_buffer(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, passes_through: int | None = None
    ) -> Tensor:
        """Returns memory of arbitrary content for the rows of the next exchange, out of which they are sent fastest.

        It is not to be used after that exchange.

        Args:
            passes_through: As of `BufferPool.take`.
        """
        self.settle()  # its rows may still leave from that memory
        if self.transport is not None and self.transport.can_lend and device == self.transport.device:
            num_bytes = math.prod(shape) * dtype.itemsize
            return self.transport.send_buffer(num_bytes).view(dtype).view(tuple(shape))
        return self.buffers.take(shape, dtype, device, passes_through=passes_through)

    def drop_free_memory(self) -> None:
        """Gives back what lies ready for exchanges like the last ones and is in nobody's use. Not collective."""
        self.buffers.drop_free()
        if self.transport is not None:
            self.transport.drop_free()

    def _cross_check(
        self, send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], layer: int, backward: bool
    ) -> None:
        """Raises on every rank, or on none: all see the same headers."""
        row_bytes = send.element_size() * int(torch.Size(send.shape[1:]).numel())
        kind = int(send.is_floating_point())
        # Compared as tensors: ranks times ranks of them, at every exchange of a first step.
        header = np.array([layer, int(backward), row_bytes, kind, *send_counts, *recv_counts], dtype=np.int64)
        told = self._gather("integers", header.tobytes(), "an exchange")
        headers = torch.from_numpy(np.frombuffer(b"".join(told), dtype=np.int64).reshape(self.world_size, -1).copy())
        kinds, sent, expected = headers.split([4, self.world_size, self.world_size], dim=1)
        others = (kinds != kinds[0]).any(dim=1).nonzero().flatten().tolist()
        if others:
            raise ExchangeError(
                f"ranks disagree about exchange {self.num_calls}: rank 0 of {self.world_size} exchanges "
                f"{_describe(kinds[0].tolist())}, rank {others[0]} exchanges {_describe(kinds[others[0]].tolist())}. "
                f"Every rank must run the same layers on the same fields, with gradients or without, in the same "
                f"order; features that only some ranks copy are other fields: copy them on all ranks, or give the "
                f"loader keep_static=False."
            )
        mismatched = (sent.t() != expected).nonzero().tolist()
        if mismatched:
            rank, peer = mismatched[0]
            raise ExchangeError(
                f"recv_counts do not match: rank {rank} of {self.world_size} expects {int(expected[rank, peer])} rows "
                f"from peer {peer} for layer {layer}, which sends {int(sent[peer, rank])}. Rebuild both plans from one "
                f"partition."
            )

    def exchange_counts(self, send_counts: Sequence[int]) -> list[int]:
        """Tells every peer how many rows it will get from this rank. Collective."""
        if self.transport is None:
            return list(send_counts)
        self._begin()
        sent = self._tensor(list(send_counts))
        received = torch.empty_like(sent)
        ones = [1] * self.world_size
        with self.naming("exchange of counts"):
            self.transport.all_to_all(received, sent, ones, ones)
        return [int(count) for count in received.tolist()]

    # ---------------------------------------------------------------- small things all ranks agree on

    def _tensor(self, values: list[int] | list[float], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=None if self.transport is None else self.transport.device)

    def sum_(self, tensor: Tensor, *, what: str = "sum over ranks") -> Tensor:
        """All-reduces `tensor` by sum, in place; all ranks get the same bits. Collective; `what`: see `gather_ints`,
        where ranks share memory.
        """
        if self.transport is not None:
            self._begin()
            with self.naming(what):
                if tensor.device.type != self.transport.device.type:
                    moved = tensor.to(self.transport.device)
                    self.transport.all_reduce(moved, what)
                    tensor.copy_(moved)
                else:
                    self.transport.all_reduce(tensor, what)
        return tensor

    def gather_ints(self, values: Sequence[int], *, what: str = "") -> list[list[int]]:
        """Returns `[rank][k]`, every rank's list of the same length. Collective.

        Args:
            values: Of 64 bits.
            what: Where this rank is, as for all gathers here: ranks in different places are told of them.

        Raises:
            ExchangeError: On all ranks, if they are not in the same place, or lists are not as long.
        """
        gathered = self._gather("integers", np.array(values, dtype=np.int64).tobytes(), what)
        return [np.frombuffer(data, dtype=np.int64).tolist() for data in gathered]

    def gather_floats(self, values: Sequence[float], *, what: str = "") -> list[list[float]]:
        """Returns `[rank][k]`, every rank's list of the same length. Collective; see `gather_ints`."""
        gathered = self._gather("numbers", np.array(values, dtype=np.float64).tobytes(), what)
        return [np.frombuffer(data, dtype=np.float64).tolist() for data in gathered]

    def gather_json(self, value: Any, *, what: str = "") -> list[Any]:
        """Returns every rank's JSON-serialisable value, by rank. Collective (`all_gather_object` would pickle); see
        `gather_ints`.
        """
        return [json.loads(data) for data in self._gather("a message", json.dumps(value).encode(), what)]

    def _gather(self, kind: Kind, data: bytes, what: str = "") -> list[bytes]:
        """Returns the bytes of each rank: in one gather where they are few, else in two."""
        if self.transport is None:
            return [data]
        self._begin()
        device = self.transport.device
        with self.naming(what or "gather"):
            rows = self.transport.all_gather(torch.from_numpy(pack(kind, what, data)).to(device), what)
        table = torch.stack(rows).cpu().numpy()
        self._check_same_place(table)
        widest = max(sizes := sizes_of(table))
        if widest <= MOST_BYTES:
            return data_of(table)
        padded = torch.zeros(widest, dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        with self.naming(what or "gather"):
            rows = self.transport.all_gather(padded.to(device), what)
        return [row[:size].cpu().numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]

    def _check_same_place(self, table: Words) -> None:
        difference = find_difference(table)
        if difference is not None:
            raise ExchangeError(f"ranks are not in the same place: {difference}. {SAME_CALLS}")

    def gather_rows(self, rows_NF: Tensor) -> Tensor:
        """Puts the rows of all ranks one below the other, by rank. Collective; not differentiable.

        Every rank receives all rows, and for a moment holds `world_size` times the longest rank's.

        Args:
            rows_NF: (n, F), F and dtype the same on every rank; n may differ and be 0.

        Returns:
            (sum of n, F), dtype and device of `rows_NF`.
        Raises:
            ExchangeError: On all ranks, if F or dtype differ.
        """
        if self.transport is None:
            return rows_NF
        told = self.gather_json([len(rows_NF), *rows_NF.shape[1:], str(rows_NF.dtype)], what="a gather of rows")
        for rank, (_, *form) in enumerate(told):
            if form != told[0][1:]:
                raise ExchangeError(
                    f"expected rows as wide and of one dtype on all ranks (got {told[0][1:]} on rank 0 and {form} on "
                    f"rank {rank} of {self.world_size})"
                )
        sizes = [num_rows for num_rows, *_ in told]
        shape = (max(sizes), rows_NF.shape[1])
        padded = torch.zeros(shape, dtype=rows_NF.dtype, device=self._tensor([0]).device)
        padded[: len(rows_NF)] = rows_NF.detach()
        with self.naming("a gather of rows"):
            parts = self.transport.all_gather(_as_moved(padded), "a gather of rows")  # gloo's takes one size only
        rows = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return rows.view(rows_NF.dtype).to(rows_NF.device)

    def broadcast_json(self, value: Any, *, what: str = "") -> Any:
        """Returns rank 0's JSON-serialisable value on every rank. Collective; see `gather_ints`."""
        return self.gather_json(value if self.rank == 0 else None, what=what)[0]

    def barrier(self) -> None:
        """Waits for every rank. Collective."""
        self.gather_ints([0], what="a barrier")

    def common_time_s(self, local_s: float) -> float:
        """Maps this rank's `perf_counter` to a clock all ranks share, to about one message's latency.

        Collective at its first call: after a barrier every rank reads its clock, and rank 0's reading is the origin.
        """
        if self._clock_offset_s is None:
            self.barrier()
            here = time.perf_counter()
            self._clock_offset_s = self.gather_floats([here])[0][0] - here
        return local_s + self._clock_offset_s

    @contextlib.contextmanager
    def agreed(self, what: str = "") -> Iterator[None]:
        """Runs a rank-local part whose failure all ranks learn of. Collective at its end; see `gather_ints`.

        If the part raises on any rank, every rank raises: the failing one its own error, the others an error of
        the failing rank's kind with its words, so that nobody is left waiting in the next collective.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        report = None if error is None else [type(error).__name__, str(error)]
        try:
            self.raise_agreed(error, self.gather_json(report, what=what))
        finally:
            error = None  # which has this frame: else it, and all that frames below hold, would stay until Python looks

    def raise_agreed(self, error: Exception | None, reports: Sequence[Any]) -> None:
        """Raises what `agreed` would raise for these reports of all ranks; returns if there are none."""
        for rank, report in enumerate(reports):
            if error is None and report is not None:
                kind, message = report
                error_type = _error_type(kind)
                # A kind that is not known here is named, since its words may be few (an assertion's are none).
                words = message if error_type.__name__ == kind else f"{kind}: {message}"
                error = error_type(f"rank {rank} of {self.world_size}: {words}")
        if error is not None:
            setattr(error, _ON_ALL_RANKS, True)
            try:
                raise error
            finally:
                error = None  # as in `agreed`

    # ---------------------------------------------------------------- peers that do not come

    def lend(self, what: str) -> LentTransport | None:
        """Lends the transport to who measures it; None in a world of one rank. Collective.

        Args:
            what: It is lent for, to be named where a peer does not take part.
        """
        self._begin()
        if self.transport is None:
            return None
        # Who is alone on its host has "gloo", where others have "mixed".
        backends = self.gather_ints([int(self.transport.backend in ("mixed", "nccl"))], what=what)
        return LentTransport(self, self.transport, what, may_share_links=any(row[0] for row in backends))

    @contextlib.contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Makes a failure of the transport an `ExchangeError` that names what was done, and who was late."""
        if self._interrupted is not None:
            raise ExchangeError(
                f"rank {self.rank} of {self.world_size} was interrupted in the middle of {self._interrupted}, so ranks "
                f"no longer agree on what has arrived: end all of them and start again"
            )
        try:
            yield
        except RuntimeError as error:
            is_own = isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error) or _is_of_gpu(error)
            if is_own and not isinstance(error, PeerLeftError):
                raise  # no peer's fault, and scripts catch it
            self._explain(what, error)
        except Exception:
            raise
        except BaseException:
            self._interrupted = what
            raise

    def _explain(self, what: str, error: RuntimeError) -> NoReturn:
        if self.num_calls and f"exchange {self.num_calls} " not in what:
            what = f"{what} after exchange {self.num_calls}"
        late = [] if self.transport is None else self.transport.find_late_ranks(self.name, what)
        told = [f"rank {', '.join(map(str, late))} did not take part"] if late else []
        if self.transport is not None:
            told += [f"rank {rank} waits in {place}" for rank, place in sorted(self.transport.elsewhere.items())]
        who = "; ".join(told) or "a peer left or failed"
        raise ExchangeError(
            f"{what} did not complete on rank {self.rank} of {self.world_size}: {who}. {SAME_CALLS} "
            f"{_OR_IS_GONE} ({error})"
        ) from error


class PendingRows:
    """An exchange that is under way."""

    def __init__(
        self,
        *,
        communicator: Communicator,
        tag: ExchangeTag,
        bytes_sent: int,
        start_s: float,
        finish: Callable[[], list[Tensor]],
    ) -> None:
        self._communicator, self._tag, self._finish = communicator, tag, finish
        self._bytes_sent, self._start_s = bytes_sent, start_s
        self._blocked_s = time.perf_counter() - start_s

    @property
    def layer(self) -> int:
        return self._tag.layer

    def leave(self) -> None:
        """Lets the rows travel on into `out`: they are there once anything else is exchanged, or at `settle`."""
        self._communicator._left = self

    def wait(self) -> list[Tensor]:
        """Returns (recv_counts[q], ...) from each rank q, once; blocks until they are there. Collective.

        Raises:
            ExchangeError: If the exchange fails or a peer does not take part in time.
        """
        communicator, begun_s = self._communicator, time.perf_counter()
        if communicator._pending is not self:
            raise ExchangeError(f"the exchange for layer {self.layer} is over: its rows are handed out once")
        try:
            with communicator.naming(_name_of(self._tag)):
                rows = self._finish()
        finally:
            communicator._pending = None
            self._finish = _is_over  # which held the rows that left
        communicator.clock.record(
            ExchangeEvent(
                layer=self._tag.layer,
                backward=self._tag.backward,
                bytes_sent=self._bytes_sent,
                start_s=self._start_s,
                elapsed_s=self._blocked_s + time.perf_counter() - begun_s,
                beside_s=begun_s - self._start_s - self._blocked_s,
            )
        )
        return rows


def _is_over() -> list[Tensor]:
    raise ExchangeError("this exchange is over")


class LentTransport:
    """Plain operations of a communicator's transport, whose failures are explained as those of exchanges are."""

    def __init__(self, communicator: Communicator, transport: Transport, what: str, *, may_share_links: bool) -> None:
        self.rank, self.world_size = transport.rank, transport.world_size
        self._communicator, self._transport, self._what = communicator, transport, what
        self.may_share_links = may_share_links
        """Whether several ranks of a host may send to other hosts by one link. Alike on all ranks."""

    @property
    def device(self) -> torch.device:
        """Where the tensors lie that it moves as they are."""
        return self._transport.device

    def all_to_all(self, received: Tensor, send: Tensor, recv_counts: list[int], send_counts: list[int]) -> None:
        """`Transport.all_to_all`. Collective."""
        with self._communicator.naming(self._what):
            self._transport.all_to_all(received, send, recv_counts, send_counts)

    def all_reduce(self, tensor: Tensor) -> None:
        """`Transport.all_reduce`. Collective."""
        with self._communicator.naming(self._what):
            self._transport.all_reduce(tensor, self._what)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """`Transport.all_gather`. Collective."""
        with self._communicator.naming(self._what):
            return self._transport.all_gather(tensor, self._what)


def _read_as(borrow: Callable[[], list[Tensor]], send: Tensor, recv_counts: Sequence[int]) -> list[Tensor]:
    """What was borrowed, in the dtype and shape of what was sent."""
    shapes = [(count, *send.shape[1:]) for count in recv_counts]
    return [
        # Rows of no elements may begin where their dtype may not.
        part.view(-1).view(send.dtype).view(shape) if part.numel() else send.new_empty(shape)
        for part, shape in zip(borrow(), shapes, strict=True)
    ]


def _name_of(tag: ExchangeTag) -> str:
    return f"exchange {tag.call} (layer {tag.layer}, {'backward' if tag.backward else 'forward'})"


def _describe(header: list[int]) -> str:
    layer, backward, row_bytes, is_floating = header[:4]
    kind = "floating-point" if is_floating else "integer"
    return f"{kind} rows of {row_bytes} bytes for layer {layer} in {'backward' if backward else 'forward'}"


def _is_of_gpu(error: RuntimeError) -> bool:
    """Whether this rank's own GPU has failed, or has no pinned memory left: also at work of before, which is found out
    where a copy waits for it (a label out of range, say).
    """
    return isinstance(error, getattr(torch, "AcceleratorError", ())) or str(error).startswith("CUDA error")


def _as_moved(rows: Tensor) -> Tensor:
    """Contiguous rows, as (n, bytes of a row) uint8 where a backend does not send their dtype as it is."""
    if rows.dtype not in _MOVED_AS_BYTES:
        return rows
    return rows.view(len(rows), math.prod(rows.shape[1:])).view(torch.uint8)


def _error_type(name: str) -> type[Exception]:
    known: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError, "KeyError": KeyError}
    pending: list[type[HybridError]] = [HybridError]
    while pending:
        kind = pending.pop()
        known[kind.__name__] = kind
        pending.extend(kind.__subclasses__())
    return known.get(name, HybridError)
