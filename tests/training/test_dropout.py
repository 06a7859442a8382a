# SPDX-License-Identifier: Apache-2.0
"""Replicated dropout: one mask per vertex wherever its row is held; independent masks where they should be.

Statistical bounds are on fixed seeds, so a test passes or fails for good; they are 5 sigma wide (one chance in 1.7
million per comparison if the masks were truly random), so a failure means a pattern and not bad luck.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.ids import Ownership
from dgl_hybrid.ops import row_mask
from dgl_hybrid.ops.backend import BackendName, use_backend
from dgl_hybrid.training.dropout import replicated_dropout
from dgl_hybrid.training.edge_keys import EdgeKeys
from dgl_hybrid.training.loss import LossWeight
from dgl_hybrid.training.step import Step

SIGMAS = 5.0


def keep_mask(
    ids: Tensor, columns: int, p: float = 0.5, *, seed: int = 0, step: int = 0, call_index: int = 0
) -> Tensor:
    ones = torch.ones(len(ids), columns)
    return replicated_dropout(ones, p, ids, seed=seed, step=step, call_index=call_index) > 0


# One bit per element, most significant bit of a hex digit first: row ids 0, 1, 2, 1000000007 and 2**62; 32 columns.
KNOWN_MASKS = {
    (0.5, 0, 0, 0): ["93262d24", "c59031be", "923f62da", "5f1f1441", "a9048126"],
    (0.25, 7, 3, 1): ["35ff7df3", "f7ff6eb6", "676777e7", "dd4c76fe", "fe4fffff"],
    (0.9, 2**63 + 5, 10**12, 40): ["01000000", "00002a00", "10480080", "00010100", "10101000"],
}
KNOWN_IDS = torch.tensor([0, 1, 2, 1_000_000_007, 2**62])


def as_hex(mask: Tensor) -> list[str]:
    return [f"{int(''.join('01'[bit] for bit in row), 2):08x}" for row in mask.int().tolist()]


@pytest.mark.parametrize("case", KNOWN_MASKS)
def test_masks_never_change(case: tuple[float, int, int, int]) -> None:
    """Loss curves of released versions depend on these bits; changing them changes results."""
    p, seed, step, call_index = case
    mask = keep_mask(KNOWN_IDS, 32, p, seed=seed, step=step, call_index=call_index)
    assert as_hex(mask) == KNOWN_MASKS[case]


def element_word(row_id: int, column: int, seed: int, step: int, call_index: int) -> int:
    """The algorithm of the module's note once more, on Python integers and without tensors."""
    m64, m32, gamma = 2**64 - 1, 2**32 - 1, 0x9E3779B97F4A7C15

    def finalise(z: int) -> int:
        z &= m64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & m64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & m64
        return z ^ (z >> 31)

    def mix(value: int, key0: int, key1: int) -> int:
        return finalise(finalise(value * gamma + key0) ^ key1)

    state = 0
    for value in (seed, step, call_index):
        state = finalise(((state + gamma) & m64) ^ finalise(value + gamma))
    row = mix(row_id, finalise(state + gamma), finalise(state + 2 * gamma))
    word = (row + mix(column, 0x243F6A8885A308D3, 0x13198A2E03707344)) & m32
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & m32
    word = ((word ^ (word >> 15)) * 0x846CA68B) & m32
    word ^= row >> 32
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & m32
    return word - 2**32 if word >= 2**31 else word


@pytest.mark.parametrize("p", [0.1, 0.5, 0.75])
def test_tensors_follow_the_integer_algorithm(p: float) -> None:
    ids = torch.tensor([0, 1, 17, 2**31 - 1, 2**31, 2**40 + 3, 2**63 - 1])
    expected = [[element_word(i, c, 11, 22, 33) >= p * 2**32 - 2**31 for c in range(70)] for i in ids.tolist()]
    assert keep_mask(ids, 70, p, seed=11, step=22, call_index=33).tolist() == expected


def test_row_order_and_replication_do_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 2**62, (500,), generator=generator)
    held = torch.randint(0, 500, (2000,), generator=generator)  # any order, most rows several times
    assert torch.equal(keep_mask(ids[held], 33), keep_mask(ids, 33)[held])


@pytest.mark.parametrize("chunk_elements", [1, 64, 1000])
def test_chunking_does_not_matter(monkeypatch: pytest.MonkeyPatch, chunk_elements: int) -> None:
    ids = torch.arange(101)
    whole = keep_mask(ids, 7)
    monkeypatch.setattr(row_mask, "_CHUNK_ELEMENTS_PER_THREAD", chunk_elements)
    with use_backend("naive"):
        assert torch.equal(keep_mask(ids, 7), whole)


def test_columns_do_not_depend_on_the_width() -> None:
    """A flattened (n, heads, width) tensor and an (n, heads * width) tensor draw one mask."""
    ids = torch.arange(50)
    wide = keep_mask(ids, 24)
    assert torch.equal(keep_mask(ids, 10), wide[:, :10])
    shaped = replicated_dropout(torch.ones(50, 4, 6), 0.5, ids, seed=0, step=0, call_index=0) > 0
    assert torch.equal(shaped.reshape(50, 24), wide)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.3, 0.5, 0.8, 0.999])
