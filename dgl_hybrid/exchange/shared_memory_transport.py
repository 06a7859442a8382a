# SPDX-License-Identifier: Apache-2.0
"""Rows of ranks on one host go through memory that both sides map, words about them through sockets.

    rank 0                                  rank 1
    writes rows into its outbox
    ── "round 7, layer 2: 310 rows at …" ──▶
    ◀─ "round 7, layer 2: 298 rows at …" ──
    reads rank 1's outbox                   reads rank 0's outbox

Every rank tells every other one of its host in each round, rows or none. So each sees at once who is elsewhere in the
program, and nobody needs to be told that rows were read: who begins round 7 has read those of round 6, and an outbox
keeps the messages of two rounds apart (`Outbox`).

What ranks gather and sum goes the same way, by an outbox of its own: rows that were lent out stay where they are until
the next exchange. Through a process group of gloo, whose threads spin where another one holds a lock, a sum of 150 KB
takes two busy ranks on two cores 2.9 ms, and this way 0.25 (`benchmarks/exchange`).

A rank that waits sleeps in `poll`; it is woken by a message, by the end of a peer's process and by its deadline. What
was written to memory before a message was sent is seen by who received it, on any processor: the kernel orders both.

Where ranks are on several hosts, those of other hosts get their rows over the process group meanwhile (`far_rows.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from dgl_hybrid.errors import ExchangeError
from dgl_hybrid.exchange.far_rows import FarRows
from dgl_hybrid.exchange.host_links import PeerLink, can_share_memory, meet_on_host
from dgl_hybrid.exchange.posts import LEAVING, LONGEST_MESSAGE, Doing, Post
from dgl_hybrid.exchange.shared_segments import Outbox
from dgl_hybrid.exchange.transport import (
    NO_TAG,
    SAME_CALLS,
    ExchangeTag,
    PeerLeftError,
    Transport,
    as_bytes,
    as_stored,
    bytes_of_row,
    milliseconds,
    sum_in_order,
)

ROUND_BYTES = 16 << 20
"""What is not written into the outbox by the caller goes through it in pieces: bounds the memory of large transfers,
such as those of features when a graph is opened."""

_ENDS_WITHIN_S = 1.0
"""Between the end of a process's connections and its own."""

_ELSEWHERE = "ranks are not in the same place"
_SAME_LAYERS = "Every rank must run the same layers on the same fields, with gradients or without, in the same order."
_SUMMED_WHOLE_BYTES = 64 << 10
"""Of more, with more than two ranks, each rank sums a share and reads the others'."""


