# SPDX-License-Identifier: Apache-2.0
"""Every kernel family on the host against float64, under random schedules of threads and blocks."""

from __future__ import annotations

import pytest
import torch

from tests.ops.simt.build import needs_compiler
from tests.ops.simt.cases import Case, all_cases, check, default_cases, make_case
from tests.ops.simt.launches import Launcher

pytestmark = needs_compiler

DEFAULT = list(default_cases())
OTHERS = [case for case in all_cases() if case.name not in {chosen.name for chosen in DEFAULT}]


def run_under_schedules(case: Case, operands: str = "normal", schedules: int = 2) -> None:
    first = case.results(Launcher(case.options, 1), operands=operands)
    check(case, first)
    for seed in range(2, schedules + 1):
        again = case.results(Launcher(case.options, seed), operands=operands)
        for a, b in zip(first, again):
            words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.got.element_size()]
            assert torch.equal(a.got.view(words), b.got.view(words)), f"{case.name}: {a.name} depends on the schedule"


@pytest.mark.parametrize("case", DEFAULT, ids=lambda case: case.name)
def test_results_match_float64_whatever_the_schedule(case: Case) -> None:
    run_under_schedules(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
def test_other_specialisations_match_float64(case: Case) -> None:
    run_under_schedules(case)


def test_default_cases_hold_every_profile_and_every_family() -> None:
    assert {case.profile for case in DEFAULT} == {case.profile for case in OTHERS}
    assert {case.options.kernels for case in DEFAULT} == {case.options.kernels for case in OTHERS}


@pytest.mark.parametrize("reduce", ["MAX", "MIN"])
@pytest.mark.parametrize(
    ("weight", "profile"),
    [("NONE", "half_full"), ("HEAD", "odd_width"), ("COLUMN", "narrow_heads"), ("NONE", "one_lane")],
)
def test_nan_wins_and_the_first_of_equals(reduce: str, weight: str, profile: str) -> None:
    variant = (f"REDUCE=REDUCE_{reduce}", "SOURCE=SOURCE_NODES", f"WEIGHT=WEIGHT_{weight}")
    run_under_schedules(make_case("SPMM", variant, profile), "special")


def test_sum_passes_nan_and_infinity_on() -> None:
    variant = ("REDUCE=REDUCE_SUM", "SOURCE=SOURCE_NODES", "WEIGHT=WEIGHT_HEAD")
    run_under_schedules(make_case("SPMM", variant, "idle_lanes"), "special")


def test_winners_beyond_32_bits() -> None:
    variant = ("REDUCE=REDUCE_MAX", "SOURCE=SOURCE_NODES", "WEIGHT=WEIGHT_NONE")
    run_under_schedules(make_case("SPMM", variant, "full_warp"), "far_edge_rows")