@pytest.mark.parametrize("stride", [1, 2**20, 0x9E3779B9])
def test_keep_rate_overall_and_per_column_and_row(p: float, stride: int) -> None:
    rows, columns = 4000, 64
    mask = keep_mask(torch.arange(rows) * stride, columns, p, seed=5).double()
    for sums, count in ((mask.sum(), rows * columns), (mask.sum(0), rows), (mask.sum(1), columns)):
        if count * min(p, 1 - p) < 10:  # too few for the normal bound to hold
            continue
        excess = (sums - count * (1 - p)).abs().max() / (count * p * (1 - p)) ** 0.5
        assert excess < SIGMAS


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("what", ["ids", "ids 64", "columns", "columns 8", "steps", "calls", "seeds", "swapped"])
def test_neighbours_are_independent(what: str, p: float) -> None:
    """Chi-square of the 2 x 2 table (this element kept, its neighbour kept); rate known: 3 degrees of freedom."""
    ids, columns = torch.arange(20_000), 64
    base = keep_mask(ids, columns, p, seed=1, step=2, call_index=3)
    other = {
        "ids": lambda: keep_mask(ids + 1, columns, p, seed=1, step=2, call_index=3),
        "ids 64": lambda: keep_mask(ids + 64, columns, p, seed=1, step=2, call_index=3),
        "columns": lambda: base.roll(1, 1),
        "columns 8": lambda: base.roll(8, 1),
        "steps": lambda: keep_mask(ids, columns, p, seed=1, step=3, call_index=3),
        "calls": lambda: keep_mask(ids, columns, p, seed=1, step=2, call_index=4),
        "seeds": lambda: keep_mask(ids, columns, p, seed=2, step=2, call_index=3),
        "swapped": lambda: keep_mask(ids, columns, p, seed=2, step=1, call_index=3),
    }[what]()
    counts = torch.bincount((base.long() * 2 + other.long()).flatten(), minlength=4).double()
    rates = torch.tensor([p * p, p * (1 - p), p * (1 - p), (1 - p) ** 2], dtype=torch.float64)
    chi_square = float(((counts - counts.sum() * rates) ** 2 / (counts.sum() * rates)).sum())
    assert chi_square < 31.8  # 5 sigma: one in 1.7 million for 3 degrees of freedom


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_no_pattern_over_two_rows_and_two_columns(shift: int) -> None:
    """The parity of four corners: what is wrong with hashes that mix a row's word and a column's word only linearly."""
    sign = keep_mask(torch.arange(20_000), 64).double() * 2 - 1
    corners = sign * sign.roll(shift, 0) * sign.roll(shift, 1) * sign.roll((shift, shift), (0, 1))
    assert abs(float(corners.sum())) < SIGMAS * corners.numel() ** 0.5


def test_masks_of_rows_and_columns_are_all_distinct() -> None:
    mask = keep_mask(torch.arange(100_000), 64)
    words = (mask.long() << torch.arange(64)).sum(1)
    assert len(set(words.tolist())) == 100_000  # a 32-bit row key would make about one pair equal
    assert len({tuple(column) for column in mask[:200].T.tolist()}) == 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_values_are_scaled_or_zero(dtype: torch.dtype, p: float) -> None:
    x = torch.randn(60, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = x.clone()
    y = replicated_dropout(x, p, torch.arange(60), seed=0, step=0, call_index=0)
    keep = keep_mask(torch.arange(60), 10, p)
    expected = torch.zeros_like(x) if p == 1.0 else torch.where(keep, x * (1 / (1 - p)), torch.zeros_like(x))
    assert y.dtype == dtype
    assert y.shape == x.shape
    assert torch.equal(y, expected)
    assert torch.equal(x, before)


def test_it_is_dropout_in_the_mean() -> None:
    """Averaged over many steps the result is the input, as with torch's own dropout."""
    x, ids = torch.randn(20, 8, dtype=torch.float64), torch.arange(20)
    runs = torch.stack([replicated_dropout(x, 0.4, ids, seed=0, step=s, call_index=0) for s in range(2000)])
    deviation = (runs.mean(0) - x).abs() / (x.abs() * (0.4 / 0.6 / 2000) ** 0.5)
    assert deviation.max() < SIGMAS


@pytest.mark.parametrize("p", [0.0, 1.0])
@pytest.mark.parametrize("training", [True, False])
def test_extreme_rates_and_evaluation_agree_with_torch(p: float, training: bool) -> None:
    x = torch.randn(9, 4, requires_grad=True)
    y = replicated_dropout(x, p, torch.arange(9), seed=0, step=0, call_index=0, training=training)
    expected = F.dropout(x, p, training=training)
    assert torch.equal(y, expected)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx, torch.autograd.grad(expected.sum(), x)[0])


