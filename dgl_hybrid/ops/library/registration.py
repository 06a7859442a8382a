# SPDX-License-Identifier: Apache-2.0
"""What the families of ops share: how one is registered, and the structure of a graph in its lists and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dgl_hybrid.ops.sparse_graph import Adjacency, build_out_edges

_LIBRARY = torch.library.Library("dgl_hybrid", "DEF")

Grads = tuple[Any, ...]


def register(
    schema: str,
    implementation: Callable[..., Any],
    meta: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Grads] | None = None,
) -> None:
    """Defines one op.

    Args:
        schema: Begins with its name.
        implementation: On CPU and CUDA; chooses the backend itself.
        meta: Returns tensors of the right shapes and dtypes.
        setup_context: What is kept for `backward`.
        backward: The gradients; None: it has none.
    """
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.split("(", 1)[0]
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, implementation, key)
    torch.library.register_fake(f"dgl_hybrid::{name}", meta, lib=_LIBRARY)  # the Meta implementation too
    if backward is not None:
        torch.library.register_autograd(f"dgl_hybrid::{name}", backward, setup_context=setup_context, lib=_LIBRARY)


def registered(name: str) -> Any:
    """The op of that name, of any family: looked up when it is called, so families need not import each other."""
    return getattr(torch.ops.dgl_hybrid, name).default


def read_rows(tensors: Sequence[Tensor]) -> Adjacency:
    """One of the two lists as kernels take it."""
    return Adjacency.from_tensors(list(tensors))


def packed(x: Tensor | None) -> Tensor | None:
    """An operand as kernels take it."""
    return None if x is None else x.contiguous()


def needs_grad(x: Tensor | None) -> bool:
    """Whether an operand is given and differentiated."""
    return x is not None and x.requires_grad


def num_rows_of(rows: Sequence[Tensor]) -> Any:
    """The number of rows as PyTorch counts it: symbolic under a trace."""
    return rows[0].shape[0] - 1


# The rows by source


def _out_edges(rows: list[Tensor], num_src: int) -> tuple[Tensor, Tensor, Tensor]:
    built = build_out_edges(read_rows(rows), num_src)
    assert built.edge_ids is not None
    return built.indptr, built.indices, built.edge_ids


def _out_edges_meta(rows: list[Tensor], num_src: int) -> tuple[Tensor, Tensor, Tensor]:
    indices = rows[1]
    return rows[0].new_empty(num_src + 1), torch.empty_like(indices), torch.empty_like(indices)


register("out_edges(Tensor[] rows, SymInt num_src) -> (Tensor, Tensor, Tensor)", _out_edges, _out_edges_meta)


def by_source(rows: Sequence[Tensor], out_rows: Sequence[Tensor], num_src: Any) -> list[Tensor]:
    """The given rows by source, built if none were given."""
    return list(out_rows) if len(out_rows) else list(registered("out_edges")(list(rows), num_src))


class Structure:
    """Keeps both lists in an autograd context, beside other tensors."""

    @staticmethod
    def save(ctx: Any, rows: Sequence[Tensor], out_rows: Sequence[Tensor], *others: Tensor | None) -> None:
        ctx.num_rows, ctx.num_out_rows = len(rows), len(out_rows)
        ctx.save_for_backward(*rows, *out_rows, *others)

    @staticmethod
    def load(ctx: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        end = ctx.num_rows + ctx.num_out_rows
        return list(saved[: ctx.num_rows]), list(saved[ctx.num_rows : end]), *saved[end:]

    @staticmethod
    def no_grads(ctx: Any) -> tuple[list[None], list[None]]:
        return [None] * ctx.num_rows, [None] * ctx.num_out_rows
