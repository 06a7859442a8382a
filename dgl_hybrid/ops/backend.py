# SPDX-License-Identifier: Apache-2.0
"""What a set of kernels offers, and which set serves a tensor.

A backend sees canonical operands only: contiguous, on one device, x (S, H, D), w (E, H). It returns new tensors of
which every element is written, and does the same sums in the same order whenever it is called with the same operands.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from dgl_hybrid.errors import CompatError, KernelError
from dgl_hybrid.ops.edge_dropout import EdgeDropout
from dgl_hybrid.ops.sparse_graph import Adjacency

Reduce = Literal["sum", "max", "min"]
EdgeOp = Literal["add", "sub", "mul", "div", "dot", "copy"]
Target = Literal["u", "v", "e"]
BackendName = Literal["naive", "cpu", "cuda"]

_logger = logging.getLogger(__name__)


class PositiveSums(NamedTuple):
    """What `gat` sums over the entries of each row with el[u] + er[v] > 0 alone, for the gradient of er.

    The gradients of a row's logits add up to 0, so with the derivative of leaky_relu, 1 or `slope`, and
    delta[v] = grad[v] · out[v]

        d_er[v] = (1 - slope) * sum of d_logit[e] over those entries
                = (1 - slope) * (grad[v] · rows[v] - delta[v] * weights[v])

    which needs nothing of any edge. Sums of parts of a row's entries add up as `out` does.

    Attributes:
        rows: (N, H, D) of el's dtype: sums of drop(a) * x[u].
        weights: (N, H), same dtype: sums of a, which nothing was dropped of.
    """

    rows: Tensor
    weights: Tensor


class Backend(Protocol):
    """Pure functions on tensors, without autograd inside.

    Rows without entries give 0, arg -1 and log-sum-exp 0. Sums of float16 and bfloat16 are taken in float32. `rows`
    are the edges by destination and `out_rows` the same edges by source, unless a line says otherwise.
    """

    keeps_positive_sums: bool
    """Whether `gat_backward` makes the gradient of er from `PositiveSums`, or from those of edges."""

    def spmm(self, rows: Adjacency, x: Tensor | None, w: Tensor | None, reduce: Reduce) -> tuple[Tensor, Tensor | None]:
        """Reduces x[u] * w[e] over the entries of each row.

        Args:
            rows: By destination; by source in the backward, with x by destination.
            x: (S, H, D), or None: the edge rows themselves are reduced.
            w: (E, H), or None: the sources themselves; (E, F) with x None.
        Returns:
            `(out, arg)`: (N, H, D) in the operands' dtype, (N, F, 1) with x None; arg, for max and min only, of the
            same shape in the index dtype: the winning *edge row*. Of equal values the first entry wins; NaN wins.
        """

    def add_sums(
        self,
        out: Tensor,
        targets: Tensor,
        rows: Adjacency,
        x: Tensor,
        w: Tensor | None,
        row_factors: Tensor | None = None,
    ) -> None:
        """Adds the sum of x[u] * w[e] over the entries of row r to out[targets[r]]: `spmm` without a result of its own.

        Args:
            out: (M, H, D) of x's dtype.
            targets: (N,) int64, no two alike.
            rows, x, w: As of `spmm`.
            row_factors: (N,) of x's dtype: what the sum of row r is multiplied by, without `w`; None: 1.
        """

    def scaled_sums(
        self, rows: Adjacency, x: Tensor, source_factors: Tensor | None, row_factors: Tensor | None
    ) -> Tensor:
        """(N, H, D): row_factors[r] * sum of source_factors[u] * x[u] over the entries of row r.

        Args:
            x: (S, H, D).
            source_factors: (S,) of x's dtype; None: 1.
            row_factors: (N,), likewise.
        """

    def spmm_select_backward(self, out_rows: Adjacency, grad: Tensor, arg: Tensor, w: Tensor | None) -> Tensor:
        """For max and min, the gradient of x (S, H, D): adds grad[v] * w[e] over the out-edges e with arg[v] = e."""

    def spmm_select_backward_edges(self, rows: Adjacency, grad: Tensor, arg: Tensor, x: Tensor | None) -> Tensor:
        """For max and min, the gradient of w (E, H): adds grad[v] * x[u] over the elements d with arg[v, h, d] = e."""

    def sddmm(
        self, rows: Adjacency, lhs: Tensor, rhs: Tensor | None, op: EdgeOp, lhs_target: Target, rhs_target: Target
    ) -> Tensor:
        """Combines two operands along each edge; `u` is the neighbour of an entry and `v` its row.

        Args:
            lhs: (S | N | E, H, D), as `lhs_target` says.
            rhs: Likewise; None for `copy`.
        Returns:
            (E, H, D) by edge row; (E, H) for `dot`, which sums over D.
        """

    def edge_softmax(self, rows: Adjacency, logits: Tensor) -> Tensor:
        """(E, H) to (E, H): softmax over the entries of each row."""

    def edge_softmax_backward(self, rows: Adjacency, out: Tensor, grad: Tensor) -> Tensor:
        """(E, H): out * (grad - sum over the row of out * grad)."""

    def gat(
        self,
        rows: Adjacency,
        x: Tensor,
        el: Tensor,
        er: Tensor,
        slope: float,
        dropout: EdgeDropout | None,
        *,
        for_backward: bool = False,
    ) -> tuple[Tensor, Tensor, PositiveSums | None]:
        """Attention a = softmax over the row of leaky_relu(el[u] + er[v], slope); out = sum of drop(a) * x[u].

        Args:
            x: (S, H, D).
            el: (S, H) float32, float64 for float64 x.
            er: (N, H), likewise.
            for_backward: `gat_backward` will be called with what is returned.
        Returns:
            `(out, lse, positive)`: (N, H, D) in the dtype of x; (N, H) in that of el: log of the sum of exp of the
            logits; None if it is not for the backward, and of backends that do not keep them.
        """

    def gat_backward(
        self,
        rows: Adjacency,
        out_rows: Adjacency,
        x: Tensor,
        el: Tensor,
        er: Tensor,
        out: Tensor,
        lse: Tensor,
        positive: PositiveSums | None,
        grad: Tensor,
        slope: float,
        dropout: EdgeDropout | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`(dx, d_el, d_er)`; materialises nothing of size E * H * D.

        `out` and `lse` may be of rows that have further entries elsewhere. Then d_er is what these add to it, or, of a
        backend that keeps positive sums, all of it where they are given, and None where they are not.
        """

    def gatv2(
        self,
        rows: Adjacency,
        x_src: Tensor,
        x_dst: Tensor,
        attention: Tensor,
        slope: float,
        dropout: EdgeDropout | None,
    ) -> tuple[Tensor, Tensor]:
        """As `gat` with the logits sum over d of attention * leaky_relu(x_src[u] + x_dst[v], slope).

        Args:
            x_src: (S, H, D).
            x_dst: (N, H, D), same dtype.
            attention: (H, D), same dtype.
        Returns:
            `(out, lse)`: (N, H, D) in the dtype of x_src; (N, H) float32, float64 for float64.
        """

    def gatv2_backward(
        self,
        rows: Adjacency,
        out_rows: Adjacency,
        x_src: Tensor,
        x_dst: Tensor,
        attention: Tensor,
        out: Tensor,
        lse: Tensor,
        grad: Tensor,
        slope: float,
        dropout: EdgeDropout | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`(dx_src, dx_dst, d_attention)`; materialises nothing of size E * H * D."""

    def segment_reduce(self, offsets: Tensor, x: Tensor, reduce: Reduce) -> tuple[Tensor, Tensor | None]:
        """(N + 1,) offsets and (M, F) to (N, F), and for max and min arg (N, F): the winning row of x."""

    def drop_rows(self, x: Tensor, ids: Tensor, keys: tuple[int, int], p: float) -> Tensor:
        """(N, F) times the mask that (N,) int64 ids, on its device, and two unsigned 64-bit keys give, and 1/(1-p)."""

    def add_rows(self, out: Tensor, targets: Tensor, rows: Tensor, factors: Tensor | None) -> None:
        """out[targets[n]] += rows[n], times factors[targets[n]] unless that is None.

        Args:
            out: (M, F), contiguous.
            targets: (N,) int32 or int64; of some that are alike rows are added in their order.
            rows: (N, F) of out's dtype, in any strides.
            factors: (M,), likewise.
        """

    def merge_rows(self, out: Tensor, targets: Tensor, rows: Tensor, keeps: Tensor, adds: Tensor) -> None:
        """out[targets[n], h] = out[targets[n], h] * keeps[n, h] + rows[n, h] * adds[n, h].

        Args:
            out: (M, H, D), contiguous.
            targets: (N,) int32 or int64, each once.
            rows: (N, H, D) of out's dtype.
            keeps: (N, H), likewise.
            adds: (N, H), likewise.
        """

    def biased_elu(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """(N, C): the ELU, with alpha = 1, of x (N, C) + bias (C,)."""

    def biased_elu_backward(self, grad: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of x (N, C) and of the bias (C,) from that of `out` (N, C), the result."""

    def head_terms(self, x: Tensor, attn_l: Tensor, attn_r: Tensor, num_dst: int) -> tuple[Tensor, Tensor]:
        """`(el, er)`: (S, ..., H, 1) attn_l · x[u] per head, and (N, ..., H, 1) attn_r · x[v] of the first rows.

        Args:
            x: (S, ..., H, D) in any strides.
            attn_l: (1, H, D); of another dtype than x under autocast.
            attn_r: (1, H, D), likewise.
            num_dst: N.
        """

    def head_terms_backward(
        self, x: Tensor, attn_l: Tensor, attn_r: Tensor, d_el: Tensor, d_er: Tensor, dx: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Gradients of attn_l and attn_r, (1, H, D) each; adds that of x to `dx`, contiguous, unless it is None."""

    def row_products(
        self,
        rows: list[Tensor],
        weights: list[Tensor],
        factors: Tensor | None,
        addend: Tensor | None,
        bias: Tensor | None,
        relu: bool,
    ) -> Tensor:
        """(N, O): factors (N, 1) * sum of (N, A) rows @ (A, O) weight + addend (N, O) + bias (O,), or its ReLU.

        Matrices may have any strides.
        """

    def row_products_backward(
        self,
        rows: list[Tensor],
        weights: list[Tensor],
        grad: Tensor,
        output: Tensor | None,
        factors: Tensor | None,
        needs_rows: Sequence[bool],
        needs_weights: Sequence[bool],
        needs_addend: bool,
    ) -> list[Tensor]:
        """Gradients of the rows and weights that need one, of the bias, and of the addend if needed, in that order.

        Args:
            output: (N, O), of a product with a ReLU; None: there was none.
        Returns:
            Contiguous tensors; the gradient of a weight that lies as its transpose does is (O, A).
        """


_CLASSES: dict[BackendName, tuple[str, str]] = {
    "naive": ("dgl_hybrid.ops.naive", "NaiveBackend"),
    "cpu": ("dgl_hybrid.ops.cpu.backend", "CpuBackend"),
    "cuda": ("dgl_hybrid.ops.cuda.backend", "CudaBackend"),
}
_SERVED_DTYPES: dict[str, tuple[BackendName, tuple[torch.dtype, ...]]] = {
    "cpu": ("cpu", (torch.float32, torch.float64, torch.float16, torch.bfloat16)),
    "cuda": ("cuda", (torch.float32, torch.float16, torch.bfloat16)),
}

# A module variable and not a context variable: PyTorch runs the backward of CUDA ops in threads of its own.
_override: BackendName | None = None


def choose_backend(tensor: Tensor) -> Backend:
    """Returns the kernels for `tensor`'s device and dtype; the reference for what has none.

    float64 on CUDA is served by the reference, which also stands in, with one logged warning that says why, where a
    backend cannot be loaded (no NVRTC, for instance).
    """
    if _override is not None:
        return load_backend(_override)
    name, dtypes = _SERVED_DTYPES.get(tensor.device.type, ("naive", ()))
    return _load_or_reference(name) if tensor.dtype in dtypes else load_backend("naive")


@functools.cache
def load_backend(name: BackendName) -> Backend:
    """Imports and makes one backend; later calls return the same.

    Raises:
        ValueError: An unknown name.
        CompatError, KernelError, ImportError: It cannot work on this machine.
    """
    if name not in _CLASSES:
        raise ValueError(f"backend must be one of {', '.join(_CLASSES)} (got {name!r})")
    module, class_name = _CLASSES[name]
    return cast("Backend", getattr(importlib.import_module(module), class_name)())


@contextlib.contextmanager
def use_backend(name: BackendName) -> Iterator[Backend]:
    """Every op in the block runs on the named backend, in every thread: for tests and measurements.

    Raises:
        ValueError: An unknown name.
        CompatError, KernelError, ImportError: It cannot work on this machine.
    """
    global _override
    backend = load_backend(name)
    previous, _override = _override, name
    try:
        yield backend
    finally:
        _override = previous


@functools.cache
def _load_or_reference(name: BackendName) -> Backend:
    try:
        return load_backend(name)
    except (CompatError, KernelError, ImportError) as error:
        _logger.warning("The %s ops cannot be used; slow reference ops stand in for them: %s", name, error)
        return load_backend("naive")
