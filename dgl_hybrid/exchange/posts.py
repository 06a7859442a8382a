# SPDX-License-Identifier: Apache-2.0
"""What ranks of one host tell each other through their sockets: what lies where in the sender's memory, and what for.

| doing | is_backward | has_more | layer | call | row_bytes | num_rows | offset | num_bytes | dtype | what |
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

LONGEST_MESSAGE = 4096
_LONGEST_WHAT = 48
LEAVING = 255
"""The first byte of a message that says why its sender takes part in nothing any more; the others are posts."""

_POST = struct.Struct(f"<BBBxiQQQQQ16s{_LONGEST_WHAT}s")


class Doing(IntEnum):
    """What a post belongs to."""

    EXCHANGE = 0
    GATHER = 1
    SUM = 2


@dataclass(frozen=True, slots=True)
class Post:
    """What one rank tells another one in a round."""

    call: int
    """Operations of the transport, from 1."""
    row_bytes: int
    dtype: str
    num_rows: int
    """For the receiver, in all rounds of the call."""
    offset: int
    num_bytes: int
    """In this round, and where in the sender's memory."""
    doing: Doing = Doing.EXCHANGE
    layer: int = 0
    is_backward: bool = False
    has_more: bool = False
    """The sender has further rounds to come, for whomever."""
    what: str = ""
    """Where the sender is: of what is no exchange, and of a longer text the beginning."""

    def pack(self) -> bytes:
        """Returns it as a message."""
        return _POST.pack(
            self.doing,
            self.is_backward,
            self.has_more,
            self.layer,
            self.call,
            self.row_bytes,
            self.num_rows,
            self.offset,
            self.num_bytes,
            self.dtype.encode(),
            self.what.encode(),
        )

    @staticmethod
    def unpack(message: bytes) -> Post:
        """Returns what was packed.

        Raises:
            ValueError: It is no such message.
        """
        if len(message) != _POST.size or message[0] not in set(Doing):
            raise ValueError(f"expected a post of {_POST.size} bytes (got {len(message)} bytes of another kind)")
        (doing, is_backward, has_more, layer, call, row_bytes, num_rows, offset, num_bytes, dtype, what) = _POST.unpack(
            message
        )
        return Post(
            doing=Doing(doing),
            call=call,
            layer=layer,
            is_backward=bool(is_backward),
            row_bytes=row_bytes,
            dtype=dtype.rstrip(b"\0").decode(errors="replace"),
            num_rows=num_rows,
            offset=offset,
            num_bytes=num_bytes,
            has_more=bool(has_more),
            what=what.rstrip(b"\0").decode(errors="ignore"),
        )

    @property
    def kind(self) -> tuple[int, int, bool, int, str, int, str]:
        """What is alike on all ranks that are in the same place."""
        num_summed, what = (self.num_rows, self.what) if self.doing is Doing.SUM else (0, "")
        as_sent = what.encode()[:_LONGEST_WHAT].decode(errors="ignore")
        return self.doing, self.layer, self.is_backward, self.row_bytes, self.dtype, num_summed, as_sent

    def describe(self) -> str:
        """Returns what its sender does, after "rank 1"."""
        if self.doing is Doing.EXCHANGE:
            way = "backward" if self.is_backward else "forward"
            return f"exchanges {self.dtype} rows of {self.row_bytes} bytes for layer {self.layer} in {way}"
        values = f"{self.num_rows} {self.dtype} values" if self.doing is Doing.SUM else f"{self.row_bytes} bytes"
        return f"{'sums' if self.doing is Doing.SUM else 'gathers'} {values}{f' ({self.what})' if self.what else ''}"
