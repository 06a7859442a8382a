# SPDX-License-Identifier: Apache-2.0
"""What `enable` is asked for, in words and as the variable that a job's processes inherit."""

from __future__ import annotations

import pytest

from dgl_hybrid.sampling.config import Budget, HaloConfig, parse_budget, read_environment


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("auto", Budget(is_auto=True)),
        ("unlimited", Budget()),
        ("10%", Budget(share=0.1)),
        ("12.5 %", Budget(share=0.125)),
        ("256MB", Budget(num_bytes=256_000_000)),
        ("1.5 GiB", Budget(num_bytes=3 * 2**29)),
        ("1000", Budget(num_bytes=1000)),
        (0, Budget(num_bytes=0)),
        (4096, Budget(num_bytes=4096)),
    ],
)
def test_budgets_are_read(text: str | int, budget: Budget) -> None:
    assert parse_budget(text) == budget


@pytest.mark.parametrize(
    "text", ["", "much", "10 XB", "-5", -5, "%", True, "1e9", "10%%", 0.1, 256e6, "9" * 400 + "GB"]
)
def test_other_budgets_are_refused(text: str | int) -> None:
    with pytest.raises(ValueError, match=r"budget must be 'auto', 'unlimited', a share .* \(got "):
        HaloConfig(budget=text)


@pytest.mark.parametrize("budget", ["10", 10, "100 B", 1, "0.1KB"])
def test_who_forgets_the_unit_of_a_budget_is_told(budget: str | int) -> None:
    with pytest.raises(ValueError, match=r"bytes holds nothing \(got .*\): .* Write '\d+%' for a share"):
        HaloConfig(budget=budget)
    assert parse_budget("101").num_bytes == 101


def test_only_nothing_at_all_is_unlimited() -> None:
    assert parse_budget("unlimited").is_unlimited
    assert not parse_budget("auto").is_unlimited
    assert not parse_budget(0).is_unlimited
    assert HaloConfig(strategy="depcache", budget="1MB").parsed_budget().is_unlimited


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match="strategy must be one of hybrid, depcache, depcomm"):
        HaloConfig(strategy="everything")  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [HaloConfig(), HaloConfig(strategy="depcomm", budget=700), HaloConfig(budget="10%")])
def test_the_variable_brings_back_the_same(config: HaloConfig) -> None:
    assert HaloConfig.from_environment(config.to_environment()) == config


def test_one_stands_for_the_defaults_and_the_rest_is_refused() -> None:
    assert HaloConfig.from_environment("1") == HaloConfig()
    for value in ("yes", "yes:10%", "[]", '{"strategy": "hybrid", "more": 1}'):
        with pytest.raises(ValueError, match=r"DGL_HYBRID_ENABLE must be 1, 0, a strategy .* or a JSON object"):
            HaloConfig.from_environment(value)


@pytest.mark.parametrize(
    ("value", "config"),
    [
        ("hybrid:10%", HaloConfig(budget="10%")),
        ("hybrid:256MB", HaloConfig(budget="256MB")),
        ("hybrid:1000", HaloConfig(budget="1000")),
        ("depcomm", HaloConfig(strategy="depcomm")),
        ("depcache:auto", HaloConfig(strategy="depcache")),
    ],
)
def test_launchers_without_quotes_have_a_form_of_their_own(value: str, config: HaloConfig) -> None:
    assert HaloConfig.from_environment(value) == config


def test_a_short_form_with_another_budget_is_refused() -> None:
    for value in ("hybrid:", "hybrid:much"):
        with pytest.raises(ValueError, match="budget must be 'auto', "):
            HaloConfig.from_environment(value)


def test_only_what_the_variable_says_is_read() -> None:
    assert read_environment("1") == {}
    assert read_environment("depcache") == {"strategy": "depcache"}
    assert read_environment('{"budget": 7}') == {"budget": 7}
