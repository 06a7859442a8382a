# SPDX-License-Identifier: Apache-2.0
"""The exchange before buffers were owned: every tensor new in every call. What the present one is compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.plan import ExchangePlan


class _ExtendRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_CF: Tensor, plan: ExchangePlan, communicator: Communicator) -> Tensor:
        ctx.plan, ctx.communicator = plan, communicator
        send_SF = x_CF.index_select(0, plan.send_index)
        received_RF = communicator.exchange(send_SF, plan.send_counts, plan.recv_counts, layer=plan.layer)
        return torch.cat([x_CF, received_RF])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad_XF,), plan = grads, ctx.plan
        returned_SF = ctx.communicator.exchange(
            grad_XF[plan.num_rows :].contiguous(), plan.recv_counts, plan.send_counts, layer=plan.layer, backward=True
        )
        return grad_XF[: plan.num_rows].index_add(0, plan.send_index, returned_SF), None, None


def extend_rows(fields: list[Tensor], plan: ExchangePlan, communicator: Communicator) -> list[Tensor]:
    return [_ExtendRows.apply(field, plan, communicator) for field in fields]
