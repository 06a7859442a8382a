# SPDX-License-Identifier: Apache-2.0
"""Dropout whose mask belongs to the vertex, not to the process: a master and its replicas drop the same elements.

An element is kept or dropped by a counter-based function of (seed, step, call index, global id of the row, column).
No generator state is involved, so row order, number of ranks and chunking cannot change a mask, and the backward
draws the mask again instead of storing it, which costs less than writing and reading one (measured on CPU).

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

Most time goes into step 3, so it uses int32, where a vector instruction holds twice as many lanes, and works on chunks
of rows whose buffers stay in cache. PyTorch shifts right arithmetically; a mask after the shift makes it logical.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_M64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_COLUMN_KEYS = (0x243F6A8885A308D3, 0x13198A2E03707344)  # digits of pi: any constants would do

_CHUNK_ELEMENTS_PER_THREAD = 1 << 19
"""On CPU: two int32 buffers and one of the rows' dtype, 6 MiB per thread for float32. A quarter takes 20 % longer. Each
operation on a chunk ends in a barrier of the threads, which is dear when they are more than the cores: not smaller."""

_CHUNK_ELEMENTS_CUDA = 1 << 25
"""On CUDA: bounds the temporaries to 384 MiB without making the kernels small."""


def replicated_dropout(
    x: Tensor, p: float, keys_global: Tensor, *, seed: int, step: int, call_index: int, training: bool = True
) -> Tensor:
    """Zeroes elements of `x` with probability `p` and scales the others by `1/(1-p)`; the mask depends on ids alone.

    Not collective. Differentiable any number of times; `x` is not modified. With `training=False` or `p=0` it is `x`.

    Args:
        x: (n, ...) floating: one row per vertex (or per edge, for attention dropout), in any order, repeats allowed.
        p: Probability of dropping, 0 to 1.
        keys_global: (n,) int64, on the device of `x`: global id of each row's vertex (or edge).
        seed: The run's seed; the same on every rank.
        step: Counts the optimizer steps; the same on every rank.
        call_index: Counts the dropout calls within one forward, so that layers draw different masks.
    Returns:
        Shape, dtype and device of `x`.
    Raises:
        ValueError: `p` outside 0..1, or not one key per row.
        TypeError: `x` not floating or `keys_global` not int64.
    """
    if not 0.0 <= p <= 1.0:  # also catches NaN
        raise ValueError(f"dropout probability must be 0 to 1 (got {p})")
    if not x.is_floating_point():
        raise TypeError(f"dropout takes floating rows (got {x.dtype})")
    if keys_global.dtype != torch.int64:
        raise TypeError(f"dropout keys must be int64 global ids (got {keys_global.dtype})")
    if x.dim() == 0 or keys_global.shape != x.shape[:1]:
        raise ValueError(f"dropout needs one key per row: x {tuple(x.shape)}, keys {tuple(keys_global.shape)}")
    if not training or p == 0.0 or x.numel() == 0:
        return x
    out: Tensor = _ReplicatedDropout.apply(x, p, keys_global, _call_keys(seed, step, call_index))
    return out


class _ReplicatedDropout(torch.autograd.Function):
    """Multiplication by a mask: linear and self-adjoint, so its backward is itself with the same keys."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, keys_global: Tensor, call_keys: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(keys_global)
        ctx.p, ctx.call_keys = p, call_keys
        return _apply_mask(x, p, keys_global, call_keys)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (keys_global,) = ctx.saved_tensors
        dx: Tensor = _ReplicatedDropout.apply(grads[0], ctx.p, keys_global, ctx.call_keys)
        return dx, None, None, None


