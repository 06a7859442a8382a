# SPDX-License-Identifier: Apache-2.0
"""Copies of a model to run on made-up blocks, and running them without a trace in the process they run in."""

from __future__ import annotations

import contextlib
import copy
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from dgl.distributed import DistGraph, DistTensor, PartitionPolicy
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from dgl_hybrid.graph.layer_block import LayerBlock
from dgl_hybrid.graph.outside_state import outside_state_kept

ModelT = TypeVar("ModelT", bound=nn.Module)

_OF_ALL: tuple[type, ...] = (DistTensor, DistGraph, PartitionPolicy, LayerBlock)
"""What stands for something that processes share: on DistDGL's servers (a second `DistTensor` of one name would delete
that when it ends, and to delete is collective), or exchanges among ranks. A model may keep what it was called with."""


def without_ddp(model: nn.Module) -> nn.Module:
    """Returns the model inside of a `DistributedDataParallel`; any other one as it is."""
    inner: nn.Module = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return inner


def copy_of(model: ModelT) -> ModelT:
    """Returns a deep copy, so that weights, running statistics, gradients and hooks of the model stay as they are.

    A `DistEmbedding` inside is copied, so that it remembers its own reads alone, but the tensor it reads is the same:
    copies may read it and must not write to it. Not collective.
    """
    with _shared_by_copies(_OF_ALL), _copied_without_graphs():
        return copy.deepcopy(model)


@contextlib.contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """While copies of a model run: they may call parts of the model itself, by functions that it holds
    (`activation=lambda h: self.norm(h)`), which are not copied. Gradients, running statistics, attributes and what
    calls change outside of the model are put back after it.
    """
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    norms = [module for module in model.modules() if isinstance(module, _NormBase)]
    buffers = [(x, x.clone()) for norm in norms for x in norm.buffers(recurse=False) if not is_lazy(x)]
    try:
        with outside_state_kept(model), _attributes_kept(model):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):  # PyTorch's batch norm does not count its writes
                    buffer.copy_(before)


@contextlib.contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Puts back which objects modules have for their own attributes, and what their lists, dicts, sets and deques hold:
    hooks of a copy may write there (`lambda module, args, output: self.seen.append(output)`).
    """
    before = [
        (held, {name: (value, _content_of(value)) for name, value in held.items() if name not in _OF_EVERY_MODULE})
        for held in (vars(module) for module in model.modules())
    ]
    try:
        yield
    finally:
        for held, attributes in before:
            for name in [name for name in held if name not in attributes and name not in _OF_EVERY_MODULE]:
                del held[name]
            for name, (value, content) in attributes.items():
                held[name] = value
                if content is not None and not _holds_the_same(value, content):
                    value.clear()
                    (value.update if isinstance(value, (dict, set)) else value.extend)(content)


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _content_of(value: Any) -> Any:
    return copy.copy(value) if type(value) in (list, dict, set, deque) else None


def _holds_the_same(value: Any, content: Any) -> bool:
    """Whether both containers hold the same objects, which may be tensors: none is compared."""

    def objects(held: Any) -> list[int]:
        items = [*held, *held.values()] if isinstance(held, dict) else held
        found = [id(item) for item in items]
        return sorted(found) if isinstance(held, set) else found

    return objects(value) == objects(content)


@contextlib.contextmanager
def _copied_without_graphs() -> Iterator[None]:
    """Lets deep copies take what an earlier call has left (a weight that `weight_norm` makes of two, rows in a list to
    be looked at): it hangs on that call's graph of gradients, and no tensor of one is copied.
    """
    original: Callable[[Tensor, dict[int, Any]], Tensor] = Tensor.__deepcopy__

    def copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if tensor.is_leaf:
            return original(tensor, memo)
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone()
        left: Tensor = memo[id(tensor)]
        return left

    Tensor.__deepcopy__ = copied  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.__deepcopy__ = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _shared_by_copies(classes: tuple[type, ...]) -> Iterator[None]:
    """Lets deep copies hold the very objects of these classes that their original holds."""
    before = [vars(cls).get("__deepcopy__") for cls in classes]
    for cls in classes:
        cls.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for cls, method in zip(classes, before, strict=True):
            if method is None:
                del cls.__deepcopy__  # type: ignore[attr-defined]
            else:
                cls.__deepcopy__ = method  # type: ignore[attr-defined]


def seed_generators(seed: int) -> None:
    """Sets what `with_own_randomness` puts back without a device: `torch.manual_seed` would set the GPUs' as well."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@contextlib.contextmanager
def with_own_randomness(device: torch.device | None = None) -> Iterator[None]:
    """Puts the generators of PyTorch (the CPU's, and a given GPU's), Python and NumPy back to where they were.

    Ranks run a model on made-up blocks as often as they have time for. A model that draws from any of them, which layer
    to skip, say, would otherwise go different ways on different ranks from then on.
    """
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device is not None and device.type == "cuda" else []):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