class SharedMemoryTransport(Transport):
    """Through memory of hosts: all of it where all ranks are on one, else the rows of those that are.

    Args:
        group: Carries the rows of far ranks, and sums and gathers where there are some; of the same ranks.
        outboxes: Whose descriptors the peers have: of rows, and of what is gathered and summed.
        links: To every other rank of this host, by rank.
        is_everybody: Whether all ranks are on this host; alike on all of them.
        timeout_s: A peer that stays away longer than this ends an operation with an error.
    """

    can_lend = True

    def __init__(
        self,
        group: Transport,
        outboxes: tuple[Outbox, Outbox],
        links: Sequence[PeerLink],
        *,
        is_everybody: bool,
        timeout_s: float,
    ) -> None:
        self.rank, self.world_size = group.rank, group.world_size
        self.backend = "shared_memory" if is_everybody else "mixed"
        self._group, self._links = group, tuple(links)
        self._outbox, self._small = outboxes
        self._link_of = {link.rank: link for link in links}
        self._far = FarRows(group, {self.rank, *self._link_of}) if not is_everybody else None
        self._timeout_s = timeout_s
        self._process = os.getpid()
        self._num_calls = 0
        self._is_awaiting = False
        """An operation was begun whose rows are still to be read."""
        self._late: list[int] = []
        self._why_left = ""
        self._lock = threading.Lock()
        weakref.finalize(self, _close, outboxes, self._links)

    def join_again(self) -> Transport | str:
        """Joins the same ranks by sockets and memory of their own. Collective; see `connect_through_memory`."""
        return connect_through_memory(self._group, timeout_s=self._timeout_s, everybody=True)

    # ---------------------------------------------------------------- operations

    def start_all_to_all(
        self,
        received: Tensor,
        send: Tensor,
        recv_counts: list[int],
        send_counts: list[int],
        tag: ExchangeTag = NO_TAG,
    ) -> Callable[[], None]:
        with self._taking_part():
            end_far = None if self._far is None else self._far.start(received, send, recv_counts, send_counts, tag)
            outgoing, incoming = _by_peer(send, send_counts), _by_peer(received, recv_counts)
            incoming[self.rank].copy_(outgoing[self.rank])
            for rank in range(self.world_size):
                if rank not in self._link_of:
                    incoming[rank] = outgoing[rank] = outgoing[rank][:0]
            share = ROUND_BYTES // max(1, len(self._links))
            if self._outbox.holds(send):
                pieces, offsets = outgoing, self._offsets_of(send, send_counts)
                outgoing = [part[:0] for part in outgoing]
            else:
                pieces, outgoing = [part[:share] for part in outgoing], [part[share:] for part in outgoing]
                offsets = self._write(pieces)
            has_more = any(len(part) for part in outgoing)
            own = self._post(send, send_counts, offsets, [len(piece) for piece in pieces], has_more, tag)
            self._is_awaiting = True

        def finish() -> None:
            nonlocal outgoing, has_more, own
            with self._taking_part(continued=True):
                while True:
                    posts = self._collect(own, recv_counts, tag)
                    self._copy_from(posts, incoming)
                    if not (has_more or any(post.has_more for post in posts)):
                        break
                    pieces, outgoing = [part[:share] for part in outgoing], [part[share:] for part in outgoing]
                    offsets = self._write(pieces)
                    has_more = any(len(part) for part in outgoing)
                    own = self._post(send, send_counts, offsets, [len(piece) for piece in pieces], has_more, tag)
                missing = [rank for rank, part in enumerate(incoming) if len(part)]
                if missing:
                    raise RuntimeError(f"rank {missing[0]} was to send {len(incoming[missing[0]])} bytes more")
                if end_far is not None:
                    end_far()

        return finish

    def _copy_from(self, posts: Sequence[Post], incoming: list[Tensor]) -> None:
        """Copies one round's rows to where they belong, and moves those places on."""
        for link, post in zip(self._links, posts, strict=True):
            place = incoming[link.rank]
            if post.num_bytes > len(place):
                raise RuntimeError(f"rank {link.rank} was to send {len(place)} bytes, not {post.num_bytes}")
            place[: post.num_bytes].copy_(link.segments[0].read(post.offset, post.num_bytes))
            incoming[link.rank] = place[post.num_bytes :]

    def send_buffer(self, num_bytes: int) -> Tensor:
        # The process group may still send from the outbox, and a forked process would write into its parent's: the next
        # operation raises.
        if self._why_left or os.getpid() != self._process:
            return torch.empty(num_bytes, dtype=torch.uint8)
        try:
            return self._outbox.place(num_bytes)
        except BaseException as error:  # no memory: peers wait for what would have been sent
            self._leave(error)
            raise

    def start_borrowing(
        self, send: Tensor, recv_counts: list[int], send_counts: list[int], tag: ExchangeTag = NO_TAG
    ) -> Callable[[], list[Tensor]]:
        with self._taking_part():
            start_far = None if self._far is None else self._far.start_borrowing
            end_far = None if start_far is None else start_far(send, recv_counts, send_counts, tag)
            if not self._outbox.holds(send):
                self._write([as_bytes(send)])
            row_bytes = bytes_of_row(send)
            offsets = self._offsets_of(send, send_counts)
            own = self._post(send, send_counts, offsets, [count * row_bytes for count in send_counts], False, tag)
            self._is_awaiting = True

        def finish() -> list[Tensor]:
            with self._taking_part(continued=True):
                parts = self._read_parts(own, send, recv_counts, tag)
                begin = sum(send_counts[: self.rank])
                parts[self.rank] = send[begin : begin + send_counts[self.rank]]
                if end_far is not None:
                    parts.update(end_far())
                return [parts[rank] for rank in range(self.world_size)]

        return finish

    def _read_parts(self, own: list[Post], send: Tensor, recv_counts: list[int], tag: ExchangeTag) -> dict[int, Tensor]:
        """Returns the rows of every other rank of this host, where they lie."""
        parts: dict[int, Tensor] = {}
        row_bytes = bytes_of_row(send)
        for link, post in zip(self._links, self._collect(own, recv_counts, tag), strict=True):
            num_rows = recv_counts[link.rank]
            if post.num_bytes != num_rows * row_bytes:
                raise RuntimeError(f"rank {link.rank} was to send {num_rows * row_bytes} bytes, not {post.num_bytes}")
            part = link.segments[0].read(post.offset, post.num_bytes)
            parts[link.rank] = part.view(send.dtype).view(num_rows, *send.shape[1:])
        return parts

    def drop_free(self) -> None:
        with self._lock:
            # Else peers may still read the message before the last, or the process group send one.
            if not self._is_awaiting and not self._why_left:
                self._outbox.drop_free()
                self._small.drop_free()
        if self._far is not None:
            self._far.drop_free()
        self._group.drop_free()

    def all_reduce(self, tensor: Tensor, what: str = "") -> None:
        if self._far is not None:
            self._group.all_reduce(tensor, what)
            return
        summed = as_stored(tensor).view(-1)  # the tensor itself, mostly
        for piece in summed.split(max(1, ROUND_BYTES // summed.element_size())):
            self._sum_piece(piece, what)
        if summed.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(summed.view(tensor.shape))

    def _sum_piece(self, piece: Tensor, what: str) -> None:
        parts = [part.view(piece.dtype) for part in self._share(piece, what, Doing.SUM, len(piece))]
        if self.world_size == 2 or piece.nbytes <= _SUMMED_WHOLE_BYTES:
            piece.copy_(sum_in_order(parts))
            return
        shares = piece.tensor_split(self.world_size)
        own = [part.tensor_split(self.world_size)[self.rank] for part in parts]
        told = self._share(sum_in_order(own), what, Doing.SUM, len(piece))
        for share, part in zip(shares, told, strict=True):
            if part.nbytes != share.nbytes:
                raise RuntimeError(f"a rank was to send {share.nbytes} bytes of a sum, not {part.nbytes}")
            share.copy_(part.view(piece.dtype))

    def all_gather(self, tensor: Tensor, what: str = "") -> list[Tensor]:
        if self._far is not None:
            return self._group.all_gather(tensor, what)
        source = as_stored(tensor)
        gathered = [torch.empty_like(source) for _ in range(self.world_size)]
        places = [as_bytes(part).split(ROUND_BYTES) for part in gathered]
        for number, piece in enumerate(as_bytes(source).split(ROUND_BYTES)):
            for place, part in zip(places, self._share(piece, what, Doing.GATHER, 1), strict=True):
                place[number].copy_(part)
        return gathered

    def _share(self, piece: Tensor, what: str, doing: Doing, num_rows: int) -> list[Tensor]:
        """Shows all ranks a piece and returns what each shows, (n,) uint8, by rank; to be read before the next one."""
        with self._taking_part():
            mine = as_bytes(piece)
            place = self._small.place(len(mine)).copy_(mine)
            own = Post(
                doing=doing,
                call=self._num_calls,
                row_bytes=piece.element_size() if doing is Doing.SUM else len(mine),
                dtype=str(piece.dtype).removeprefix("torch."),
                num_rows=num_rows,
                offset=self._small.offset,
                num_bytes=len(mine),
                what=what,
            )
            deadline = time.monotonic() + self._timeout_s
            message = own.pack()
            for link in self._links:
                self._send(link, message, deadline)
            self._small.post()
            posts = self._await_posts(deadline)
            told = {link.rank: post for link, post in zip(self._links, posts, strict=True)}
            self._check_alike({self.rank: own} | told)
            parts = {link.rank: self._shown(link, told[link.rank]) for link in self._links} | {self.rank: place}
            return [parts[rank] for rank in range(self.world_size)]

    @staticmethod
    def _shown(link: PeerLink, post: Post) -> Tensor:
        return link.segments[1].read(post.offset, post.num_bytes)

    def find_late_ranks(self, name: str, where: str) -> list[int]:
        """Those from which something was still to come when this one gave up; else whom the process group misses.

        Where it cannot tell, as rank 0 is gone and its store with it: whose processes on this host had ended by then.
        """
        is_told = self._why_left and not (self._far is not None and self._far.has_failed)
        if is_told and self._far is None:
            return self._late
        ended = [] if is_told else self._ended_ranks()
        missed = self._group.find_late_ranks(name, where)  # far ranks ask who is stuck as this one is
        self.elsewhere = self._group.elsewhere
        return self._late if is_told else missed or ended

    def _ended_ranks(self) -> list[int]:
        events = select.poll()
        for link in self._links:
            events.register(link.peer_process, select.POLLIN)
        ended = {descriptor for descriptor, _ in events.poll(milliseconds(_ENDS_WITHIN_S))}
        return [link.rank for link in self._links if link.peer_process in ended]

    # ---------------------------------------------------------------- rounds

    def _offsets_of(self, send: Tensor, send_counts: list[int]) -> list[int]:
        """Where each rank's rows of a tensor lie that is the message."""
        row_bytes = bytes_of_row(send)
        rows_before = itertools.accumulate(send_counts[:-1], initial=0)
        return [self._outbox.offset + rows * row_bytes for rows in rows_before]

    def _write(self, pieces: Sequence[Tensor]) -> list[int]:
        """Copies (n,) uint8 pieces into the outbox and returns where each lies."""
        sizes = [len(piece) for piece in pieces]
        for place, piece in zip(self._outbox.place(sum(sizes)).split(sizes), pieces, strict=True):
            place.copy_(piece)
        return [self._outbox.offset + before for before in itertools.accumulate(sizes[:-1], initial=0)]

    def _post(
        self,
        send: Tensor,
        send_counts: list[int],
        offsets: list[int],
        sizes: list[int],
        has_more: bool,
        tag: ExchangeTag,
    ) -> list[Post]:
        """Tells every peer what lies where and returns what this rank would tell each rank, itself included."""
        own = [
            Post(
                call=self._num_calls,
                layer=tag.layer,
                is_backward=tag.backward,
                row_bytes=bytes_of_row(send),
                dtype=str(send.dtype).removeprefix("torch."),
                num_rows=send_counts[rank],
                offset=offsets[rank],
                num_bytes=sizes[rank],
                has_more=has_more,
            )
            for rank in range(self.world_size)
        ]
        deadline = time.monotonic() + self._timeout_s
        for link in self._links:
            self._send(link, own[link.rank].pack(), deadline)
        self._outbox.post()
        return own

    def _collect(self, own: list[Post], recv_counts: list[int], tag: ExchangeTag) -> list[Post]:
        """Awaits what every peer tells and returns it, by link, checked."""
        posts = self._await_posts(time.monotonic() + self._timeout_s)
        told = {self.rank: own[self.rank]} | {link.rank: post for link, post in zip(self._links, posts, strict=True)}
        self._check_alike(told, f"ranks disagree about exchange {tag.call}")
        for rank, post in sorted(told.items()):
            if rank != self.rank and post.num_rows != recv_counts[rank]:
                raise ExchangeError(
                    f"recv_counts do not match: rank {self.rank} of {self.world_size} expects {recv_counts[rank]} rows "
                    f"from peer {rank} for layer {tag.layer}, which sends {post.num_rows}. Rebuild both plans from one "
                    f"partition."
                )
        return posts

    def _check_alike(self, told: Mapping[int, Post], otherwise: str = _ELSEWHERE) -> None:
        """Raises on every rank of this host, or on none: all see the same posts."""
        first = min(told)
        for rank, post in sorted(told.items()):
            if post.call != self._num_calls or post.kind != told[first].kind:
                are_exchanges = all(of_rank.doing is Doing.EXCHANGE for of_rank in told.values())
                rule = _SAME_LAYERS if are_exchanges else SAME_CALLS
                raise ExchangeError(
                    f"{otherwise if are_exchanges else _ELSEWHERE}: rank {first} of {self.world_size} "
                    f"{told[first].describe()}, rank {rank} {post.describe()}. {rule}"
                )

    # ---------------------------------------------------------------- messages

    def _send(self, link: PeerLink, message: bytes, deadline: float) -> None:
        """Who is gone is noticed where something is awaited of it: it may have said why."""
        while True:
            try:
                link.channel.send(message, socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:
                writable = select.poll()
                writable.register(link.channel, select.POLLOUT)
                if not writable.poll(milliseconds(deadline - time.monotonic())):
                    self._give_up([link.rank])
            except ConnectionError:
                return

    def _await_posts(self, deadline: float) -> list[Post]:
        waiting, posts = {link.rank: link for link in self._links}, dict[int, Post]()
        happened: set[int] = set()
        while True:
            for link in list(waiting.values()):
                message = _receive(link.channel)
                if message is not None:
                    posts[link.rank] = self._read_post(link, message)
                    del waiting[link.rank]
                elif link.peer_process in happened:  # Looked at before its messages were: these had been its last.
                    self._has_ended(link)
            if not waiting:
                return [posts[link.rank] for link in self._links]
            events = select.poll()
            for link in waiting.values():
                events.register(link.channel, select.POLLIN)
                events.register(link.peer_process, select.POLLIN)
            happened = {descriptor for descriptor, _ in events.poll(milliseconds(deadline - time.monotonic()))}
            if not happened:
                self._give_up(sorted(waiting))

    def _read_post(self, link: PeerLink, message: bytes) -> Post:
        if not message:
            self._has_ended(link)
        if message[0] == LEAVING:
            raise PeerLeftError(message[1:].decode(errors="replace"))
        try:
            return Post.unpack(message)
        except ValueError as error:
            raise RuntimeError(f"rank {link.rank} is of another version, as it seems: {error}") from error

    def _has_ended(self, link: PeerLink) -> NoReturn:
        self._late = [link.rank]
        raise RuntimeError(f"the process of rank {link.rank} has ended, or let go of its communicator")

    def _give_up(self, late: list[int]) -> NoReturn:
        self._late = late
        raise RuntimeError(f"nothing came for {self._timeout_s:g} s")

    @contextlib.contextmanager
    def _taking_part(self, *, continued: bool = False) -> Iterator[None]:
        """One operation, or the second half of it; whatever ends it early is told to the peers, which would wait."""
        if os.getpid() != self._process:
            raise RuntimeError("a process forked from a rank cannot exchange in its place")
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("two threads exchange at once over one communicator, whose calls have an order")
        try:
            if self._why_left:
                raise RuntimeError(f"this rank left the exchanges of this communicator before: {self._why_left}")
            if self._is_awaiting != continued:
                raise RuntimeError("an exchange was begun and not ended before the next one")
            self._is_awaiting = False
            self._num_calls += not continued
            yield
        except BaseException as error:
            self._leave(error)
            raise
        finally:
            self._lock.release()

    def _leave(self, error: BaseException) -> None:
        if self._why_left:
            return
        if isinstance(error, PeerLeftError):
            self._why_left = str(error)
        else:
            self._why_left = f"rank {self.rank} of {self.world_size}: {error or type(error).__name__}"
        message = bytes([LEAVING]) + self._why_left.encode()[: LONGEST_MESSAGE - 1]
        for link in self._links:
            with contextlib.suppress(OSError):
                link.channel.send(message, socket.MSG_NOSIGNAL)


def connect_through_memory(group: Transport, *, timeout_s: float, everybody: bool = False) -> Transport | str:
    """Joins the ranks of a group through the memory of their hosts. Collective.

    Args:
        everybody: Whether nothing will do but all ranks on one host; else two of them are enough.

    Returns:
        The transport, for a rank alone on its host the group itself; or, on every rank, why there can be none.
    """
    outboxes = _make_outboxes()
    links: list[PeerLink] | str = ""
    try:
        links = meet_on_host(group, outboxes, everybody=everybody)
    finally:
        is_everybody = len(links) == group.world_size - 1
        if isinstance(links, str) or not (links or is_everybody):
            _close(outboxes, ())
    if isinstance(links, str):
        return links
    if not (links or is_everybody):
        return group
    rows, small = outboxes
    return SharedMemoryTransport(group, (rows, small), links, is_everybody=is_everybody, timeout_s=timeout_s)


def _make_outboxes() -> list[Outbox]:
    """Returns one for rows and one for what is small; none where this system has no such thing."""
    made: list[Outbox] = []
    try:
        if can_share_memory():
            made.append(Outbox())
            made.append(Outbox())
    except OSError:  # A sandbox may forbid it.
        _close(made, ())
        return []
    return made


def _by_peer(rows: Tensor, counts: list[int]) -> list[Tensor]:
    """Bytes of each rank's rows, (n,) uint8 views."""
    row_bytes = bytes_of_row(rows)
    return list(as_bytes(rows).split([count * row_bytes for count in counts]))


def _receive(channel: socket.socket) -> bytes | None:
    """Returns the next message, b"" after the last one, None if there is none yet."""
    while True:
        try:
            return channel.recv(LONGEST_MESSAGE)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            continue  # Said once, of messages that the other end had not read; its own come after.


def _close(outboxes: Sequence[Outbox], links: Sequence[PeerLink]) -> None:
    for outbox in outboxes:
        os.close(outbox.descriptor)
    for link in links:
        link.close()
