# SPDX-License-Identifier: Apache-2.0
"""Batch norm over the vertices of the whole graph, when each rank holds its own rows and replicas of other ranks' rows.

Layer norm needs nothing of this: it works within a row. Whatever else mixes rows (instance, graph and pair norm) has no
distributed form here; `graph/` detects it in the trace and refuses.

[Note: the backward with replicas]
Let a row be held on one or more ranks, N the number of vertices, s = 1/sqrt(var + eps) and x̂ = (x - mean)·s. The
statistics read every vertex once, at its owner, so they are sums over *owned* rows. The output of *every held* row
reads the statistics, so their gradient sums over all held rows of all ranks:

    A = Σ_held dy,   B = Σ_held dy·x̂          (all-reduced)
    owned row:   dx = w·s·(dy - A/N - x̂·B/N)
    replica:     dx = w·s·dy                    (its value entered no statistic)

A replica's dy is only what this rank's own computation sent back, so nothing is counted twice. torch's SyncBatchNorm
counts replicas as further vertices in all of these places, and would be wrong in each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dgl_hybrid.errors import BlockError
from dgl_hybrid.exchange.communicator import Communicator

_CHUNK_ELEMENTS_CPU = 1 << 19
_CHUNK_ELEMENTS_CUDA = 1 << 26


def distributed_batch_norm(
    x: Tensor,
    owned_mask: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    training: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
    communicator: Communicator | None = None,
    num_vertices: int | None = None,
    why_not: str | None = None,
) -> Tensor:
    """Normalises held rows by the mean and variance over all vertices: `F.batch_norm` of the whole graph, by parts.

    With `training=True` collective over `communicator`: one all-reduce in the forward and one in the backward, on every
    rank and whatever the number of rows, so every rank must run the backward (a rank without rows too). With
    `training=False` it is row-local. Gradients of `weight` and `bias` are this rank's share, over all rows it holds;
    their sum over ranks is the gradient of one process, which is what DDP forms (its average, with the loss scaled for
    it). Differentiable once.

    Args:
        x: (n, F) floating: rows this rank owns and replicas, in any order; n may be 0. Or (n, F, …), of which the
            statistics are over the dimensions after F, too (attention's rows: over the columns of each head).
        owned_mask: (n,) bool: the rows this rank owns. Every vertex must be owned by exactly one rank.
        running_mean: (F,) or None: updated in place when training, to the same bits on every rank if it was alike.
        running_var: (F,) or None: likewise, with the unbiased variance.
        weight: (F,) or None.
        bias: (F,) or None.
        training: Use and record the statistics of this batch; otherwise use the running ones.
        momentum: Share of the new statistics in the running ones; the caller computes 1/k for a cumulative average.
        eps: Added to the variance.
        communicator: Whose ranks hold the rows; None for one rank alone.
        num_vertices: Number of vertices of the graph: how many owned rows there must be over all ranks.
        why_not: These are not rows of vertices on this rank; what it says of them then. All ranks must call this, as
            one of them may have as many rows as vertices by chance.
    Returns:
        Shape, dtype and device of `x`.
    Raises:
        BlockError: on every rank, if any of them says why not.
        ValueError: wrong shapes; or, on every rank, fewer than two values of a feature in the owned rows of all
            ranks, or these are not of `num_vertices`.
    """
    if x.dim() < 2:
        raise ValueError(f"distributed batch norm takes (rows, features) (got shape {tuple(x.shape)})")
    if owned_mask.shape != x.shape[:1] or owned_mask.dtype != torch.bool:
        raise ValueError(f"owned_mask must be ({x.shape[0]},) bool (got {tuple(owned_mask.shape)} {owned_mask.dtype})")
    if not training:
        if running_mean is None or running_var is None:
            raise ValueError("batch norm in evaluation needs running_mean and running_var (got None)")
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps)
    x_NF, per_vertex = x, 1
    if x.dim() > 2:  # as many rows of F values for each vertex, which count alike
        x_NVF = x.flatten(2).transpose(1, 2)
        per_vertex = x_NVF.shape[1]
        x_NF, owned_mask = x_NVF.flatten(0, 1), owned_mask.repeat_interleave(per_vertex)
    # Half precision is widened as F.batch_norm does inside: sums and the scale need the digits.
    wide_NF = x_NF if x_NF.dtype in (torch.float32, torch.float64) else x_NF.float()
    mean, var, count = _statistics(wide_NF.detach(), owned_mask, communicator, num_vertices, per_vertex, why_not)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
    out_NF: Tensor = _Normalise.apply(
        wide_NF, weight, bias, owned_mask, mean, torch.rsqrt(var + eps), count, communicator
    )
    out_NF = out_NF.to(x.dtype)
    return out_NF if x.dim() == 2 else out_NF.view(x_NVF.shape).transpose(1, 2).reshape(x.shape)


def _statistics(
    x_NF: Tensor,
    owned_mask: Tensor,
    communicator: Communicator | None,
    num_vertices: int | None,
    per_vertex: int,
    why_not: str | None,
) -> tuple[Tensor, Tensor, int]:
    """Mean and biased variance over the owned rows of all ranks, (F,) float64, and their number. One all-reduce.

    There are `per_vertex` rows of each vertex.

    Sums of squares about a far-off point lose digits, so each rank takes its own mean and variance first, in float64,
    and these are put together by rank (Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for
    Computing Sample Variances", 1979), in the same order on each. Sums about the running mean would need no rank's own,
    but that may differ by rank, where each has trained by itself before.
    """
    num_features = x_NF.shape[1]
    owned_N1 = owned_mask.unsqueeze(1).to(x_NF.dtype)
    sums = torch.zeros(num_features, dtype=torch.float64, device=x_NF.device)
    squares = torch.zeros_like(sums)
    num_owned = owned_mask.sum(dtype=torch.float64)
    for rows, work in _chunks(x_NF):
        sums += torch.mul(x_NF[rows], owned_N1[rows], out=work).sum(0)
    own_mean = sums / num_owned.clamp(min=1.0)
    centre = own_mean.to(x_NF.dtype)
    for rows, work in _chunks(x_NF):
        squares += torch.sub(x_NF[rows], centre, out=work).square_().mul_(owned_N1[rows]).sum(0)
    # About `centre`, the rounded mean: exact up to the square of a rounding error.
    counts = torch.stack([num_owned, torch.full_like(num_owned, why_not is not None)])
    of_ranks = torch.cat([own_mean, squares, counts]).unsqueeze(0)
    if communicator is not None and communicator.world_size > 1:
        own, of_ranks = of_ranks, of_ranks.new_zeros(communicator.world_size, of_ranks.shape[1])
        of_ranks[communicator.rank] = own[0]
        communicator.sum_(of_ranks)
    count, num_not = (int(value) for value in of_ranks[:, -2:].sum(0))
    if num_not:
        raise BlockError(
            why_not
            or f"batch norm inside the model: on {num_not} other ranks a tensor of shape (n, {num_features}) does not "
            f"hold one row for each vertex of a level"
        )
    if num_vertices is not None and count != num_vertices * per_vertex:
        raise ValueError(
            f"batch norm over {count // per_vertex} of {num_vertices} vertices is not that of the whole graph. On the "
            f"output of the last layer only the seeds are computed: put the normalisation before that layer; anywhere "
            f"else, let the loader see the model (`model=`, or a first epoch without a given plan). Where a module of "
            f"its own normalises rows that the model is given, give neither `model=` nor `plan=`: the first epoch, "
            f"which computes every vertex, then sees that, and plans leave them there."
        )
    if count < 2:
        raise ValueError(f"batch norm needs at least 2 values of a feature in training (got {count} over all ranks)")
    means, squares, owned_P1 = of_ranks[:, :num_features], of_ranks[:, num_features:-2], of_ranks[:, -2:-1]
    mean = (means * owned_P1).sum(0) / count
    return mean, (squares + owned_P1 * (means - mean).square_()).sum(0) / count, count


class _Normalise(torch.autograd.Function):
    """See the note above; `mean` and `invstd` are (F,) float64, `count` is N."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NF: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        owned_mask: Tensor,
        mean: Tensor,
        invstd: Tensor,
        count: int,
        communicator: Communicator | None,
    ) -> Tensor:
        ctx.save_for_backward(x_NF, weight, owned_mask, mean, invstd)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.count, ctx.communicator = count, communicator
        scale = invstd if weight is None else weight.double() * invstd
        shift = -mean * scale if bias is None else bias.double() - mean * scale
        return torch.addcmul(shift.to(x_NF.dtype), x_NF, scale.to(x_NF.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NF, weight, owned_mask, mean, invstd = ctx.saved_tensors
        dy_NF, centre = grads[0], mean.to(x_NF.dtype)
        sum_dy, sum_dy_xhat = torch.zeros_like(mean), torch.zeros_like(mean)
        for rows, work in _chunks(x_NF):
            sum_dy += dy_NF[rows].sum(0)
            sum_dy_xhat += torch.sub(x_NF[rows], centre, out=work).mul_(dy_NF[rows]).sum(0)
        sum_dy_xhat *= invstd
        # Before anything that depends on what this rank needs: the number of collectives must not differ by rank.
        sums = torch.stack([sum_dy, sum_dy_xhat])
        if ctx.communicator is not None:
            ctx.communicator.sum_(sums)
        mean_dy, mean_dy_xhat = sums / ctx.count
        dx_NF = None
        if ctx.needs_input_grad[0]:
            scale = invstd if weight is None else weight.double() * invstd
            slope, level = (t.to(x_NF.dtype) for t in (-scale * invstd * mean_dy_xhat, -scale * mean_dy))
            owned_N1 = owned_mask.unsqueeze(1).to(x_NF.dtype)
            dx_NF = dy_NF * scale.to(x_NF.dtype)
            for rows, work in _chunks(x_NF):
                correction = torch.sub(x_NF[rows], centre, out=work).mul_(slope).add_(level)
                dx_NF[rows].addcmul_(correction, owned_N1[rows])
        dweight = sum_dy_xhat.to(weight.dtype) if ctx.needs_input_grad[1] else None
        dbias = sum_dy.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return dx_NF, dweight, dbias, None, None, None, None, None


def _chunks(x_NF: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Slices of rows, and for each a scratch tensor of its shape: small enough on CPU to stay in cache.

    They do not depend on the number of threads, so that sums over them depend on it as little as may be.
    """
    num_rows, num_features = x_NF.shape
    chunk_rows = max(1, (_CHUNK_ELEMENTS_CUDA if x_NF.is_cuda else _CHUNK_ELEMENTS_CPU) // max(1, num_features))
    work = torch.empty(min(num_rows, chunk_rows), num_features, dtype=x_NF.dtype, device=x_NF.device)
    for begin in range(0, num_rows, chunk_rows):
        end = min(begin + chunk_rows, num_rows)
        yield slice(begin, end), work[: end - begin]
