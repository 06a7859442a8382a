# SPDX-License-Identifier: Apache-2.0
"""Launches of the kernels as their ABI says (the header of message_passing.cu), on any memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.ops.simt.build import HostKernels, load_kernels
from tests.ops.simt.graphs import Rows, TaskList

BLOCK = 128
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Options:
    """The -D options of one specialisation."""

    kernels: str
    dtype: str = "F32"
    index_bits: int = 32
    group: int = 8
    vec: int = 1
    packs: int = 1
    extra: tuple[str, ...] = ()

    def as_list(self) -> list[str]:
        return [
            f"-DKERNELS=KERNELS_{self.kernels}", f"-DDTYPE=DTYPE_{self.dtype}", f"-DINDEX_BITS={self.index_bits}",
            f"-DGROUP={self.group}", f"-DVEC={self.vec}", f"-DPACKS={self.packs}",
            *(f"-D{option}" for option in self.extra),
        ]  # fmt: skip

    @property
    def features(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def index(self) -> torch.dtype:
        return torch.int32 if self.index_bits == 32 else torch.int64


@dataclass(frozen=True)
class Dropout:
    key0: int
    key1: int
    p: float
    edge_keys: Tensor | None

    def arguments(self) -> list[Tensor | int | float | None]:
        threshold = min(round(self.p * 2**32), 2**32 - 1) - 2**31
        return [self.edge_keys, self.key0, self.key1, threshold, 0.0 if self.p == 1 else 1 / (1 - self.p)]


NO_DROPOUT = Dropout(0, 0, 0.0, None)
Arguments = Sequence["Tensor | int | float | None"]


def poison(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor whose every element is wrong until it is written."""
    return torch.full(tuple(shape), float("nan") if dtype.is_floating_point else -77, dtype=dtype)