@pytest.mark.parametrize("shape", [(7,), (7, 3), (7, 2, 3)])
def test_gradients_to_the_second_order(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([5, 3, 5, 0, 2**40, 9, 1])

    def fn(x: Tensor) -> Tensor:
        return replicated_dropout(x, 0.4, ids, seed=3, step=1, call_index=2) ** 2

    assert torch.autograd.gradcheck(fn, (x,))
    assert torch.autograd.gradgradcheck(fn, (x,))


def test_the_backward_uses_the_mask_of_the_forward() -> None:
    x = torch.rand(3000, 50).add_(1.0).requires_grad_()  # never 0, as one normal number in some ten million is
    ids = torch.randperm(3000)
    y = replicated_dropout(x, 0.5, ids, seed=0, step=9, call_index=1)
    upstream = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, upstream)
    assert torch.equal(dx, upstream * (y != 0) * 2)


def test_strided_rows_and_strided_gradients() -> None:
    x = torch.randn(6, 40, dtype=torch.float64).T.requires_grad_()
    ids = torch.arange(40)
    y = replicated_dropout(x, 0.5, ids, seed=0, step=0, call_index=0)
    assert torch.equal(y, x * keep_mask(ids, 6) * 2)
    (dx,) = torch.autograd.grad(y.sum(), x)  # the gradient of a sum is an expanded tensor
    assert torch.equal(dx, keep_mask(ids, 6) * 2.0)


@pytest.mark.parametrize("shape", [(0, 5), (0,), (4, 0)])
def test_empty_rows(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, requires_grad=True)
    y = replicated_dropout(x, 0.5, torch.arange(shape[0]), seed=0, step=0, call_index=0)
    assert y.shape == shape
    assert y.requires_grad


def test_mistakes_are_named() -> None:
    x, ids = torch.zeros(3, 2), torch.arange(3)
    with pytest.raises(ValueError, match=r"dropout probability must be 0 to 1 \(got 1.5\)"):
        replicated_dropout(x, 1.5, ids, seed=0, step=0, call_index=0)
    with pytest.raises(ValueError, match=r"dropout probability must be 0 to 1 \(got nan\)"):
        replicated_dropout(x, float("nan"), ids, seed=0, step=0, call_index=0)
    with pytest.raises(TypeError, match=r"floating rows \(got torch.int64\)"):
        replicated_dropout(x.long(), 0.5, ids, seed=0, step=0, call_index=0)
    with pytest.raises(TypeError, match=r"int64 global ids \(got torch.int32\)"):
        replicated_dropout(x, 0.5, ids.int(), seed=0, step=0, call_index=0)
    with pytest.raises(ValueError, match=r"one key per row: x \(3, 2\), keys \(2,\)"):
        replicated_dropout(x, 0.5, ids[:2], seed=0, step=0, call_index=0)


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (300, 128), (65, 70), (40, 601), (9, 1100), (5, 2, 3), (6,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_kernels_drop_what_the_reference_drops_to_the_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(*shape, generator=generator).to(dtype)
    x.view(-1)[0] = float("-inf")
    ids = torch.randint(0, 2**62, shape[:1], generator=generator)
    found = []
    for backend in ("naive", "cpu"):
        with use_backend(backend):
            y = x.clone().requires_grad_()
            out = replicated_dropout(y, 0.3, ids, seed=2, step=5, call_index=1)
            (dx,) = torch.autograd.grad(out, y, x)
            found.append((out.detach(), dx))
    for reference, kernel in zip(*found, strict=True):
        assert torch.equal(reference.isnan(), kernel.isnan())
        assert torch.equal(reference.nan_to_num(7.0), kernel.nan_to_num(7.0))
        assert torch.equal(reference.signbit(), kernel.signbit())
    assert torch.equal(found[1][0].isnan(), found[1][1].isnan()), "the gradient is dropped as the rows are"


@pytest.mark.parametrize("backend", ["naive", "cpu"])
def test_strided_rows(backend: BackendName) -> None:
    rows = torch.arange(1.0, 61.0).view(6, 10)
    ids = torch.arange(20)[::2]
    with use_backend(backend):
        out = replicated_dropout(rows.t(), 0.5, ids, seed=0, step=0, call_index=0)
        assert torch.equal(
            out, replicated_dropout(rows.t().contiguous(), 0.5, ids.clone(), seed=0, step=0, call_index=0)
        )


def test_keys_are_where_the_rows_are() -> None:
    """A script may move the blocks and rows of a loader on the CPU itself: its first dropout of rows raised."""
    communicator, ids = Communicator(None), torch.tensor([7, 3, 9])
    step = Step(
        communicator=communicator,
        level_sizes=(3, 2),
        owned=torch.ones(3, dtype=torch.bool),
        blocks=[],
        node_keys=ids,
        edge_keys=EdgeKeys(communicator, Ownership(offsets=torch.tensor([0, 4]), rank=0), (), None),
        is_first_draw=True,
        loss_weight=LossWeight(1.0, is_one=True),
        seed=0,
        num_vertices=3,
        number=0,
    )
    assert torch.equal(step.keys_of(torch.ones(2, 5), "dropout"), ids[:2])
    first = step.keys_of(torch.ones(2, 5, device="meta"), "dropout")
    assert first.shape == (2,)
    assert first.device.type == "meta"
    assert step.keys_of(torch.ones(3, 5, device="meta"), "dropout")._base is first._base, "moved once"
