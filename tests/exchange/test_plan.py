# SPDX-License-Identifier: Apache-2.0
"""What an exchange plan checks alone, and what plans of all ranks check together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dgl_hybrid.errors import ExchangeError
from dgl_hybrid.exchange.plan import check_symmetry
from tests.exchange.test_rows import make_plans


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_plans_that_fit(world_size: int, seed: int) -> None:
    plans = make_plans(world_size, seed)
    check_symmetry(plans)
    assert sum(plan.num_sent for plan in plans) == sum(plan.num_received for plan in plans)
    for plan in plans:
        assert plan.send_offsets[-1] == plan.num_sent
        assert plan.recv_offsets[-1] == plan.num_received
        assert f"rank {plan.rank}/{world_size}" in str(plan)


def test_faults_are_named() -> None:
    plan = make_plans(3)[0]
    for fault, words in (
        (replace(plan, send_counts=(0, 1)), "send_counts must be 3 counts"),
        (replace(plan, recv_counts=(0, -1, 2)), "recv_counts must be 3 counts"),
        (replace(plan, send_counts=(1, *plan.send_counts[1:])), "with itself"),
        (replace(plan, send_index=plan.send_index[1:]), "send_index must have"),
        (replace(plan, recv_global=torch.arange(99)), "recv_global must have"),
        (replace(plan, send_index=plan.send_index + 7), "must lie in"),
    ):
        with pytest.raises(ExchangeError, match=words):
            fault.validate()


def test_plans_of_two_partitions_do_not_fit() -> None:
    plans = make_plans(3, seed=0)
    with pytest.raises(ExchangeError, match="recv_counts do not match: rank 0 of 3"):
        check_symmetry([plans[0], *make_plans(3, seed=1)[1:]])
