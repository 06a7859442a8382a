# SPDX-License-Identifier: Apache-2.0
"""What `enable` is asked for, in words and as the variable that a job's processes inherit."""

from __future__ import annotations

import pytest

from dgl_hybrid.sampling.config import Budget, HaloConfig, parse_budget


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


@pytest.mark.parametrize("text", ["", "much", "10 XB", "-5", -5, "%", True, "1e9", "10%%"])
def test_other_budgets_are_refused(text: str | int) -> None:
    with pytest.raises(ValueError, match=r"budget must be 'auto', 'unlimited', a share .* \(got "):
        HaloConfig(budget=text)


def test_only_nothing_at_all_is_unlimited() -> None:
    assert parse_budget("unlimited").is_unlimited
    assert not parse_budget("auto").is_unlimited
    assert not parse_budget(0).is_unlimited
    assert HaloConfig(strategy="depcache", budget="1MB").parsed_budget().is_unlimited


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match="strategy must be one of hybrid, depcache, depcomm"):
        HaloConfig(strategy="everything")  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [HaloConfig(), HaloConfig(strategy="depcomm", budget=7), HaloConfig(budget="10%")])
def test_the_variable_brings_back_the_same(config: HaloConfig) -> None:
    assert HaloConfig.from_environment(config.to_environment()) == config


def test_one_stands_for_the_defaults_and_the_rest_is_refused() -> None:
    assert HaloConfig.from_environment("1") == HaloConfig()
    for value in ("yes", "[]", '{"strategy": "hybrid", "more": 1}'):
        with pytest.raises(ValueError, match="DGL_HYBRID_ENABLE must be 1, 0 or a JSON object"):
            HaloConfig.from_environment(value)
