# SPDX-License-Identifier: Apache-2.0
"""The ops on a GPU: for each, the kernels of `message_passing.cu` that answer it, their arguments and buffers.

The head of `message_passing.cu` states every kernel's arguments. Nothing here waits for the device, except that the
tasks of a structure are made when it is first used (see `tasks.cut_rows`), and its lots (`row_lots`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from ctypes import c_float, c_int, c_longlong, c_ulonglong
from typing import Literal

import torch
from torch import Tensor

from dgl_hybrid.ops.backend import EdgeOp, PositiveSums, Reduce, Target
from dgl_hybrid.ops.cuda.launch import Argument, Launcher, Options
from dgl_hybrid.ops.cuda.layout import (
    BLOCK,
    Layout,
    dtype_option,
    flat_layout,
    head_layout,
    index_option,
    softmax_layout,
)
from dgl_hybrid.ops.cuda.row_lots import RowLots, chosen
from dgl_hybrid.ops.cuda.tasks import TaskList, TaskLists
from dgl_hybrid.ops.edge_dropout import EdgeDropout
from dgl_hybrid.ops.plain_rows import PlainRows
from dgl_hybrid.ops.random_words import keep_threshold
from dgl_hybrid.ops.row_blocks import gradients_in_blocks, multiply_in_blocks
from dgl_hybrid.ops.row_mask import multiply_by_mask
from dgl_hybrid.ops.sparse_graph import Adjacency

Weight = Literal["NONE", "HEAD", "COLUMN"]
Source = Literal["NODES", "EDGES"]

_LEAST_SUMS = 8192
"""Of few rows so many sums may be made at a time: fewer would cost more in launches than they save."""
_ATTENTION_WORKERS = 4096
"""Partial sums of GATv2's d_attention: enough groups to fill the largest GPU, few enough to add up at no cost. A
constant, because the order of the sums follows from it."""


class CudaBackend(PlainRows):
    """Implements `ops.backend.Backend` for float32, float16 and bfloat16; see there for shapes.

    Args:
        launcher: Runs the kernels; by default through the CUDA driver, compiled by NVRTC.
        task_lists: Cuts rows into tasks.
    Raises:
        KernelError: No CUDA driver, no GPU, or no NVRTC on this machine.
    """

    keeps_positive_sums = False

    def __init__(self, launcher: Launcher | None = None, task_lists: TaskLists | None = None) -> None:
        if launcher is None:
            from dgl_hybrid.ops.cuda.runtime import create_launcher  # asks for the driver and the compiler

            launcher = create_launcher()
        self._launcher = launcher
        self._task_lists = task_lists or TaskLists()
        self._row_lots = RowLots()

    def spmm(self, rows: Adjacency, x: Tensor | None, w: Tensor | None, reduce: Reduce) -> tuple[Tensor, Tensor | None]:
        tasks = self._task_lists.of(rows.indptr)
        if x is None:
            if w is None:
                raise ValueError("spmm needs x, w or both (got neither)")
            return self._reduce_rows(tasks, rows.indptr, None, rows.edge_ids, w.unsqueeze(-1), None, reduce)
        return self._reduce_rows(tasks, rows.indptr, rows.indices, rows.edge_ids, x, w, reduce)

    def add_sums(
        self,
        out: Tensor,
        targets: Tensor,
        rows: Adjacency,
        x: Tensor,
        w: Tensor | None,
        row_factors: Tensor | None = None,
    ) -> None:
        # No more at a time than the rows they are of: many may read a message of few.
        most = max(len(x), _LEAST_SUMS)
        if rows.num_rows > most:
            for lot in self._row_lots.of(rows, most):
                its_w = w if rows.edge_ids is not None else chosen(w, lot.entries)
                self.add_sums(out, targets[lot.rows], lot.adjacency, x, its_w, chosen(row_factors, lot.rows))
            return
        sums, _ = self.spmm(rows, x, w, "sum")
        out.index_add_(0, targets, sums if row_factors is None else sums.mul_(row_factors.view(-1, 1, 1)))

    def scaled_sums(
        self, rows: Adjacency, x: Tensor, source_factors: Tensor | None, row_factors: Tensor | None
    ) -> Tensor:
        scaled = x if source_factors is None else x * source_factors.view(-1, 1, 1)
        sums, _ = self.spmm(rows, scaled, None, "sum")
        return sums if row_factors is None else sums.mul_(row_factors.view(-1, 1, 1))

    def spmm_select_backward(self, out_rows: Adjacency, grad: Tensor, arg: Tensor, w: Tensor | None) -> Tensor:
        num_heads, width = grad.shape[1:]
        columns, weight = num_heads * width, _weight_kind(w, width)
        dx = grad.new_empty(out_rows.num_rows, num_heads, width)
        layout = flat_layout(columns, width if weight == "HEAD" else columns, grad, w, dx, arg)
        options = _options("SPMM_SELECT", grad.dtype, out_rows.indptr.dtype, layout, WEIGHT=f"WEIGHT_{weight}")
        tasks = self._task_lists.of(out_rows.indptr)
        partial = _partial(tasks, columns, dx)
        arguments = [*_tasks(tasks, out_rows.indptr), out_rows.indices, out_rows.edge_ids, grad, arg, w, dx, partial]
        arguments += [c_int(num_heads), c_int(width)]
        self._launch("spmm_select_bwd_kernel", options, layout, tasks.num_tasks, layout.tiles(columns), arguments)
        self._merge_sums(options, layout, tasks, partial, dx, columns)
        return dx

    def spmm_select_backward_edges(self, rows: Adjacency, grad: Tensor, arg: Tensor, x: Tensor | None) -> Tensor:
        num_heads, width = grad.shape[1:]
        dw = grad.new_empty(rows.num_edges, num_heads)
        layout = flat_layout(width, width, grad, x, arg)
        options = _options("SPMM_SELECT", grad.dtype, rows.indptr.dtype, layout, WEIGHT="WEIGHT_NONE")
        tasks = self._task_lists.of(rows.indptr)
        arguments = [*_tasks(tasks, rows.indptr), rows.indices, rows.edge_ids, grad, arg, x, dw]
        arguments += [c_int(num_heads), c_int(width)]
        self._launch("spmm_select_edges_bwd_kernel", options, layout, tasks.num_tasks * num_heads, 1, arguments)
        return dw

    def sddmm(
        self, rows: Adjacency, lhs: Tensor, rhs: Tensor | None, op: EdgeOp, lhs_target: Target, rhs_target: Target
    ) -> Tensor:
        if rhs is None:
            if op != "copy":
                raise ValueError(f"sddmm {op!r} needs two operands (got rhs None)")
            rhs_target = lhs_target  # not read: one specialisation instead of three
        num_heads, width = lhs.shape[1:]
        columns = num_heads * width
        tasks = self._task_lists.of(rows.indptr)
        targets = {"LHS": f"TARGET_{lhs_target.upper()}", "RHS": f"TARGET_{rhs_target.upper()}"}
        arguments: list[Argument] = [*_tasks(tasks, rows.indptr), rows.indices, rows.edge_ids, lhs, rhs]
        if op == "dot":
            out = lhs.new_empty(rows.num_edges, num_heads)
            layout = flat_layout(width, width, lhs, rhs)
            options = _options("SDDMM_DOT", lhs.dtype, rows.indptr.dtype, layout, **targets)
            kernel, units, tiles = "sddmm_dot_fwd_kernel", tasks.num_tasks * num_heads, 1
        else:
            out = lhs.new_empty(rows.num_edges, num_heads, width)
            layout = flat_layout(columns, columns, lhs, rhs, out)
            options = _options("SDDMM", lhs.dtype, rows.indptr.dtype, layout, OP=f"OP_{op.upper()}", **targets)
            kernel, units, tiles = "sddmm_fwd_kernel", tasks.num_tasks, layout.tiles(columns)
        self._launch(kernel, options, layout, units, tiles, [*arguments, out, c_int(num_heads), c_int(width)])
        return out

    def edge_softmax(self, rows: Adjacency, logits: Tensor) -> Tensor:
        out = torch.empty_like(logits)
        tasks, layout, head_lanes, options = self._softmax_plan(rows, logits)
        num_heads = logits.shape[1]
        tiles = -(-num_heads // head_lanes)
        sizes: list[Argument] = [c_int(num_heads), c_int(head_lanes)]
        partial_max, partial_sum = (_partial(tasks, num_heads, out) for _ in range(2))
        arguments = [*_tasks(tasks, rows.indptr), rows.edge_ids, logits, out, partial_max, partial_sum, *sizes]
        self._launch("edge_softmax_fwd_kernel", options, layout, tasks.num_tasks, tiles, arguments)
        if tasks.num_split:
            split_max, split_sum = (_partial_rows(tasks.num_split, num_heads, out) for _ in range(2))
            arguments = [tasks.split_offsets, c_longlong(tasks.num_split), partial_max, partial_sum]
            arguments += [split_max, split_sum, c_int(num_heads)]
            self._launch("softmax_merge_kernel", options, _ONE_LANE, tasks.num_split * num_heads, 1, arguments)
            arguments = [*_slots(tasks), rows.edge_ids, logits, out, split_max, split_sum, *sizes]
            self._launch("edge_softmax_split_fwd_kernel", options, layout, tasks.num_slots, tiles, arguments)
        return out

    def edge_softmax_backward(self, rows: Adjacency, out: Tensor, grad: Tensor) -> Tensor:
        d_logits = torch.empty_like(out)
        tasks, layout, head_lanes, options = self._softmax_plan(rows, out)
        num_heads = out.shape[1]
        tiles = -(-num_heads // head_lanes)
        sizes: list[Argument] = [c_int(num_heads), c_int(head_lanes)]
        partial_sum = _partial(tasks, num_heads, out)
        arguments = [*_tasks(tasks, rows.indptr), rows.edge_ids, out, grad, d_logits, partial_sum, *sizes]
        self._launch("edge_softmax_bwd_kernel", options, layout, tasks.num_tasks, tiles, arguments)
        if tasks.num_split:
            split_sum = _partial_rows(tasks.num_split, num_heads, out)
            self._merge_float_sums(options, tasks, None, partial_sum, split_sum, num_heads)
            arguments = [*_slots(tasks), rows.edge_ids, out, grad, d_logits, split_sum, *sizes]
            self._launch("edge_softmax_split_bwd_kernel", options, layout, tasks.num_slots, tiles, arguments)
        return d_logits

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
        del for_backward
        num_heads, width = x.shape[1:]
        if width == 0:  # the weights are defined all the same
            out, lse, _ = self.gat(rows, x.new_zeros(len(x), num_heads, 1), el, er, slope, dropout)
            return out[..., :0].contiguous(), lse, None
        columns = num_heads * width
        out = x.new_empty(rows.num_rows, num_heads, width)
        lse = el.new_empty(rows.num_rows, num_heads)
        layout = flat_layout(columns, width, x, out)
        options = _options("GAT", x.dtype, rows.indptr.dtype, layout, DROPOUT=str(int(dropout is not None)))
        tasks = self._task_lists.of(rows.indptr)
        partials = [_partial(tasks, columns, x), _partial(tasks, num_heads, x), _partial(tasks, num_heads, x)]
        arguments = [*_tasks(tasks, rows.indptr), rows.indices, rows.edge_ids, x, el, er, out, lse, *partials]
        arguments += [c_int(num_heads), c_int(width), c_float(slope), *_dropout_arguments(dropout)]
        self._launch("gat_fwd_kernel", options, layout, tasks.num_tasks, layout.tiles(columns), arguments)
        self._merge_attention(options, layout, tasks, partials, out, lse)
        return out, lse, None

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
        del positive
        num_heads, width = x.shape[1:]
        if width == 0:
            return torch.empty_like(x), torch.zeros_like(el), torch.zeros_like(er)
        columns = num_heads * width
        dx, d_el = torch.empty_like(x), torch.empty_like(el)
        d_logit = el.new_empty(rows.num_edges, num_heads)
        layout = head_layout(width, x, grad, out, dx)
        chosen = str(int(dropout is not None))
        options = _options("GAT_BACKWARD", x.dtype, rows.indptr.dtype, layout, DROPOUT=chosen)
        terms = self._attention_terms(options, layout, grad, out, er, lse)
        tasks = self._task_lists.of(out_rows.indptr)
        partial, partial_el = _partial(tasks, columns, x), _partial(tasks, num_heads, x)
        arguments = [*_tasks(tasks, out_rows.indptr), out_rows.indices, out_rows.edge_ids, x, grad, el, terms]
        arguments += [dx, d_el, d_logit, partial, partial_el, c_int(num_heads), c_int(width), c_float(slope)]
        arguments += _dropout_arguments(dropout)
        units, tiles = tasks.num_tasks * num_heads, layout.tiles(width)
        self._launch("gat_bwd_kernel", options, layout, units, tiles, arguments)
        self._merge_sums(options, layout, tasks, partial, dx, columns)
        if partial_el is not None:
            self._merge_float_sums(options, tasks, tasks.split_rows, partial_el, d_el, num_heads)
        tasks = self._task_lists.of(rows.indptr)
        d_er, _ = self._reduce_rows(tasks, rows.indptr, None, rows.edge_ids, d_logit.unsqueeze(-1), None, "sum")
        return dx, d_el, d_er.view(er.shape)

    def gatv2(
        self,
        rows: Adjacency,
        x_src: Tensor,
        x_dst: Tensor,
        attention: Tensor,
        slope: float,
        dropout: EdgeDropout | None,
    ) -> tuple[Tensor, Tensor]:
        num_heads, width = x_src.shape[1:]
        if width == 0:  # every logit is an empty sum
            x_src, x_dst = (x.new_zeros(len(x), num_heads, 1) for x in (x_src, x_dst))
            out, lse = self.gatv2(rows, x_src, x_dst, attention.new_zeros(num_heads, 1), slope, dropout)
            return out[..., :0].contiguous(), lse
        out, lse = torch.empty_like(x_dst), _partial_rows(rows.num_rows, num_heads, x_dst)
        layout = head_layout(width, x_src, x_dst, attention, out)
        options = _options("GATV2", x_src.dtype, rows.indptr.dtype, layout, DROPOUT=str(int(dropout is not None)))
        tasks = self._task_lists.of(rows.indptr)
        columns = num_heads * width
        partials = [_partial(tasks, columns, out), _partial(tasks, num_heads, out), _partial(tasks, num_heads, out)]
        arguments = [*_tasks(tasks, rows.indptr), rows.indices, rows.edge_ids, x_src, x_dst, attention, out, lse]
        arguments += [*partials, c_int(num_heads), c_int(width), c_float(slope), *_dropout_arguments(dropout)]
        units, tiles = tasks.num_tasks * num_heads, layout.tiles(width)
        self._launch("gatv2_fwd_kernel", options, layout, units, tiles, arguments)
        self._merge_attention(options, layout, tasks, partials, out, lse)
        return out, lse

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
        num_heads, width = x_src.shape[1:]
        columns = num_heads * width
        sizes: list[Argument] = [c_int(num_heads), c_int(width), c_float(slope)]
        dx_src, dx_dst = torch.empty_like(x_src), torch.empty_like(x_dst)
        d_logit = lse.new_empty(rows.num_edges, num_heads)
        layout = head_layout(width, x_src, x_dst, attention, grad, out, dx_src, dx_dst)
        chosen = str(int(dropout is not None))
        options = _options("GATV2_BACKWARD", x_src.dtype, rows.indptr.dtype, layout, DROPOUT=chosen)
        terms = self._attention_terms(options, layout, grad, out, None, lse)

        tasks, tiles = self._task_lists.of(out_rows.indptr), layout.tiles(width)
        partial = _partial(tasks, columns, x_src)
        arguments = [*_tasks(tasks, out_rows.indptr), out_rows.indices, out_rows.edge_ids, x_src, x_dst, attention]
        arguments += [grad, terms, dx_src, d_logit, partial, *sizes, *_dropout_arguments(dropout)]
        self._launch("gatv2_src_bwd_kernel", options, layout, tasks.num_tasks * num_heads, tiles, arguments)
        self._merge_sums(options, layout, tasks, partial, dx_src, columns)

        tasks = self._task_lists.of(rows.indptr)
        partial, num_workers = _partial(tasks, columns, x_dst), min(tasks.num_tasks, _ATTENTION_WORKERS)
        partial_attention = lse.new_empty(num_workers, num_heads, width)
        arguments = [*_tasks(tasks, rows.indptr), c_longlong(num_workers), rows.indices, rows.edge_ids, x_src, x_dst]
        arguments += [attention, d_logit, dx_dst, partial, partial_attention, *sizes]
        self._launch("gatv2_dst_bwd_kernel", options, layout, num_workers * num_heads, tiles, arguments)
        self._merge_sums(options, layout, tasks, partial, dx_dst, columns)
        return dx_src, dx_dst, partial_attention.sum(0).to(attention.dtype)

    def segment_reduce(self, offsets: Tensor, x: Tensor, reduce: Reduce) -> tuple[Tensor, Tensor | None]:
        tasks = self._task_lists.of_segments(offsets)
        out, arg = self._reduce_rows(tasks, offsets, None, None, x.unsqueeze(-1), None, reduce)
        return out.squeeze(-1), None if arg is None else arg.squeeze(-1)

    def drop_rows(self, x: Tensor, ids: Tensor, keys: tuple[int, int], p: float) -> Tensor:
        return multiply_by_mask(x, ids, keys, p)

    def row_products(
        self,
        rows: list[Tensor],
        weights: list[Tensor],
        factors: Tensor | None,
        addend: Tensor | None,
        bias: Tensor | None,
        relu: bool,
    ) -> Tensor:
        return multiply_in_blocks(rows, weights, factors, addend, bias, relu)

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
        return gradients_in_blocks(rows, weights, grad, output, factors, needs_rows, needs_weights, needs_addend)

    def _reduce_rows(
        self,
        tasks: TaskList,
        indptr: Tensor,
        indices: Tensor | None,
        edge_ids: Tensor | None,
        x: Tensor,
        w: Tensor | None,
        reduce: Reduce,
    ) -> tuple[Tensor, Tensor | None]:
        """`spmm` by tasks of `indptr`; with `indices` None, x (E, H, D) holds edge rows."""
        num_heads, width = x.shape[1:]
        columns, weight = num_heads * width, _weight_kind(w, width)
        out = x.new_empty(indptr.numel() - 1, num_heads, width)
        arg = None if reduce == "sum" else torch.empty_like(out, dtype=indptr.dtype)
        layout = flat_layout(columns, width if weight == "HEAD" else columns, x, w, out, arg)
        source: Source = "EDGES" if indices is None else "NODES"
        options = _options(
            "SPMM",
            x.dtype,
            indptr.dtype,
            layout,
            REDUCE=f"REDUCE_{reduce.upper()}",
            WEIGHT=f"WEIGHT_{weight}",
            SOURCE=f"SOURCE_{source}",
        )
        partial = _partial(tasks, columns, x)
        partial_arg = None if partial is None or arg is None else torch.empty_like(partial, dtype=indptr.dtype)
        arguments = [*_tasks(tasks, indptr), indices, edge_ids, x, w, out, arg, partial, partial_arg]
        arguments += [c_int(num_heads), c_int(width)]
        self._launch("spmm_fwd_kernel", options, layout, tasks.num_tasks, layout.tiles(columns), arguments)
        if arg is None:
            self._merge_sums(options, layout, tasks, partial, out, columns)
        elif tasks.num_split:
            arguments = [*_splits(tasks, tasks.split_rows), partial, partial_arg, out, arg, c_int(columns)]
            self._launch("select_merge_kernel", options, layout, tasks.num_split, layout.tiles(columns), arguments)
        return out, arg

    def _merge_sums(
        self, options: Options, layout: Layout, tasks: TaskList, partial: Tensor | None, out: Tensor, columns: int
    ) -> None:
        """Adds the partial sums of split rows into `out`, which has the dtype of the features."""
        flat = Layout(group=layout.group, vec=layout.vec)
        arguments = [*_splits(tasks, tasks.split_rows), partial, out, c_int(columns)]
        self._launch("sum_merge_kernel", options, flat, tasks.num_split, flat.tiles(columns), arguments)

    def _merge_float_sums(
        self,
        options: Options,
        tasks: TaskList,
        split_rows: Tensor | None,
        partial: Tensor | None,
        out: Tensor,
        columns: int,
    ) -> None:
        """Likewise into a float32 `out`: at the split rows, or with None one row after the other."""
        arguments = [*_splits(tasks, split_rows), partial, out, c_int(columns)]
        self._launch("sum_merge_f32_kernel", options, _ONE_LANE, tasks.num_split * columns, 1, arguments)

    def _merge_attention(
        self, options: Options, layout: Layout, tasks: TaskList, partials: list[Tensor | None], out: Tensor, lse: Tensor
    ) -> None:
        num_heads, width = out.shape[1:]
        flat = Layout(group=layout.group, vec=layout.vec)
        arguments = [*_splits(tasks, tasks.split_rows), *partials, out, lse, c_int(num_heads), c_int(width)]
        self._launch("gat_merge_kernel", options, flat, tasks.num_split, flat.tiles(num_heads * width), arguments)

    def _attention_terms(
        self, options: Options, layout: Layout, grad: Tensor, out: Tensor, er: Tensor | None, lse: Tensor
    ) -> Tensor:
        """(N, H, 4) float32: what the backward reads of a destination, in one load."""
        num_rows, num_heads, width = grad.shape
        terms = lse.new_empty(num_rows, num_heads, 4)
        sizes: list[Argument] = [c_longlong(num_rows), c_int(num_heads), c_int(width)]
        self._launch("gat_terms_kernel", options, layout, num_rows * num_heads, 1, [grad, out, er, lse, terms, *sizes])
        return terms

    def _softmax_plan(self, rows: Adjacency, logits: Tensor) -> tuple[TaskList, Layout, int, Options]:
        layout, head_lanes = softmax_layout(rows.num_rows, rows.num_edges, logits.shape[1])
        options = _options("SOFTMAX", logits.dtype, rows.indptr.dtype, layout)
        return self._task_lists.of(rows.indptr), layout, head_lanes, options

    def _launch(
        self, kernel: str, options: Options, layout: Layout, units: int, tiles: int, arguments: list[Argument]
    ) -> None:
        """Gives every unit a group of lanes, in every tile; without units or tiles there is nothing to write."""
        if units and tiles:
            self._launcher.launch(kernel, options, layout.grid(units, tiles), BLOCK, arguments)


_ONE_LANE = Layout(group=1, vec=1)

_WITHOUT_VEC, _WITH_PACKS = {"SOFTMAX"}, {"GAT_BACKWARD", "GATV2", "GATV2_BACKWARD"}


@functools.cache
def _options(family: str, dtype: torch.dtype, index_dtype: torch.dtype, layout: Layout, **choices: str) -> Options:
    """What compiles one specialisation; names only what the family reads, so that equal ones share a cubin."""
    options = [f"-DKERNELS=KERNELS_{family}", dtype_option(dtype), index_option(index_dtype), f"-DGROUP={layout.group}"]
    if family not in _WITHOUT_VEC:
        options.append(f"-DVEC={layout.vec}")
    if family in _WITH_PACKS:
        options.append(f"-DPACKS={layout.packs}")
    return (*options, *(f"-D{name}={value}" for name, value in choices.items()))


def _weight_kind(w: Tensor | None, width: int) -> Weight:
    if w is None:
        return "NONE"
    return "COLUMN" if width == 1 else "HEAD"


def _tasks(tasks: TaskList, indptr: Tensor) -> list[Argument]:
    return [indptr if tasks.begin is None else tasks.begin, tasks.row, tasks.slot, c_longlong(tasks.num_tasks)]


def _splits(tasks: TaskList, split_rows: Tensor | None) -> list[Argument]:
    return [split_rows, tasks.split_offsets, c_longlong(tasks.num_split)]


def _slots(tasks: TaskList) -> list[Argument]:
    assert tasks.begin is not None, "some row is split"
    return [tasks.begin, tasks.slot_task, tasks.slot_split, c_longlong(tasks.num_slots)]


def _partial(tasks: TaskList, columns: int, like: Tensor) -> Tensor | None:
    """(slots, columns) float32 for the partial results of split rows, if there are any."""
    return _partial_rows(tasks.num_slots, columns, like) if tasks.num_split else None


def _partial_rows(num_rows: int, columns: int, like: Tensor) -> Tensor:
    return torch.empty(num_rows, columns, dtype=torch.float32, device=like.device)


def _dropout_arguments(dropout: EdgeDropout | None) -> list[Argument]:
    if dropout is None:
        return [None, c_ulonglong(0), c_ulonglong(0), c_int(0), c_float(0.0)]
    key0, key1 = dropout.keys
    threshold = c_int(keep_threshold(dropout.p))
    return [dropout.edge_keys, c_ulonglong(key0), c_ulonglong(key1), threshold, c_float(dropout.scale)]
