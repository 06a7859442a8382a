# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other in a gather: one message of one size from each, which says what it is.

A collective of PyTorch trusts that all ranks make the same call. Where they do not (an `if rank == 0: evaluate()`),
gloo takes eight bytes for fifty-six and leaves the others as they were, or ends the process. So whatever is gathered
begins with words of one number, by which every rank sees that another one is in another place.

    | kind | bytes | name (48 bytes) | the bytes, if they fit into 960 |
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

Kind = Literal["integers", "numbers", "a message"]
Words = npt.NDArray[np.int64]

_KINDS: tuple[Kind, ...] = ("integers", "numbers", "a message")
_NUMBERS = ("integers", "numbers")
"""Lists of eight bytes each, as long on all ranks."""
_NAME, _DATA = slice(2, 8), slice(8, 128)
NUM_WORDS = _DATA.stop
MOST_BYTES = 8 * (_DATA.stop - _DATA.start)
"""What is longer is gathered apart."""


def pack(kind: Kind, what: str, data: bytes) -> Words:
    """Returns (NUM_WORDS,) what a rank begins with.

    Args:
        kind: Of the data.
        what: Where the rank is; of a longer text the beginning. Empty: it is not told.
        data: All of it, though only short data fits in.
    """
    words = np.zeros(NUM_WORDS, dtype=np.int64)
    words[0], words[1] = _KINDS.index(kind), len(data)
    _write(words[_NAME], what.encode()[: 8 * (_NAME.stop - _NAME.start)])
    if len(data) <= MOST_BYTES:
        _write(words[_DATA], data)
    return words


def sizes_of(table: Words) -> list[int]:
    """Returns how many bytes each rank has, of the (P, NUM_WORDS) that all have begun with."""
    return [int(size) for size in table[:, 1]]


def data_of(table: Words) -> list[bytes]:
    """Returns the bytes of each rank, which are no more than `MOST_BYTES`."""
    return [row[_DATA].tobytes()[:size] for row, size in zip(table, sizes_of(table), strict=True)]


def find_difference(table: Words) -> str | None:
    """Returns in which places ranks are, if these are not the same; None if they are. Alike on every rank."""
    if (table[:, : _DATA.start] == table[0, : _DATA.start]).all():
        return None  # as nearly always
    calls = [_call_of(row) for row in table]
    other = next((rank for rank, call in enumerate(calls) if call != calls[0]), None)
    if other is None:
        return None
    here, there = calls[0], calls[other]
    is_told = here[0] != there[0]
    return f"rank 0 of {len(calls)} {_describe(*here, is_told)}, rank {other} {_describe(*there, is_told)}"


def _call_of(words: Words) -> tuple[str, str]:
    """Returns the name and what is gathered."""
    number, size = int(words[0]), int(words[1])
    name = words[_NAME].tobytes().rstrip(b"\0").decode(errors="ignore")
    kind: str = _KINDS[number] if 0 <= number < len(_KINDS) else f"something unknown here ({number})"
    return name, f"{size // 8} {kind}" if kind in _NUMBERS else kind


def _describe(name: str, gathered: str, is_told: bool) -> str:
    return f"is in {name}" if name and is_told else f"gathers {gathered}{f' in {name}' if name else ''}"


def _write(words: Words, data: bytes) -> None:
    words.view(np.uint8)[: len(data)] = np.frombuffer(data, dtype=np.uint8)
