# SPDX-License-Identifier: Apache-2.0
"""Finds out which ranks share a host, and joins each pair of them by a socket of that host.

    1. every rank listens at an address that only ranks learn, and describes its host    gather of the process group
    2. each connects to the ranks of its host below it, is accepted by them, and both exchange
       the descriptors of their memory (SCM_RIGHTS) and see whose process the other end is
    3. all say whether that worked                                                       gather of the process group

Addresses are abstract: no file stands for them, and they exist in one network namespace only. So ranks that were put
into several namespaces, containers or emulated hosts, cannot meet here.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dgl_hybrid.exchange.shared_segments import Outbox, PeerSegment
from dgl_hybrid.exchange.transport import Transport

MEETING_TIMEOUT_S = 20.0
_HELLO_TIMEOUT_S = 10.0
_WHERE_RANKS_ARE = ("on one host", "in one network namespace", "in one process namespace", "of one user")
_DIGEST_BYTES, _SECRET_BYTES = 16, 16
_CAN_SHARE = "can share"
_HELLO = struct.Struct(f"<{_SECRET_BYTES}si")
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class PeerLink:
    """What joins this rank to another one.

    A `peer_process` that is readable has ended, whoever else may hold the other end of its socket (processes forked
    from it do).
    """

    rank: int
    channel: socket.socket
    peer_process: int
    segments: tuple[PeerSegment, ...]
    """The peer's outboxes, in its order."""

    def close(self) -> None:
        self.channel.close()
        os.close(self.peer_process)
        for segment in self.segments:
            os.close(segment.descriptor)


def meet_on_host(group: Transport, outboxes: Sequence[Outbox], *, everybody: bool) -> list[PeerLink] | str:
    """Joins this rank to the others on its host. Collective: two gathers; all get links or all a reason.

    Args:
        group: Of the same ranks.
        outboxes: Whose descriptors peers get, as many on every rank; none if this system has no such thing.
        everybody: Whether nothing will do but all ranks on one host; else two of them are enough.

    Returns:
        A link for each other rank of this host, by rank, none for a rank alone on its host; or why there are none for
        anybody, in words alike on every rank.
    """
    secret = secrets.token_bytes(_SECRET_BYTES)
    listener = _listen(secret) if outboxes else None
    try:
        digests = [_digest(value) for value in _describe_host(can_share=listener is not None)]
        mine = torch.frombuffer(bytearray(b"".join([secret, *digests])), dtype=torch.uint8)
        described = [bytes(row.tolist()) for row in group.all_gather(mine.to(group.device))]
        hosts = _hosts(described)
        reason = _find_difference(described)
        if reason is not None and (everybody or max(map(len, hosts)) < 2):
            return reason
        (mates,) = (host for host in hosts if group.rank in host)
        links: list[PeerLink] = []
        failure = ""
        try:
            if len(mates) > 1:
                assert listener is not None
                links = _join(listener, outboxes, group.rank, {rank: described[rank][:_SECRET_BYTES] for rank in mates})
        except OSError as error:
            failure = str(error)
        try:
            joined = group.all_gather(torch.tensor([not failure], dtype=torch.uint8, device=group.device))
        except BaseException:
            for link in links:
                link.close()
            raise
        late = [rank for rank, answer in enumerate(joined) if not int(answer[0])]
        if late:
            for link in links:
                link.close()
            detail = f" ({failure})" if failure else ""
            return f"rank {late[0]} of {group.world_size} could not be joined to the others{detail}"
        return links
    finally:
        if listener is not None:
            listener.close()


# -------------------------------------------------------------------- are we on one host?


def _describe_host(*, can_share: bool) -> list[str]:
    """What this system can, then one value for each of `_WHERE_RANKS_ARE`, equal where it is the same thing."""
    with contextlib.suppress(OSError):
        return [
            _CAN_SHARE if can_share else "",
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/net"),
            os.readlink("/proc/self/ns/pid"),
            str(os.geteuid()),
        ]
    return [""] * (1 + len(_WHERE_RANKS_ARE))


def _digest(value: str) -> bytes:
    return hashlib.blake2b(value.encode(), digest_size=_DIGEST_BYTES).digest()


def _hosts(described: list[bytes]) -> list[list[int]]:
    """Returns the ranks of each host, ascending; one that cannot share is alone."""
    can_share, *values = _split(described)
    hosts: dict[tuple[bytes, ...], list[int]] = {}
    for rank, can in enumerate(can_share):
        is_able = can == _digest(_CAN_SHARE)
        host = tuple(value[rank] for value in values) if is_able else (_digest(f"alone: {rank}"),)
        hosts.setdefault(host, []).append(rank)
    return list(hosts.values())


