# SPDX-License-Identifier: Apache-2.0
"""Layers whose products run while rows travel: those of a vertex's own row, and gradients of weights.

Written as operations one after the other, autograd takes an exchange to its end before it begins with what comes next.
Each function here is all sums and products of a mean layer of `SAGEConv`, or of a `GraphConv` that sums first, forward
and backward: what needs nothing that is received runs beside the exchange.

    multiply, then sum    forward   product, pack ─▶ start │ own product, held sums │ wait, use
                          backward  make ─▶ start │ own gradients, held sums │ wait, add │ gradients of the product
    sum, then multiply    forward   pack ─▶ start │ own product, held sums │ wait, use │ product
                          backward  gradient of sums, make ─▶ start │ other gradients, held sums │ wait, add
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgl_hybrid.exchange.row_codecs import RowCodec
from dgl_hybrid.graph.row_products import gradients_of, products, vector_columns
from dgl_hybrid.graph.split_exchange import Scale
from dgl_hybrid.graph.split_sum import SplitSum
from dgl_hybrid.graph.untraced import untraced
from dgl_hybrid.ops.row_blocks import is_turned, mask_of_relu
from dgl_hybrid.ops.unseen import unseen


@dataclass(frozen=True, slots=True)
class _Sums:
    """How rows are summed in one call of a layer."""

    split: SplitSum
    scale: Scale | None
    codec: RowCodec | None

    def forward(self, x: Tensor, beside: Callable[[], None]) -> Tensor:
        """(C, F) to (N, F). Collective."""
        return self.split.forward(x.unsqueeze(1), None, self.scale, self.codec, beside).squeeze(1)

    def backward(self, grad: Tensor, beside: Callable[[], None]) -> Tensor:
        """(N, F) to (C, F). Collective."""
        return self.split.backward(grad.unsqueeze(1), None, self.scale, self.codec, beside).squeeze(1)

    def differentiable(self, x: Tensor) -> Tensor:
        """As `forward`, for autograd. Collective."""
        summed: Tensor = self.split(x, scale=self.scale)
        return summed

    def adjoint(self, grad: Tensor) -> Tensor:
        """As `backward`, for autograd. Collective."""
        return self.split.adjoint(grad.unsqueeze(1), self.scale, self.codec).squeeze(1)


class _OwnAndSum(torch.autograd.Function):
    """(C, A) to (N, O): the first N rows times w_own, and sums of all rows times w_all."""

    @staticmethod
    def forward(
        ctx: Any, sums: _Sums, num_own: int, x: Tensor, w_all: Tensor, w_own: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.sums, ctx.num_own = sums, num_own
        ctx.save_for_backward(x, w_all, w_own, bias)
        own = x.new_empty(0)

        def beside() -> None:
            nonlocal own
            own = products([x[:num_own]], [w_own.t()], bias=bias)

        summed = sums.forward(_narrowed(x, w_all), beside)
        return own.add_(summed[:, : len(w_all)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, w_all, w_own, bias = ctx.saved_tensors
        needs_x, needs_w_all, needs_w_own, needs_bias = needs = ctx.needs_input_grad[2:]
        sums: _Sums = ctx.sums
        num_own = ctx.num_own
        if torch.is_grad_enabled():

            def compose(x: Tensor, w_all: Tensor, w_own: Tensor, bias: Tensor | None) -> Tensor:
                own = products([x[:num_own]], [w_own.t()], bias=bias)
                return own + sums.differentiable(_narrowed(x, w_all))[:, : len(w_all)]

            return None, None, *_differentiable_gradients(compose, grad, (x, w_all, w_own, bias), needs)
        of_own: tuple[Tensor | None, ...] = ()

        def beside() -> None:
            nonlocal of_own
            of_own = gradients_of(x[:num_own], w_own, grad, needs_x, needs_w_own)

        grad_x = grad_w_all = None
        if needs_x or needs_w_all:
            grad_rows = sums.backward(_widened(grad), beside)[:, : len(w_all)]
            grad_x, grad_w_all, _ = gradients_of(x, w_all, grad_rows, needs_x, needs_w_all)
        else:
            beside()
        grad_x_own, grad_w_own, grad_bias = of_own
        if grad_x is not None and grad_x_own is not None:
            grad_x[:num_own].add_(grad_x_own)
        return None, None, grad_x, grad_w_all, grad_w_own, grad_bias if needs_bias else None


class _OwnAndProductOfSum(torch.autograd.Function):
    """(C, A) to (N, O): the first N rows times w_own, and sums of all rows times w_sum; or the ReLU of both."""

    @staticmethod
    def forward(
        ctx: Any, sums: _Sums, num_own: int, relu: bool, x: Tensor, w_sum: Tensor, w_own: Tensor, bias: Tensor | None
    ) -> Tensor:
        own = x.new_empty(0)

        def beside() -> None:
            nonlocal own
            own = products([x[:num_own]], [w_own.t()], bias=bias)

        summed = sums.forward(x, beside)
        out = products([summed], [w_sum.t()], addend=own, relu=relu)
        ctx.sums, ctx.num_own, ctx.relu = sums, num_own, relu
        ctx.save_for_backward(x, summed, w_sum, w_own, bias, out if relu else None)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, summed, w_sum, w_own, bias, out = ctx.saved_tensors
        needs_x, needs_w_sum, needs_w_own, needs_bias = needs = ctx.needs_input_grad[3:]
        sums: _Sums = ctx.sums
        num_own, relu = ctx.num_own, ctx.relu
        if torch.is_grad_enabled():

            def compose(x: Tensor, w_sum: Tensor, w_own: Tensor, bias: Tensor | None) -> Tensor:
                own = products([x[:num_own]], [w_own.t()], bias=bias)
                return products([sums.differentiable(x)], [w_sum.t()], addend=own, relu=relu)

            return None, None, None, *_differentiable_gradients(compose, grad, (x, w_sum, w_own, bias), needs)
        # What travels first; of a ReLU's gradient also what is left of it, which all others are made of.
        found = torch.ops.dgl_hybrid.row_products_backward(
            [summed], [w_sum.t()], grad, out, None, [needs_x], [False], relu
        )
        before_relu: Tensor | None = found.pop() if relu else grad
        grad_w_sum: Tensor | None = None
        of_own: tuple[Tensor | None, ...] = ()

        def beside() -> None:
            nonlocal before_relu, grad_w_sum, of_own
            assert before_relu is not None
            if needs_w_sum:
                _, grad_w_sum, _ = gradients_of(summed, w_sum, before_relu, False, True)
            of_own = gradients_of(x[:num_own], w_own, before_relu, needs_x, needs_w_own)
            before_relu = None  # as large as what is made next

        grad_x: Tensor | None = None
        if needs_x:
            grad_x = sums.backward(found.pop(0), beside)
        else:
            beside()
        grad_x_own, grad_w_own, grad_bias = of_own
        if grad_x is not None and grad_x_own is not None:
            grad_x[:num_own].add_(grad_x_own)
        return None, None, None, grad_x, grad_w_sum, grad_w_own, grad_bias if needs_bias else None


class _ProductOfSum(torch.autograd.Function):
    """(C, A) to (N, O) and (N, A): sums of rows times a weight, or their ReLU; and the sums, for second derivatives.

    Saved as a result, sums are differentiable without the rows that they are of, which nobody has to keep.
    """

    @staticmethod
    def forward(
        ctx: Any, sums: _Sums, factors: Tensor | None, relu: bool, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        summed = sums.forward(x, lambda: None)
        out = products([summed], [weight], factors=factors, bias=bias, relu=relu)
        ctx.sums, ctx.relu = sums, relu
        ctx.save_for_backward(summed, weight, factors, out if relu else None)
        ctx.set_materialize_grads(False)
        return out, summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, grad_summed = grads
        summed, weight, factors, out = ctx.saved_tensors
        _, needs_weight, needs_bias = ctx.needs_input_grad[3:]
        sums: _Sums = ctx.sums
        grad_weight: Tensor | None = None
        grad_bias: Tensor | None = None
        if grad is None and grad_summed is None:  # who comes after had none to give
            grad = summed.new_zeros(len(summed), weight.shape[1])
        before_relu = grad
        if grad is not None and torch.is_grad_enabled():
            before_relu = mask_of_relu(grad, out)
            scaled = before_relu if factors is None else before_relu * factors
            of_product = products([scaled], [weight.t()])
            grad_summed = of_product if grad_summed is None else grad_summed + of_product
            grad_weight, grad_bias = summed.t() @ scaled, before_relu.sum(0)
        elif grad is not None:
            # What travels first; of a ReLU's gradient also what is left of it, which that of the weight is made of.
            is_masked = ctx.relu and needs_weight
            of_product, grad_bias, *masked = torch.ops.dgl_hybrid.row_products_backward(
                [summed], [weight], grad, out, factors, [True], [False], is_masked
            )
            before_relu = masked.pop() if is_masked else grad
            grad_summed = of_product if grad_summed is None else grad_summed + of_product

        def beside() -> None:
            nonlocal before_relu, grad_weight
            if needs_weight and before_relu is not None:
                found, _ = torch.ops.dgl_hybrid.row_products_backward(
                    [summed], [weight], before_relu, None, factors, [False], [True], False
                )
                grad_weight = found.t() if is_turned(weight) else found
            before_relu = None  # as large as what is made next

        assert grad_summed is not None
        grad_x = sums.adjoint(grad_summed) if torch.is_grad_enabled() else sums.backward(grad_summed, beside)
        return None, None, None, grad_x, grad_weight, grad_bias if needs_bias else None


def _differentiable_gradients(
    compose: Callable[..., Tensor], grad: Tensor, inputs: Sequence[Tensor | None], needs: Sequence[bool]
) -> Sequence[Tensor | None]:
    """Returns gradients that can be differentiated: those of the layer made once more, by operations that each can be,
    as what a forward has summed is a constant to autograd. Collective.

    Args:
        compose: Given the inputs, or views of them. By the inputs themselves autograd would go on: into one of them
            from another that is made of it (a layer that is used twice, tied weights), and into their hooks.
    """
    views = [x.view_as(x) if x is not None and needed else x for x, needed in zip(inputs, needs, strict=True)]
    wanted = [x for x, needed in zip(views, needs, strict=True) if x is not None and needed]
    given = iter(torch.autograd.grad(compose(*views), wanted, grad, create_graph=True))
    return [next(given) if x is not None and needed else None for x, needed in zip(inputs, needs, strict=True)]


def _narrowed(x: Tensor, w_all: Tensor) -> Tensor:
    """Returns (C, W) rows times w_all (O, A), W >= O with columns of zeros behind."""
    return products([x], [_widened(w_all.t())])


def _widened(x: Tensor) -> Tensor:
    missing = vector_columns(x.shape[1], x.device) - x.shape[1]
    return F.pad(x, (0, missing)) if missing else x


@untraced("own_and_sum", "own_and_product", "product")
class ProductsBeside:
    """A layer whose products run beside the exchange of its sums.

    Args:
        split: Sums of rows that are trained, if they are.
        scale: Of what is summed.
    """

    def __init__(self, split: SplitSum, scale: Scale | None) -> None:
        self._split, self._scale = split, scale

    def _sums(self, num_columns: int, x: Tensor) -> _Sums:
        return _Sums(self._split, self._scale, self._split.codec_for(num_columns, x.dtype))

    @unseen
    def own_and_sum(self, x: Tensor, of_all: nn.Linear, of_own: nn.Linear, num_own: int) -> Tensor:
        """Returns (N, O), `of_own(x[:N])` plus the sums of `of_all(x)`. Collective.

        Args:
            x: (C, A), where `are_plain((of_all, of_own), x)` holds and `of_all` has no bias.
            num_own: N.
        """
        sums = self._sums(vector_columns(len(of_all.weight), x.device), x)
        result: Tensor = _OwnAndSum.apply(sums, num_own, x, of_all.weight, of_own.weight, of_own.bias)
        return result

    @unseen
    def own_and_product(self, x: Tensor, of_sum: nn.Linear, of_own: nn.Linear, num_own: int, *, relu: bool) -> Tensor:
        """Returns (N, O), `of_own(x[:N])` plus `of_sum` of the sums of x, or its ReLU. Collective.

        Args:
            x: (C, A), where `are_plain((of_sum, of_own), x)` holds and `of_sum` has no bias.
            num_own: N.
        """
        sums = self._sums(x.shape[1], x)
        result: Tensor = _OwnAndProductOfSum.apply(sums, num_own, relu, x, of_sum.weight, of_own.weight, of_own.bias)
        return result

    @unseen
    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, factors: Tensor | None, relu: bool) -> Tensor:
        """Returns (N, O), `factors * (sums of x @ weight) + bias`, or its ReLU. Collective.

        Args:
            x: (C, A), which needs a gradient.
            weight: (A, O) of its dtype.
            bias: (O,).
            factors: (N, 1), without gradients.
        """
        result: Tensor
        result, _ = _ProductOfSum.apply(self._sums(x.shape[1], x), factors, relu, x, weight, bias)
        return result
