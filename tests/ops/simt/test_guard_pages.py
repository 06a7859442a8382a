# SPDX-License-Identifier: Apache-2.0
"""No kernel touches memory outside its buffers, or writes to an operand."""

from __future__ import annotations

import mmap

import pytest
import torch
from torch import Tensor

from tests.ops.simt.build import SOURCE, needs_compiler
from tests.ops.simt.cases import Case, all_cases, default_cases, make_case
from tests.ops.simt.graphs import Rows, cut_rows
from tests.ops.simt.guarded import CRASHED, run_isolated
from tests.ops.simt.launches import Launcher, Options

pytestmark = needs_compiler

DEFAULT = list(default_cases())
FAMILIES = sorted({case.options.kernels for case in DEFAULT})


def of_family(cases: list[Case], family: str) -> list[Case]:
    return [case for case in cases if case.options.kernels == family]


@pytest.mark.parametrize("mode", ["end", "begin"])
def test_one_case_of_each_family_stays_inside(mode: str) -> None:
    assert run_isolated([of_family(DEFAULT, family)[-1] for family in FAMILIES], mode) == 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["end", "begin"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_case_stays_inside(family: str, mode: str) -> None:
    assert run_isolated(of_family(list(all_cases()), family), mode) == 0


READ = "load_features(x + source * columns + column);"
WRITE = "store_features(out + task.row * columns + column, result);"


@pytest.mark.parametrize(
    ("mode", "old", "new"),
    [
        pytest.param("end", READ, "load_features(x + source * columns + column + VEC);", id="read behind"),
        pytest.param("begin", READ, "load_features(x + (source - 1) * columns + column - VEC);", id="read before"),
        pytest.param("end", WRITE, WRITE.replace("out", "(T*)x"), id="write to an operand"),
    ],
)
def test_guards_catch(mode: str, old: str, new: str) -> None:
    source = SOURCE.read_text("utf-8")
    assert old in source
    case = make_case("SPMM", ("REDUCE=REDUCE_SUM", "SOURCE=SOURCE_NODES", "WEIGHT=WEIGHT_NONE"), "half_full")
    assert run_isolated([case], mode, source=source.replace(old, new)) == CRASHED


# ---- Addresses beyond 2**31 elements, in memory of which only the touched pages exist

MAP_NORESERVE = 0x4000  # of Linux; Python names it from 3.13 on
FAR_ROWS, FAR_COLUMNS = 1 << 25, 72
FAR_ENTRIES = torch.tensor([FAR_ROWS - 1, FAR_ROWS - 7, 3, FAR_ROWS // 2 + 1, FAR_ROWS - 1])
FAR_GRAPH = Rows(torch.tensor([0, 3, 5]), FAR_ENTRIES, None)


@pytest.fixture(scope="module")
def far_features() -> Tensor:
    """(2**25, 72) float32: 2.4e9 elements, zero but for a few rows."""
    size = FAR_ROWS * FAR_COLUMNS * 4
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    features = torch.frombuffer(memory, dtype=torch.float32).view(FAR_ROWS, 1, FAR_COLUMNS)
    generator = torch.Generator().manual_seed(0)
    features[FAR_ENTRIES] = torch.randn(len(FAR_ENTRIES), 1, FAR_COLUMNS, generator=generator)
    return features


@pytest.mark.parametrize("vec", [1, 4])
def test_addresses_are_64_bits_wide(vec: int, far_features: Tensor) -> None:
    tasks = cut_rows(FAR_GRAPH, None)
    rows = far_features[FAR_ENTRIES]  # by entry
    options = Options("SPMM", vec=vec, extra=("REDUCE=REDUCE_SUM", "SOURCE=SOURCE_NODES", "WEIGHT=WEIGHT_NONE"))
    out, _ = Launcher(options).spmm(FAR_GRAPH, tasks, far_features, None, 1, FAR_COLUMNS)
    torch.testing.assert_close(out, torch.stack([rows[:3].sum(0), rows[3:].sum(0)]))

    options = Options("SDDMM_DOT", vec=vec, extra=("LHS=TARGET_U", "RHS=TARGET_U"))
    dots = Launcher(options).sddmm_dot(FAR_GRAPH, tasks, far_features, far_features, 1, FAR_COLUMNS)
    torch.testing.assert_close(dots, rows.square().sum(-1))

    options = Options("SDDMM", vec=vec, extra=("OP=OP_ADD", "LHS=TARGET_U", "RHS=TARGET_U"))
    sums = Launcher(options).sddmm(FAR_GRAPH, tasks, far_features, far_features, 1, FAR_COLUMNS)
    torch.testing.assert_close(sums, 2 * rows)
