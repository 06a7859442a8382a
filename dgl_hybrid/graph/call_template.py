# SPDX-License-Identifier: Apache-2.0
"""`CallTemplate`: how a model is called, without the tensors, so that the call can be repeated on other blocks."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dgl_hybrid.graph.layer_block import LayerBlock
from dgl_hybrid.graph.static_results import most_entries_of

SAMPLED_ROWS = 1024
_FEATURE_NAMES = ("feat", "features", "feature", "x", "h")


@dataclass(frozen=True)
class _BlockAt:
    index: int


@dataclass(frozen=True)
class _RowsOf:
    """A tensor argument by what its rows are: the vertices of a level, or the edges of a layer."""

    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_static: bool
    """The same tensor in every epoch."""
    zeros_like: Tensor | None = None
    """Rows that are static and mostly zeros, or some of them: products with such go by their entries."""
    last_level: int | None = None
    """The highest level that has as many rows, if `index` is a lower one."""


@dataclass(frozen=True)
class _OnDevice:
    """A tensor argument that is no rows and lay on the model's device, not in host memory, where this copy of it is."""

    value: Tensor


FieldShapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, kw_only=True)
class StaticFields:
    """Fields that a loader puts into blocks before the model runs: name to row shape and dtype."""

    source: FieldShapes
    """Of the first block."""
    destination: FieldShapes
    """Of the last block."""
    edge: FieldShapes
    """Of every block."""


