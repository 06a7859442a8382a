# SPDX-License-Identifier: Apache-2.0
"""The host itself: what it must refuse, and that its schedules differ."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.simt.build import HostKernels, SimtError, load_kernels, needs_compiler

pytestmark = needs_compiler

SOURCE = """
#include "simt_host.h"
#define KERNEL(name) extern "C" void name
KERNEL(rotate)(int* out) { out[threadIdx.x] = __shfl_sync(0xffffffffu, (int)threadIdx.x * 10, threadIdx.x + 1); }
EXPORT_KERNEL(rotate)
KERNEL(rotate_in_fours)(long long* out) {
  out[threadIdx.x] = __shfl_sync(0xffffffffu, (long long)threadIdx.x << 40, threadIdx.x + 1, 4);
}
EXPORT_KERNEL(rotate_in_fours)
KERNEL(divergent)(int* out) { if (threadIdx.x % 2) __syncwarp(); out[threadIdx.x] = 1; }
EXPORT_KERNEL(divergent)
KERNEL(divergent_masks)(int* out) {
  if (threadIdx.x < 16) __syncwarp(0xffffu); else __syncwarp(0xffffffffu);
  out[threadIdx.x] = 1;
}
EXPORT_KERNEL(divergent_masks)
KERNEL(outside_own_mask)(int* out) { __syncwarp(2u << threadIdx.x); out[threadIdx.x] = 1; }
EXPORT_KERNEL(outside_own_mask)
KERNEL(reads_outside_mask)(int* out) {
  const unsigned mask = threadIdx.x < 16 ? 0xffffu : 0xffff0000u;
  out[threadIdx.x] = __shfl_sync(mask, (int)threadIdx.x, 3);
}
EXPORT_KERNEL(reads_outside_mask)
KERNEL(different_operations)(int* out) {
  if (threadIdx.x < 5) __syncwarp(); else out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1);
}
EXPORT_KERNEL(different_operations)
KERNEL(order)(int* clock, int* out) { out[blockIdx.x * blockDim.x + threadIdx.x] = (*clock)++; }
EXPORT_KERNEL(order)
KERNEL(many)(int i, long long l, unsigned long long u, float f, double* out) {
  out[0] = i, out[1] = l, out[2] = u, out[3] = f;
}
EXPORT_KERNEL(many)
KERNEL(halves)(const unsigned short* bits, float* values, unsigned short* back) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  values[i] = simt::half_to_float(bits[i]);
  back[i] = simt::float_to_half(values[i]);
}
EXPORT_KERNEL(halves)
KERNEL(round_halves)(const float* values, unsigned short* bits) {
  bits[blockIdx.x * 128 + threadIdx.x] = simt::float_to_half(values[blockIdx.x * 128 + threadIdx.x]);
}
EXPORT_KERNEL(round_halves)
"""


@pytest.fixture(scope="module", params=["assembly", "ucontext"])
def host(request: pytest.FixtureRequest) -> HostKernels:
    return load_kernels([], source=SOURCE, flags=["-DSIMT_UCONTEXT"] if request.param == "ucontext" else [])


def test_shuffles_move_values(host: HostKernels) -> None:
    out = torch.zeros(64, dtype=torch.int32)
    host.launch("rotate", (1,), (64,), [out], seed=5)
    lanes = torch.arange(64)
    assert torch.equal(out.long(), (lanes // 32 * 32 + (lanes + 1) % 32) * 10)
    wide = torch.zeros(32, dtype=torch.int64)
    host.launch("rotate_in_fours", (1,), (32,), [wide])
    assert torch.equal(wide, (lanes[:32] // 4 * 4 + (lanes[:32] + 1) % 4) << 40)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("divergent", "lane that has exited|deadlock"),
        ("divergent_masks", "lane that has exited|deadlock"),
        ("outside_own_mask", "not in its own mask"),
        ("reads_outside_mask", "reads a lane outside its mask"),
        ("different_operations", "different operations"),
    ],
)
def test_faults_end_the_launch(host: HostKernels, kernel: str, message: str) -> None:
    out = torch.zeros(32, dtype=torch.int32)
    for seed in range(5):
        with pytest.raises(SimtError, match=message):
            host.launch(kernel, (1,), (32,), [out], seed=seed)
    host.launch("rotate", (1,), (32,), [out])  # and the host works on
    assert int(out[0]) == 10


def test_threads_and_blocks_run_in_random_order(host: HostKernels) -> None:
    def order(seed: int) -> Tensor:
        clock, out = torch.zeros(1, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
        host.launch("order", (8,), (32,), [clock, out], seed=seed)
        assert torch.equal(out.sort().values, torch.arange(256, dtype=torch.int32))
        return out.view(8, 32)

    first = order(1)
    assert torch.equal(first, order(1))
    assert not torch.equal(first, order(2))
    assert bool((first.diff(dim=1) < 0).any())  # threads
    assert bool((first[:, 0].diff() < 0).any())  # blocks


def test_arguments_are_checked_against_the_signature(host: HostKernels) -> None:
    out = torch.zeros(4, dtype=torch.float64)
    assert host.signature("many") == "ilufp"
    host.launch("many", (1,), (1,), [-7, -(2**40), 2**63, 0.5, out])
    assert out.tolist() == [-7, -(2**40), 2**63, 0.5]
    with pytest.raises(TypeError, match="takes 5 arguments"):
        host.launch("many", (1,), (1,), [1, 2, 3, 0.5])
    with pytest.raises(TypeError, match="argument 0 must be a number"):
        host.launch("many", (1,), (1,), [0.5, 2, 3, 0.5, out])
    with pytest.raises(TypeError, match="argument 0 does not fit"):
        host.launch("many", (1,), (1,), [2**31, 2, 3, 0.5, out])
    with pytest.raises(TypeError, match="argument 4 must be a tensor"):
        host.launch("many", (1,), (1,), [1, 2, 3, 0.5, 6])
    with pytest.raises(KeyError, match="absent"):
        host.launch("absent", (1,), (1,), [])


def test_half_conversions_are_the_devices(host: HostKernels) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    values, back = torch.zeros(1 << 16), torch.zeros(1 << 16, dtype=torch.int16)
    host.launch("halves", (512,), (128,), [bits, values, back])
    expected = bits.view(torch.float16).float()
    assert torch.equal(values.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(values[number].view(torch.int32), expected[number].view(torch.int32))
    assert torch.equal(back[number], bits[number])
    assert bool(back[~number].view(torch.float16).isnan().all())

    generator = torch.Generator().manual_seed(0)
    exact = torch.arange(0, 1 << 15).to(torch.int16).view(torch.float16).float()
    exact = exact[exact.isfinite()]
    between = (exact[1:] + exact[:-1]) / 2  # ties, and their neighbours
    samples = torch.cat([between, between.nextafter(torch.tensor(0.0)), between.nextafter(torch.tensor(torch.inf))])
    samples = torch.cat([samples, torch.randn(4096, generator=generator) * 1e5, torch.tensor([65519.9, 65520.0, 1e-9])])
    samples = torch.nn.functional.pad(torch.cat([samples, -samples]), (0, -2 * len(samples) % 128))
    rounded = torch.zeros(len(samples), dtype=torch.int16)
    host.launch("round_halves", (len(samples) // 128,), (128,), [samples, rounded])
    assert torch.equal(rounded, samples.half().view(torch.int16))


def test_compile_errors_are_told() -> None:
    with pytest.raises(RuntimeError, match="INDEX_BITS and GROUP must be given"):
        load_kernels(["-DKERNELS=KERNELS_GAT", "-DDTYPE=DTYPE_F32"])