def _find_difference(described: list[bytes]) -> str | None:
    """Returns in what the ranks differ: the same words on every rank, since all see the same."""
    num_ranks, (can_share, *values) = len(described), _split(described)
    for rank, value in enumerate(can_share):
        if value != _digest(_CAN_SHARE):
            return f"rank {rank} of {num_ranks} has no memfd, pidfd or local sockets (Linux 5.3 or later has)"
    for where, value_by_rank in zip(_WHERE_RANKS_ARE, values, strict=True):
        for rank, value in enumerate(value_by_rank):
            if value != value_by_rank[0]:
                return f"ranks 0 and {rank} of {num_ranks} are not {where}"
    return None


def _split(described: list[bytes]) -> list[list[bytes]]:
    """`[value][rank]`, the secrets left out."""
    begins = range(_SECRET_BYTES, len(described[0]), _DIGEST_BYTES)
    return [[row[begin : begin + _DIGEST_BYTES] for row in described] for begin in begins]


def can_share_memory() -> bool:
    """Says whether this system has what is needed."""
    return (
        sys.platform == "linux"
        and all(hasattr(os, name) for name in ("memfd_create", "pidfd_open"))
        and all(hasattr(socket, name) for name in ("SO_PEERCRED", "send_fds", "recv_fds"))
    )


# -------------------------------------------------------------------- the meeting


def _address(secret: bytes) -> bytes:
    """Says nothing about the secret to those who list the sockets of the host."""
    return b"\0dgl_hybrid/" + hashlib.blake2b(secret, digest_size=_DIGEST_BYTES, person=b"address").hexdigest().encode()


def _listen(secret: bytes) -> socket.socket | None:
    """Returns None where this is not allowed, as in some sandboxes: then all ranks do without."""
    try:
        os.close(os.pidfd_open(os.getpid()))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:
        return None
    try:
        listener.bind(_address(secret))
        listener.listen(4096)
    except OSError:
        listener.close()
        return None
    return listener


def _join(
    listener: socket.socket, outboxes: Sequence[Outbox], rank: int, secrets_by_rank: Mapping[int, bytes]
) -> list[PeerLink]:
    """Joins the ranks that there are secrets of; raises `OSError` if one does not come or is not who it should be."""
    above = [peer for peer in secrets_by_rank if peer > rank]
    descriptors = [outbox.descriptor for outbox in outboxes]
    deadline = time.monotonic() + MEETING_TIMEOUT_S
    links: dict[int, PeerLink] = {}
    pending: dict[int, socket.socket] = {}
    try:
        for peer in (peer for peer in secrets_by_rank if peer < rank):
            pending[peer] = channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            channel.settimeout(_remaining(deadline))
            channel.connect(_address(secrets_by_rank[peer]))
            socket.send_fds(channel, [_HELLO.pack(secrets_by_rank[peer], rank)], descriptors)
        while len(links) < len(above):
            listener.settimeout(_remaining(deadline))
            channel, _ = listener.accept()
            try:
                channel.settimeout(min(_HELLO_TIMEOUT_S, _remaining(deadline)))
                link = _receive_hello(channel, secrets_by_rank[rank], above, len(outboxes))
            except OSError:  # Anybody may connect; only a rank knows the secret.
                channel.close()
                continue
            links[link.rank] = link
            socket.send_fds(channel, [_HELLO.pack(secrets_by_rank[link.rank], rank)], descriptors)
        while pending:
            peer, channel = next(iter(pending.items()))
            channel.settimeout(_remaining(deadline))
            links[peer] = _receive_hello(channel, secrets_by_rank[rank], [peer], len(outboxes))
            del pending[peer]
    except BaseException:
        for link in links.values():
            link.close()
        for channel in pending.values():
            channel.close()
        raise
    for link in links.values():
        link.channel.setblocking(False)
    return [links[peer] for peer in sorted(links)]


def _receive_hello(channel: socket.socket, secret: bytes, expected: Sequence[int], num_segments: int) -> PeerLink:
    pid, uid, _ = _CREDENTIALS.unpack(channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        raise PermissionError(f"a rank must run as user {os.geteuid()} (got one of user {uid})")
    hello, descriptors, _, _ = socket.recv_fds(channel, _HELLO.size, num_segments, socket.MSG_CMSG_CLOEXEC)
    opened = list(descriptors)
    try:
        if len(hello) != _HELLO.size or len(opened) != num_segments:
            raise ConnectionError("a rank left, or somebody else came")
        said, rank = _HELLO.unpack(hello)
        if not secrets.compare_digest(said, secret) or rank not in expected:
            raise PermissionError(f"one of the ranks {list(expected)} was expected (got another)")
        segments = tuple(PeerSegment(descriptor) for descriptor in descriptors)
        opened.append(os.pidfd_open(pid))
    except BaseException:
        for descriptor in opened:
            os.close(descriptor)
        raise
    return PeerLink(rank, channel, opened[-1], segments)


def _remaining(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"not all ranks of this host had met after {MEETING_TIMEOUT_S:g} s")
    return left
