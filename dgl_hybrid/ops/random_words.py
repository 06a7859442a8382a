# SPDX-License-Identifier: Apache-2.0
"""Random words as a function of (seed, step, call, id, column): the source of every dropout mask.

No generator state is involved, so the order of rows, the number of ranks and the split into tasks cannot change a
mask, and a backward draws it again instead of storing it. `training/dropout.py` uses it for rows of vertices, the
fused attention ops for (edge, head); the compiled kernels contain the same function.

[Note: the mask function]
Counter-based generators are from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); we take
cheaper mixers than theirs, as dropout needs no cryptographic strength:

1. per call, two 64-bit keys from (seed, step, call index) by the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast
   splittable pseudorandom number generators", OOPSLA 2014; constants of its variant 13 by Stafford);
2. per row, a 64-bit word from the id and the keys by two rounds of it, split into 32-bit halves `a` (low), `b` (high);
3. per element, `a + c[column]` is mixed by the 32-bit permutation "lowbias32" (Wellons, "Prospecting for hash
   functions", 2018), `b` is xored in, and half a round more follows. `b` makes it a function of all 64 bits: with `a`
   alone, about one pair of 100,000 rows would share its mask;
4. the element is kept if the word, as a signed number, is at least `p * 2**32 - 2**31`.

Most time goes into step 3, so it uses int32, where a vector instruction holds twice as many lanes. PyTorch shifts
right arithmetically; a mask after the shift makes it logical.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_M64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_COLUMN_KEYS = (0x243F6A8885A308D3, 0x13198A2E03707344)  # digits of pi: any constants would do


def call_keys(seed: int, step: int, call_index: int) -> tuple[int, int]:
    """Step 1 of the note: two unsigned 64-bit keys from any Python integers, taken modulo 2**64."""
    state = 0
    for value in (seed, step, call_index):
        state = _splitmix64_int((state + _GAMMA) & _M64 ^ _splitmix64_int(value + _GAMMA))
    return _splitmix64_int(state + _GAMMA), _splitmix64_int(state + 2 * _GAMMA)


def row_words(ids: Tensor, keys: tuple[int, int]) -> Tensor:
    """Step 2 of the note: (n,) int64 ids to (n, 2) int32, the halves `a` and `b` of each row's word."""
    return _mix_ids(ids, keys).view(torch.int32).view(len(ids), 2)


@functools.lru_cache(64)
def column_words(num_columns: int, device: torch.device) -> Tensor:
    """The words `c` of step 3, (num_columns,) int32: the same in every call, and shared by all."""
    with torch.inference_mode(False):
        words = _mix_ids(torch.arange(num_columns, device=device), _COLUMN_KEYS)
        found = words.view(torch.int32)[::2].contiguous()
        if device.type == "cuda":  # the next one who reads them may do so on another stream
            torch.cuda.current_stream(device).synchronize()
        return found


def element_words(rows: Tensor, columns: Tensor, *, out: Tensor, scratch: Tensor) -> None:
    """Step 3 of the note: (n, 2) and (F,) int32 to (n, F) int32, uniform, in `out`; `scratch` has the same shape."""
    torch.add(rows[:, :1], columns, out=out)
    _xor_shift_multiply(out, 16, 0x7FEB352D, scratch)
    _xor_shift_multiply(out, 15, 0x846CA68B, scratch)
    out.bitwise_xor_(rows[:, 1:])
    _xor_shift_multiply(out, 16, 0x7FEB352D, scratch)  # the last shift of a full round would touch low bits only


def keep_threshold(p: float) -> int:
    """Step 4 of the note: the least word, as a signed 32-bit number, that keeps its element; `p` from 0 to below 1."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31


def signed(word: int, bits: int) -> int:
    """The signed integer with the same bits; PyTorch's scalars are signed."""
    word &= (1 << bits) - 1
    return word - (1 << bits) if word >> (bits - 1) else word


def _xor_shift_multiply(words: Tensor, shift: int, factor: int, scratch: Tensor) -> None:
    torch.bitwise_right_shift(words, shift, out=scratch)
    scratch.bitwise_and_((1 << (32 - shift)) - 1)
    words.bitwise_xor_(scratch).mul_(signed(factor, 32))


def _mix_ids(ids: Tensor, keys: tuple[int, int]) -> Tensor:
    """(n,) int64 to (n,) int64, uniform in 64 bits."""
    words = (ids * signed(_GAMMA, 64)).add_(signed(keys[0], 64))
    return _splitmix64(_splitmix64(words).bitwise_xor_(signed(keys[1], 64)))


def _splitmix64(words: Tensor) -> Tensor:
    """The finaliser of SplitMix64, in place on (n,) int64."""
    words.bitwise_xor_(words.bitwise_right_shift(30).bitwise_and_((1 << 34) - 1)).mul_(signed(0xBF58476D1CE4E5B9, 64))
    words.bitwise_xor_(words.bitwise_right_shift(27).bitwise_and_((1 << 37) - 1)).mul_(signed(0x94D049BB133111EB, 64))
    return words.bitwise_xor_(words.bitwise_right_shift(31).bitwise_and_((1 << 33) - 1))


def _splitmix64_int(word: int) -> int:
    word &= _M64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _M64
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _M64
    return word ^ word >> 31