@dataclass(frozen=True)
class CallTemplate:
    """The arguments of a model's call with blocks and row tensors replaced by what they stand for."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fields: StaticFields
    autocast: torch.dtype | None = None
    """Of the `torch.autocast` that the call is made under; None: under none."""

    @staticmethod
    def of_call(
        args: tuple[Any, ...], kwargs: dict[str, Any], blocks: Sequence[LayerBlock], fields: StaticFields
    ) -> CallTemplate:
        """Remembers a call that is being made, without keeping its rows (but a few of sparse features). Other tensors
        among the arguments are kept as they are, for as long as the template is: the call cannot be made without them.
        """
        num_seen: dict[int, int] = {}
        # The script may have moved the blocks itself: then those that the model is given tell where it runs.
        runs_on = blocks[0].device

        def abstract(value: Any) -> Any:
            nonlocal runs_on
            if isinstance(value, LayerBlock):
                runs_on = value.device
                return _BlockAt(value.layer - 1)
            if isinstance(value, Tensor):
                return _abstract_tensor(value, blocks, num_seen)
            return value

        abstract_args, abstract_kwargs = map_leaves(args, abstract), map_leaves(kwargs, abstract)
        return CallTemplate(abstract_args, abstract_kwargs, fields, _autocast_dtype(runs_on.type))

    @staticmethod
    def of_convention(
        node_fields: Mapping[str, Any], fields: StaticFields, device_type: str = "cpu", *, is_static: bool = True
    ) -> CallTemplate:
        """`model(blocks, x)` with `x` the prefetched feature, or the one with a customary name, as if it were made now.

        Args:
            is_static: `x` will be the same tensor in every epoch, and no copy that the script makes.

        Raises:
            ValueError: If no feature can be told.
        """
        names = [name for name in (*fields.source, *_FEATURE_NAMES) if name in node_fields]
        if not names:
            raise ValueError(
                f"cannot tell which node field is the model's input: name it in the sampler's prefetch_node_feats (got "
                f"fields {sorted(node_fields)}), or leave out `model` to plan from the first forward"
            )
        local = node_fields[names[0]].local
        zeros_like = local if _is_sparse(local) else None
        x = _RowsOf(
            "level",
            0,
            tuple(local.shape[1:]),
            local.dtype,
            requires_grad=False,
            is_static=is_static,
            zeros_like=zeros_like,
        )
        return CallTemplate((_ALL_BLOCKS, x), {}, fields, _autocast_dtype(device_type))

    def casting(self, device_type: str) -> contextlib.AbstractContextManager[object]:
        """What the call is to be repeated under on a device, whatever this thread is under at present."""
        return torch.autocast(device_type, dtype=self.autocast or torch.bfloat16, enabled=self.autocast is not None)

    def readings(self) -> list[CallTemplate]:
        """Returns what the call may mean, likeliest first: this template, and where levels have equally many rows, as
        with all nodes for seeds, the one in which the second tensor with so many rows and those after it are of the
        highest of them: labels, a mask.
        """
        num_unclear = 0

        def of_seeds(value: Any) -> Any:
            nonlocal num_unclear
            if not isinstance(value, _RowsOf) or value.last_level is None:
                return value
            num_unclear += 1
            return value if num_unclear == 1 else dataclasses.replace(value, index=value.last_level)

        args, kwargs = map_leaves((self.args, self.kwargs), of_seeds)
        return [self, dataclasses.replace(self, args=args, kwargs=kwargs)] if num_unclear > 1 else [self]

    def levels(self) -> list[int]:
        """Returns the level of each tensor with a row for each vertex of one, in their order; -1 for other leaves."""
        leaves = flatten((self.args, self.kwargs))
        return [leaf.index if isinstance(leaf, _RowsOf) and leaf.kind == "level" else -1 for leaf in leaves]

    def at_levels(self, levels: Sequence[int]) -> CallTemplate:
        """Returns it with the levels that another rank has found for the same call, itself where that is another."""
        found = self.levels()
        if len(found) != len(levels) or [level < 0 for level in found] != [level < 0 for level in levels]:
            return self
        following = iter(levels)

        def moved(value: Any) -> Any:
            level = next(following)
            return dataclasses.replace(value, index=level) if level >= 0 else value

        args, kwargs = map_leaves((self.args, self.kwargs), moved)
        return dataclasses.replace(self, args=args, kwargs=kwargs)

    def has_blocks_of_all(self, num_layers: int) -> bool:
        """Whether the blocks of all layers are arguments, so that the call can be made with others in their place."""
        leaves = flatten((list(self.args), list(self.kwargs.values())))
        given = {leaf.index for leaf in leaves if isinstance(leaf, _BlockAt)}
        return any(leaf is _ALL_BLOCKS for leaf in leaves) or given == set(range(num_layers))

    @property
    def has_sparse_rows(self) -> bool:
        """Whether an argument is mostly zeros, so that what a layer makes of it depends on which rows it sums."""
        leaves = flatten((list(self.args), list(self.kwargs.values())))
        return any(isinstance(leaf, _RowsOf) and leaf.zeros_like is not None for leaf in leaves)

    def bind(
        self, blocks: list[LayerBlock], generator: torch.Generator, own_rows: Tensor | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """Returns arguments for other blocks, row tensors filled with random numbers (integers with zeros).

        Args:
            blocks: One for each layer.
            generator: Of the numbers.
            own_rows: (n,) positions, among the vertices a rank owns, of what the first rows of the first block stand
                for; repeated. They have zeros where those have. None: some of them do.

        Returns:
            `(args, kwargs, static)`, `static` being the tensors that would be the same in every epoch.
        """
        static: list[Tensor] = []
        device = blocks[0].device
        for data, shapes, rows in (
            (blocks[0].srcdata, self.fields.source, blocks[0].num_src_nodes()),
            (blocks[-1].dstdata, self.fields.destination, blocks[-1].num_dst_nodes()),
            *((block.edata, self.fields.edge, block.num_edges()) for block in blocks),
        ):
            for name, (shape, dtype) in shapes.items():
                static.append(_random_rows(rows, shape, dtype, generator).to(device))
                data[name] = static[-1]

        def concrete(value: Any) -> Any:
            if value is _ALL_BLOCKS:
                return blocks
            if isinstance(value, _BlockAt):
                return blocks[value.index]
            if isinstance(value, _RowsOf):
                if value.kind == "level":
                    rows = blocks[0].num_src_nodes() if value.index == 0 else blocks[value.index - 1].num_dst_nodes()
                else:
                    rows = blocks[value.index].num_edges()
                x = _random_rows(rows, value.shape, value.dtype, generator)
                if value.zeros_like is not None and rows:
                    x[_rows_of(value.zeros_like, rows, own_rows) == 0] = 0.0
                x = x.to(device).requires_grad_(value.requires_grad)
                if value.is_static:
                    static.append(x)
                return x
            # What the model was given in host memory stays there: lengths, say, which PyTorch takes nowhere else.
            return value.value.to(device) if isinstance(value, _OnDevice) else value

        return map_leaves(self.args, concrete), map_leaves(self.kwargs, concrete), static


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


_ALL_BLOCKS = object()


def _random_rows(num_rows: int, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype == torch.bool:  # a mask: of none, or of all, what is made of rows may be NaN
        rows = torch.arange(num_rows).reshape(-1, *(1,) * len(shape)) % 2 == 0
        return rows.expand(num_rows, *shape).clone()
    if not dtype.is_floating_point:
        return torch.zeros((num_rows, *shape), dtype=dtype)
    # Positive, since edge weights may have to be.
    return torch.empty((num_rows, *shape), dtype=dtype).uniform_(0.5, 1.5, generator=generator)


def _is_sparse(x: Tensor) -> bool:
    most = most_entries_of(x)
    if most == 0.0 or not x.numel():
        return False
    some = x[:: max(1, len(x) // SAMPLED_ROWS)]
    return int(torch.count_nonzero(some)) <= most * some.numel()


def _rows_of(known: Tensor, count: int, positions: Tensor | None) -> Tensor:
    if positions is None or int(positions.max()) >= len(known):
        # In float64: narrower ones round the last position of many rows to the one behind it.
        positions = torch.linspace(0, len(known) - 1, min(count, len(known)), dtype=torch.float64).long()
    return known[positions[torch.arange(count) % len(positions)]]


def _abstract_tensor(value: Tensor, blocks: Sequence[LayerBlock], num_seen: dict[int, int]) -> Any:
    """Tells rows by their number; layers with equally many edges take such tensors in the order they come. What is no
    rows is returned itself.
    """
    rows = len(value) if value.dim() else -1
    sizes = [blocks[0].num_src_nodes(), *(block.num_dst_nodes() for block in blocks)]
    edges = [block.num_edges() for block in blocks]
    last_level = None
    if rows in sizes:
        kind, index = "level", sizes.index(rows)
        highest = max(level for level, size in enumerate(sizes) if size == rows)
        last_level = highest if highest > index else None
    elif rows in edges:
        candidates = [index for index, count in enumerate(edges) if count == rows]
        kind, index = "layer", candidates[num_seen.get(rows, 0) % len(candidates)]
        num_seen[rows] = num_seen.get(rows, 0) + 1
    else:
        return value.detach() if value.device.type == "cpu" else _OnDevice(value.detach().cpu())
    is_static = blocks[0].static_results.are_static((value,))
    zeros_like = None
    if is_static and (kind, index) == ("level", 0) and _is_sparse(value):
        zeros_like = value.detach()[:: max(1, len(value) // SAMPLED_ROWS)].cpu().clone()
    shape = tuple(value.shape[1:])
    return _RowsOf(kind, index, shape, value.dtype, value.requires_grad, is_static, zeros_like, last_level)


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Applies `function` to what nested tuples, lists, dictionaries, dataclasses and `SimpleNamespace`s hold, keeping
    their kinds.

    A dataclass or namespace that is met again inside of itself, or again at all, is mapped once.
    """
    return _map_leaves(value, function, {})


