# SPDX-License-Identifier: Apache-2.0
"""What the families of ops share: how one is registered, and the structure of a graph in its lists and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dgl_hybrid.ops.sparse_graph import Adjacency, build_out_edges, build_out_neighbours

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
        assert setup_context is not None
        _LIBRARY.impl(name, _differentiable(name, setup_context, backward), "Autograd")


def _differentiable(
    name: str, setup_context: Callable[..., None], backward: Callable[..., Grads]
) -> Callable[..., Any]:
    """Returns what PyTorch is to call while gradients are recorded.

    `torch.library.register_autograd` does the same. Where arguments are lists of tensors, as most of ours have, it
    takes them apart and puts them together as trees, eight times a step: 0.3 ms of Python for products of a few rows,
    forward and backward, of a whole epoch's 5 on small graphs. Here `forward` gets them as they are, for the op, and
    taken apart.
    """
    op = registered(name)
    is_list = [isinstance(argument.type, torch.ListType) for argument in op._schema.arguments]

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, args: tuple[Any, ...], *flat: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                output = op(*args)
                ctx.lengths = [len(arg) if listed else -1 for arg, listed in zip(args, is_list, strict=True)]
                setup_context(ctx, args, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
            found = backward(_OfCall(ctx, _structured(ctx.needs_input_grad[1:], ctx.lengths)), *grads)
            return None, *_flattened(found, is_list)

    def call(*args: Any) -> Any:
        flat = _flattened(args, is_list)
        if forward_ad._current_level >= 0:
            _refuse_tangents(flat)
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in flat):
            return Differentiable.apply(args, *flat)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    return call


class _OfCall:
    """A context as `backward` reads it, with `needs_input_grad` in the form of the op's arguments.

    Of one call: threads may go back through one node at once, and share its context.
    """

    def __init__(self, ctx: Any, needs_input_grad: tuple[Any, ...]) -> None:
        self._ctx, self.needs_input_grad = ctx, needs_input_grad

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def _refuse_tangents(values: Sequence[Any]) -> None:
    """Below autograd a tangent would be lost: DGL's own operations raise, too."""
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in values):
        raise NotImplementedError(
            "message passing has no forward-mode derivative: use reverse mode (backward, torch.autograd.grad)"
        )


def _flattened(values: Sequence[Any], is_list: Sequence[bool]) -> list[Any]:
    flat: list[Any] = []
    for value, listed in zip(values, is_list, strict=True):
        if listed:
            flat += value
        else:
            flat.append(value)
    return flat


def _structured(flat: Sequence[Any], lengths: Sequence[int]) -> tuple[Any, ...]:
    """Undoes `_flattened`; -1 stands for what is not a list."""
    structured: list[Any] = []
    begin = 0
    for length in lengths:
        structured.append(flat[begin] if length < 0 else list(flat[begin : begin + length]))
        begin += 1 if length < 0 else length
    return tuple(structured)


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


def _out_neighbours(rows: list[Tensor], num_src: int) -> tuple[Tensor, Tensor]:
    return build_out_neighbours(read_rows(rows), num_src)


def _out_neighbours_meta(rows: list[Tensor], num_src: int) -> tuple[Tensor, Tensor]:
    return rows[0].new_empty(num_src + 1), torch.empty_like(rows[1])


register("out_neighbours(Tensor[] rows, SymInt num_src) -> (Tensor, Tensor)", _out_neighbours, _out_neighbours_meta)


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