class Launcher:
    """The kernels of one specialisation with one thread schedule; `place` puts a tensor where kernels shall find it."""

    def __init__(
        self,
        options: Options,
        seed: int = 1,
        *,
        load: Callable[[list[str]], HostKernels] = load_kernels,
        place: Callable[[Tensor, bool], Tensor] = lambda tensor, writable: tensor,
    ) -> None:
        self.options, self.seed, self.load, self.place = options, seed, load, place
        self.kernels = load(options.as_list())

    def with_vec(self, vec: int) -> Launcher:
        return Launcher(replace(self.options, vec=vec), self.seed, load=self.load, place=self.place)

    # ---- Flat kernels

    def spmm(
        self, rows: Rows, tasks: TaskList, x: Tensor, w: Tensor | None, heads: int, width: int, *,
        from_edges: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        selects = "REDUCE=REDUCE_SUM" not in self.options.extra
        out = self._out(rows.num_rows, heads, width)
        arg = self._out(rows.num_rows, heads, width, dtype=self.options.index) if selects else None
        partial = self._out(tasks.num_slots, heads * width, dtype=torch.float32)
        partial_arg = self._out(tasks.num_slots, heads * width, dtype=self.options.index) if selects else None
        x, w, indices = self._in(x), self._in(w), None if from_edges else self._index(rows.indices)
        self._flat(
            "spmm_fwd_kernel", tasks.num_tasks, heads * width,
            *self._tasks(tasks), indices, self._index(rows.edge_ids), x, w, out, arg, partial, partial_arg,
            heads, width,
        )  # fmt: skip
        if selects:
            self._merge("select_merge_kernel", tasks, heads * width, partial, partial_arg, out, arg, heads * width)
        else:
            self._merge("sum_merge_kernel", tasks, heads * width, partial, out, heads * width)
        return out, arg

    def spmm_select_backward(
        self, rows: Rows, tasks: TaskList, grad: Tensor, arg: Tensor, w: Tensor | None, heads: int, width: int
    ) -> Tensor:
        dx = self._out(rows.num_rows, heads, width)
        partial = self._out(tasks.num_slots, heads * width, dtype=torch.float32)
        self._flat(
            "spmm_select_bwd_kernel", tasks.num_tasks, heads * width,
            *self._tasks(tasks), *self._adjacency(rows), self._in(grad), self._index(arg), self._in(w), dx, partial,
            heads, width,
        )  # fmt: skip
        self._merge("sum_merge_kernel", tasks, heads * width, partial, dx, heads * width)
        return dx

    def spmm_select_edges_backward(
        self, rows: Rows, tasks: TaskList, grad: Tensor, arg: Tensor, x: Tensor | None, heads: int, width: int
    ) -> Tensor:
        dw = self._out(len(rows.indices), heads)
        self._by_head(
            "spmm_select_edges_bwd_kernel", tasks.num_tasks * heads, 1,
            *self._tasks(tasks), *self._adjacency(rows), self._in(grad), self._index(arg), self._in(x), dw,
            heads, width,
        )  # fmt: skip
        return dw

    def sddmm(self, rows: Rows, tasks: TaskList, lhs: Tensor, rhs: Tensor | None, heads: int, width: int) -> Tensor:
        out = self._out(len(rows.indices), heads, width)
        self._flat(
            "sddmm_fwd_kernel", tasks.num_tasks, heads * width,
            *self._tasks(tasks), *self._adjacency(rows), self._in(lhs), self._in(rhs), out, heads, width,
        )  # fmt: skip
        return out

    def sddmm_dot(self, rows: Rows, tasks: TaskList, lhs: Tensor, rhs: Tensor, heads: int, width: int) -> Tensor:
        out = self._out(len(rows.indices), heads)
        self._by_head(
            "sddmm_dot_fwd_kernel", tasks.num_tasks * heads, 1,
            *self._tasks(tasks), *self._adjacency(rows), self._in(lhs), self._in(rhs), out, heads, width,
        )  # fmt: skip
        return out

    # ---- Softmax

    def edge_softmax(self, rows: Rows, tasks: TaskList, logits: Tensor, head_lanes: int) -> Tensor:
        heads = logits.shape[1]
        out, logits, ids = self._out(*logits.shape), self._in(logits), self._index(rows.edge_ids)
        partial_max, partial_sum = (self._out(tasks.num_slots, heads, dtype=torch.float32) for _ in range(2))
        begin = self._index(tasks.begin)
        tiles = -(-heads // head_lanes)
        self._launch(
            "edge_softmax_fwd_kernel", tasks.num_tasks * self.options.group, tiles,
            *self._tasks(tasks), ids, logits, out, partial_max, partial_sum, heads, head_lanes,
        )  # fmt: skip
        num_split = len(tasks.split_row)
        if num_split:
            split_max, split_sum = (self._out(num_split, heads, dtype=torch.float32) for _ in range(2))
            self._launch(
                "softmax_merge_kernel", num_split * heads, 1,
                self._in(tasks.split_slots), num_split, partial_max, partial_sum, split_max, split_sum, heads,
            )  # fmt: skip
            self._launch(
                "edge_softmax_split_fwd_kernel", tasks.num_slots * self.options.group, tiles,
                begin, self._index(tasks.slot_task), self._in(tasks.slot_split), tasks.num_slots,
                ids, logits, out, split_max, split_sum, heads, head_lanes,
            )  # fmt: skip
        return out

    def edge_softmax_backward(self, rows: Rows, tasks: TaskList, out: Tensor, grad: Tensor, head_lanes: int) -> Tensor:
        heads = out.shape[1]
        d_logits, ids = self._out(*out.shape), self._index(rows.edge_ids)
        out, grad = self._in(out), self._in(grad)
        partial = self._out(tasks.num_slots, heads, dtype=torch.float32)
        tiles = -(-heads // head_lanes)
        self._launch(
            "edge_softmax_bwd_kernel", tasks.num_tasks * self.options.group, tiles,
            *self._tasks(tasks), ids, out, grad, d_logits, partial, heads, head_lanes,
        )  # fmt: skip
        num_split = len(tasks.split_row)
        if num_split:
            sums = self._out(num_split, heads, dtype=torch.float32)
            self._launch(
                "sum_merge_f32_kernel", num_split * heads, 1,
                None, self._in(tasks.split_slots), num_split, partial, sums, heads,
            )  # fmt: skip
            self._launch(
                "edge_softmax_split_bwd_kernel", tasks.num_slots * self.options.group, tiles,
                self._index(tasks.begin), self._index(tasks.slot_task), self._in(tasks.slot_split), tasks.num_slots,
                ids, out, grad, d_logits, sums, heads, head_lanes,
            )  # fmt: skip
        return d_logits

    # ---- Fused attention

    def gat(
        self, rows: Rows, tasks: TaskList, x: Tensor, el: Tensor, er: Tensor, slope: float,
        dropout: Dropout = NO_DROPOUT,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        _, heads, width = x.shape
        out, lse, partials = self._attention_outputs(rows, tasks, heads, width)
        self._flat(
            "gat_fwd_kernel", tasks.num_tasks, heads * width,
            *self._tasks(tasks), *self._adjacency(rows), self._in(x), self._in(el), self._in(er), out, lse, *partials,
            heads, width, slope, *self._dropout(dropout),
        )  # fmt: skip
        self._merge("gat_merge_kernel", tasks, heads * width, *partials, out, lse, heads, width)
        return out, lse

    def gatv2(
        self, rows: Rows, tasks: TaskList, x_src: Tensor, x_dst: Tensor, attention: Tensor, slope: float,
        dropout: Dropout = NO_DROPOUT,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        _, heads, width = x_src.shape
        out, lse, partials = self._attention_outputs(rows, tasks, heads, width)
        self._by_head(
            "gatv2_fwd_kernel", tasks.num_tasks * heads, self._tiles(width),
            *self._tasks(tasks), *self._adjacency(rows), self._in(x_src), self._in(x_dst), self._in(attention),
            out, lse, *partials, heads, width, slope, *self._dropout(dropout),
        )  # fmt: skip
        self._merge("gat_merge_kernel", tasks, heads * width, *partials, out, lse, heads, width)
        return out, lse

    def gat_terms(self, grad: Tensor, out: Tensor, er: Tensor | None, lse: Tensor) -> Tensor:
        rows, heads, width = grad.shape
        terms = self._out(rows, heads, 4, dtype=torch.float32)
        arguments = [self._in(tensor) for tensor in (grad, out, er, lse)]
        self._by_head("gat_terms_kernel", rows * heads, 1, *arguments, terms, rows, heads, width)
        return terms

    def gat_backward(
        self, rows: Rows, tasks: TaskList, x: Tensor, grad: Tensor, el: Tensor, terms: Tensor, slope: float,
        dropout: Dropout = NO_DROPOUT,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Returns dx, d_el and d_logit, given the out-edges."""
        num_src, heads, width = x.shape
        dx, d_el = self._out(*x.shape), self._out(num_src, heads, dtype=torch.float32)
        d_logit = self._out(len(rows.indices), heads, dtype=torch.float32)
        partial = self._out(tasks.num_slots, heads, width, dtype=torch.float32)
        partial_el = self._out(tasks.num_slots, heads, dtype=torch.float32)
        self._by_head(
            "gat_bwd_kernel", tasks.num_tasks * heads, self._tiles(width),
            *self._tasks(tasks), *self._adjacency(rows), self._in(x), self._in(grad), self._in(el), self._in(terms),
            dx, d_el, d_logit, partial, partial_el, heads, width, slope, *self._dropout(dropout),
        )  # fmt: skip
        self._merge("sum_merge_kernel", tasks, heads * width, partial, dx, heads * width)
        num_split = len(tasks.split_row)
        if num_split:
            splits = self._index(tasks.split_row), self._in(tasks.split_slots), num_split
            self._launch("sum_merge_f32_kernel", num_split * heads, 1, *splits, partial_el, d_el, heads)
        return dx, d_el, d_logit

    def gatv2_src_backward(
        self, rows: Rows, tasks: TaskList, x_src: Tensor, x_dst: Tensor, attention: Tensor, grad: Tensor, terms: Tensor,
        slope: float, dropout: Dropout = NO_DROPOUT,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Returns dx_src and d_logit, given the out-edges."""
        _, heads, width = x_src.shape
        dx, d_logit = self._out(*x_src.shape), self._out(len(rows.indices), heads, dtype=torch.float32)
        partial = self._out(tasks.num_slots, heads, width, dtype=torch.float32)
        operands = [self._in(tensor) for tensor in (x_src, x_dst, attention, grad, terms)]
        self._by_head(
            "gatv2_src_bwd_kernel", tasks.num_tasks * heads, self._tiles(width),
            *self._tasks(tasks), *self._adjacency(rows), *operands, dx, d_logit, partial, heads, width, slope,
            *self._dropout(dropout),
        )  # fmt: skip
        self._merge("sum_merge_kernel", tasks, heads * width, partial, dx, heads * width)
        return dx, d_logit

    def gatv2_dst_backward(
        self, rows: Rows, tasks: TaskList, num_workers: int, x_src: Tensor, x_dst: Tensor, attention: Tensor,
        d_logit: Tensor, slope: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Returns dx_dst and the attention's gradient in num_workers parts, given the in-edges."""
        _, heads, width = x_dst.shape
        dx, parts = self._out(*x_dst.shape), self._out(num_workers, heads, width, dtype=torch.float32)
        partial = self._out(tasks.num_slots, heads, width, dtype=torch.float32)
        operands = [self._in(tensor) for tensor in (x_src, x_dst, attention, d_logit)]
        self._by_head(
            "gatv2_dst_bwd_kernel", num_workers * heads, self._tiles(width),
            *self._tasks(tasks), num_workers, *self._adjacency(rows), *operands, dx, partial, parts,
            heads, width, slope,
        )  # fmt: skip
        self._merge("sum_merge_kernel", tasks, heads * width, partial, dx, heads * width)
        return dx, parts

    # ---- Common

    def _launch(self, name: str, threads: int, tiles: int, *args: Tensor | int | float | None) -> None:
        self.kernels.launch(name, (-(-threads // BLOCK), tiles), (BLOCK,), args, self.seed)

    def _flat(self, name: str, units: int, columns: int, *args: Tensor | int | float | None) -> None:
        self._launch(name, units * self.options.group, -(-columns // (self.options.group * self.options.vec)), *args)

    def _by_head(self, name: str, units: int, tiles: int, *args: Tensor | int | float | None) -> None:
        self._launch(name, units * self.options.group, tiles, *args)

    def _merge(self, name: str, tasks: TaskList, columns: int, *args: Tensor | int | float | None) -> None:
        num_split = len(tasks.split_row)
        if num_split:
            splits = self._index(tasks.split_row), self._in(tasks.split_slots), num_split
            self._flat(name, num_split, columns, *splits, *args)

    def _tiles(self, width: int) -> int:
        return -(-width // (self.options.group * self.options.vec * self.options.packs))

    def _tasks(self, tasks: TaskList) -> Arguments:
        return self._index(tasks.begin), self._index(tasks.row), self._in(tasks.slot), tasks.num_tasks

    def _adjacency(self, rows: Rows) -> Arguments:
        return self._index(rows.indices), self._index(rows.edge_ids)

    def _dropout(self, dropout: Dropout) -> Arguments:
        keys, *rest = dropout.arguments()
        return [self._in(keys), *rest]

    def _attention_outputs(
        self, rows: Rows, tasks: TaskList, heads: int, width: int
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
        out, lse = self._out(rows.num_rows, heads, width), self._out(rows.num_rows, heads, dtype=torch.float32)
        partial = self._out(tasks.num_slots, heads, width, dtype=torch.float32)
        maxima, sums = (self._out(tasks.num_slots, heads, dtype=torch.float32) for _ in range(2))
        return out, lse, (partial, maxima, sums)

    def _out(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.place(poison(shape, dtype or self.options.features), True)

    def _in(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else self.place(tensor.contiguous(), False)

    def _index(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else self.place(tensor.to(self.options.index), False)
