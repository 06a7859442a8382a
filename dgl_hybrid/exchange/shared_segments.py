# SPDX-License-Identifier: Apache-2.0
"""Memory that one process writes and others on its host read: files without a name, passed on as descriptors.

Such a file lives as long as somebody has it open or mapped. There is nothing to unlink, so nothing stays behind
whatever ends a process.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import warnings

import torch
from torch import Tensor

from dgl_hybrid.errors import ExchangeError

_GROWN_BY_BYTES = 1 << 20
_ALIGNED_TO_BYTES = 1 << 12


class Outbox:
    """Memory of one rank's messages: the next one never lies where the last one does, which peers may still read.

    The file only grows, which its seal makes certain for those who map it: no read of theirs can go past its end. Its
    memory is reserved when it is needed, by the MiB, and what nobody reads can be given back (`drop_free`).

    Attributes:
        descriptor: To be passed to peers.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("dgl_hybrid_outbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self.descriptor, 0o600)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            self._is_reserved = bytearray()
            self._reserve(0, 1)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._placed = self._posted = (0, 0)
        """[begin, end) of the message that is being written, and of the one posted last."""

    @property
    def num_bytes(self) -> int:
        return self._memory.numel()

    @property
    def offset(self) -> int:
        """Where the message that is being written begins."""
        return self._placed[0]

    def place(self, num_bytes: int) -> Tensor:
        """Returns memory for the next message, (num_bytes,) uint8; without a `post`, the same again at the next call.

        Raises:
            ExchangeError: There is not enough memory.
        """
        begin, end = self._posted
        start = 0 if num_bytes <= begin else -(-end // _ALIGNED_TO_BYTES) * _ALIGNED_TO_BYTES
        first, last = start // _GROWN_BY_BYTES, -(-(start + num_bytes) // _GROWN_BY_BYTES)
        if last > len(self._is_reserved) or 0 in self._is_reserved[first:last]:
            try:
                self._reserve(first, last)
            except OSError as error:
                raise ExchangeError(
                    f"this rank needs {last * _GROWN_BY_BYTES} bytes of shared memory to send rows but could not get "
                    f"them ({error}). Give transport='collective', or the processes more memory."
                ) from error
        self._placed = (start, start + num_bytes)
        return self._memory[start : start + num_bytes]

    def _reserve(self, first: int, last: int) -> None:
        """Takes memory for these MiB of the file, and makes it reach so far."""
        # Reserved here, so that a lack of memory is an error of this call and not a signal at some later write.
        os.posix_fallocate(self.descriptor, first * _GROWN_BY_BYTES, (last - first) * _GROWN_BY_BYTES)
        if last > len(self._is_reserved):
            self._mapping, self._memory = _map(self.descriptor, last * _GROWN_BY_BYTES, is_writable=True)
            self._is_reserved.extend(bytes(last - len(self._is_reserved)))
        self._is_reserved[first:last] = b"\1" * (last - first)

    def drop_free(self) -> None:
        """Gives back to the system what holds neither the message being written nor the one posted last.

        What an earlier plan sent, and features when a graph was opened, may be many times what epochs send now.
        """
        for unit, is_reserved in enumerate(self._is_reserved):
            begin, end = unit * _GROWN_BY_BYTES, (unit + 1) * _GROWN_BY_BYTES
            if is_reserved and not any(first < end and begin < last for first, last in (self._placed, self._posted)):
                try:
                    self._mapping.madvise(mmap.MADV_REMOVE, begin, _GROWN_BY_BYTES)
                except OSError:  # A sandbox may forbid it: then it stays.
                    return
                self._is_reserved[unit] = 0

    def holds(self, tensor: Tensor) -> bool:
        """Says whether a contiguous tensor lies where the last `place` put it."""
        if tensor.nbytes == 0 or tensor.device.type != "cpu":
            return False
        start, end = self._placed
        return tensor.data_ptr() == self._memory.data_ptr() + start and tensor.nbytes <= end - start

    def post(self) -> None:
        """Says that the message is on its way, and that everybody has read the one before the last."""
        self._posted = self._placed


class PeerSegment:
    """Another process's `Outbox`, as it is mapped here.

    Args:
        descriptor: As it was received; owned from here on.

    Raises:
        OSError: It is not a file that cannot shrink.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError("a peer's memory must be sealed against shrinking")
        self._memory = torch.empty(0, dtype=torch.uint8)

    def read(self, offset: int, num_bytes: int) -> Tensor:
        """Returns a view, (num_bytes,) uint8, of what was written there; not to be written to.

        Raises:
            RuntimeError: The file does not reach so far.
        """
        end = offset + num_bytes
        if end > self._memory.numel():
            size = os.fstat(self.descriptor).st_size
            if end > size:
                raise RuntimeError(f"a message must lie within its sender's memory of {size} bytes (got one to {end})")
            _, self._memory = _map(self.descriptor, size, is_writable=False)
        return self._memory[offset:end]


def _map(descriptor: int, size: int, *, is_writable: bool) -> tuple[mmap.mmap, Tensor]:
    """Maps the first `size` bytes, also as (size,) uint8; unmapped when the last view dies.

    A writer gets all pages at once. A reader gets those that it reads, once: a part of the file is meant for it.
    """
    access, flags = mmap.PROT_READ, mmap.MAP_SHARED
    if is_writable:
        access, flags = access | mmap.PROT_WRITE, flags | mmap.MAP_POPULATE
    mapped = mmap.mmap(descriptor, size, flags=flags, prot=access)
    # Made in inference mode it could not be used outside of it.
    with torch.inference_mode(False), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return mapped, torch.frombuffer(mapped, dtype=torch.uint8)