def _apply_mask(x: Tensor, p: float, keys_global: Tensor, call_keys: tuple[int, int]) -> Tensor:
    num_rows = x.shape[0]
    x_NF = x.reshape(num_rows, math.prod(x.shape[1:]))
    if p == 1.0:
        return torch.zeros_like(x)
    num_columns = x_NF.shape[1]
    out_NF = torch.empty_like(x_NF, memory_format=torch.contiguous_format)
    column_words = (
        _mix_ids(torch.arange(num_columns, device=x.device), _COLUMN_KEYS).view(torch.int32)[::2].contiguous()
    )
    threshold = min(round(p * 2**32), 2**32 - 1) - 2**31
    scale = 1.0 / (1.0 - p)

    chunk = _CHUNK_ELEMENTS_CUDA if x.is_cuda else _CHUNK_ELEMENTS_PER_THREAD * torch.get_num_threads()
    chunk_rows = min(num_rows, max(1, chunk // num_columns))
    words = torch.empty(chunk_rows, num_columns, dtype=torch.int32, device=x.device)
    shifted = torch.empty_like(words)
    keep = torch.empty(chunk_rows, num_columns, dtype=x.dtype, device=x.device)
    for begin in range(0, num_rows, chunk_rows):
        end = min(begin + chunk_rows, num_rows)
        rows = end - begin
        row_words = _mix_ids(keys_global[begin:end], call_keys).view(torch.int32).view(rows, 2)
        _element_words(row_words, column_words, out=words[:rows], scratch=shifted[:rows])
        # Written as 0.0 and 1.0 in the rows' dtype: multiplying by a bool tensor takes five times as long on CPU.
        torch.ge(words[:rows], threshold, out=keep[:rows])
        out = out_NF[begin:end]
        torch.mul(x_NF[begin:end], keep[:rows], out=out).mul_(scale)
    return out_NF.view(x.shape)


def _element_words(row_words: Tensor, column_words: Tensor, *, out: Tensor, scratch: Tensor) -> None:
    """Step 3 of the note: (n, 2) and (F,) int32 to (n, F) int32, uniform, in `out`; `scratch` has the same shape."""
    torch.add(row_words[:, :1], column_words, out=out)
    _xor_shift_multiply(out, 16, 0x7FEB352D, scratch)
    _xor_shift_multiply(out, 15, 0x846CA68B, scratch)
    out.bitwise_xor_(row_words[:, 1:])
    _xor_shift_multiply(out, 16, 0x7FEB352D, scratch)  # the last shift of a full round would touch low bits only


def _xor_shift_multiply(words: Tensor, shift: int, factor: int, scratch: Tensor) -> None:
    torch.bitwise_right_shift(words, shift, out=scratch)
    scratch.bitwise_and_((1 << (32 - shift)) - 1)
    words.bitwise_xor_(scratch).mul_(_signed(factor, 32))


def _mix_ids(ids: Tensor, keys: tuple[int, int]) -> Tensor:
    """Step 2 of the note: (n,) int64 to (n,) int64, uniform in 64 bits."""
    words = (ids * _signed(_GAMMA, 64)).add_(_signed(keys[0], 64))
    return _splitmix64(_splitmix64(words).bitwise_xor_(_signed(keys[1], 64)))


def _splitmix64(words: Tensor) -> Tensor:
    """The finaliser of SplitMix64, in place on (n,) int64."""
    words.bitwise_xor_(words.bitwise_right_shift(30).bitwise_and_((1 << 34) - 1)).mul_(_signed(0xBF58476D1CE4E5B9, 64))
    words.bitwise_xor_(words.bitwise_right_shift(27).bitwise_and_((1 << 37) - 1)).mul_(_signed(0x94D049BB133111EB, 64))
    return words.bitwise_xor_(words.bitwise_right_shift(31).bitwise_and_((1 << 33) - 1))


def _call_keys(seed: int, step: int, call_index: int) -> tuple[int, int]:
    """Step 1 of the note; any Python integers, taken modulo 2**64."""
    state = 0
    for value in (seed, step, call_index):
        state = _splitmix64_int((state + _GAMMA) & _M64 ^ _splitmix64_int(value + _GAMMA))
    return _splitmix64_int(state + _GAMMA), _splitmix64_int(state + 2 * _GAMMA)


def _splitmix64_int(word: int) -> int:
    word &= _M64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _M64
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _M64
    return word ^ word >> 31


def _signed(word: int, bits: int) -> int:
    """The signed integer with the same bits; PyTorch's scalars are signed."""
    word &= (1 << bits) - 1
    return word - (1 << bits) if word >> (bits - 1) else word