def _map_leaves(value: Any, function: Callable[[Any], Any], done: dict[int, Any]) -> Any:
    mapped: Any
    if _is_record(value):
        if id(value) in done:
            return done[id(value)]
        mapped = done[id(value)] = copy.copy(value)
        for name, item in _fields_of(value):
            object.__setattr__(mapped, name, _map_leaves(item, function, done))  # frozen ones, too
        return mapped
    if isinstance(value, dict):
        mapped = copy.copy(value)
        for key, item in value.items():
            mapped[key] = _map_leaves(item, function, done)
        return mapped
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_leaves(item, function, done) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_map_leaves(item, function, done) for item in value)
    return function(value)


def flatten(value: Any) -> list[Any]:
    """Lists what nested tuples, lists, dictionaries, dataclasses and namespaces hold, the last two once."""
    leaves: list[Any] = []
    _flatten(value, leaves, {})
    return leaves


def float_tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors of floating-point numbers among the leaves."""
    return [x for x in flatten(value) if isinstance(x, Tensor) and x.is_floating_point()]


def _flatten(value: Any, leaves: list[Any], done: dict[int, Any]) -> None:
    if _is_record(value):
        if id(value) not in done:
            done[id(value)] = value
            for _, item in _fields_of(value):
                _flatten(item, leaves, done)
    elif isinstance(value, dict):
        for item in value.values():
            _flatten(item, leaves, done)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _flatten(item, leaves, done)
    else:
        leaves.append(value)


def _is_record(value: Any) -> bool:
    """Whether it is an instance of a dataclass, or a namespace; dictionaries that are one, too, are dictionaries."""
    is_kind = dataclasses.is_dataclass(value) or isinstance(value, SimpleNamespace)
    return is_kind and not isinstance(value, (type, dict, _BlockAt, _RowsOf, _OnDevice))


def _fields_of(record: Any) -> list[tuple[str, Any]]:
    """Those that are there: a field may be set later than by its constructor, or never."""
    if isinstance(record, SimpleNamespace) and not dataclasses.is_dataclass(record):
        return list(vars(record).items())
    names = [entry.name for entry in dataclasses.fields(record)]
    return [(name, getattr(record, name)) for name in names if hasattr(record, name)]


def shape_of(value: Any) -> tuple[int, ...]:
    """Returns the dimensions of a tensor, or of rows that a template stands for."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, _OnDevice):
        return tuple(value.value.shape)
    return value.shape if isinstance(value, _RowsOf) else ()
