# SPDX-License-Identifier: Apache-2.0
"""Accompanies a model's forward: makes its randomness and its batch norm agree on all ranks, and weights its loss.

PyTorch's global module hooks tell when an outermost module is called with blocks of a loader. During that call a
`TorchFunctionMode` answers `F.dropout` and `F.batch_norm`; at its end the output gets the loss weight. Nothing of
PyTorch or DGL is replaced.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from dgl_hybrid.errors import BlockError
from dgl_hybrid.graph.call_template import flatten, map_leaves
from dgl_hybrid.graph.layer_block import LayerBlock
from dgl_hybrid.training.batch_norm import distributed_batch_norm
from dgl_hybrid.training.dropout import replicated_dropout
from dgl_hybrid.training.loss import is_weighting, weight_gradient
from dgl_hybrid.training.step import Step

_MODULE_FILE = nn.modules.module.__file__
_MAX_NODES_SEARCHED = 256

# Random functions on rows for which there is no replicated form; by their own rank's generator, masters and replicas
# would differ.
_UNREPLICATED: frozenset[Callable[..., Any]] = frozenset(
    {
        F.alpha_dropout,
        F.feature_alpha_dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.gumbel_softmax,
        F.rrelu,
        torch.alpha_dropout,
        torch.alpha_dropout_,
        torch.bernoulli,
        torch.dropout_,
        torch.feature_alpha_dropout,
        torch.feature_alpha_dropout_,
        torch.feature_dropout,
        torch.feature_dropout_,
        torch.multinomial,
        torch.normal,
        torch.poisson,
        torch.rand_like,
        torch.randint_like,
        torch.randn_like,
        torch.rrelu,
        torch.rrelu_,
        *(getattr(Tensor, name) for name in ("bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_")),
        *(getattr(Tensor, name) for name in ("log_normal_", "multinomial", "normal_", "random_", "uniform_")),
    }
)
# The same without a tensor of rows to tell them by: by the shape they are asked for.
_UNREPLICATED_FACTORIES: frozenset[Callable[..., Any]] = frozenset(
    {torch.normal, torch.rand, torch.randint, torch.randn, torch.randperm}
)
# Where those that `F` is made of say whether they train, if not by keyword.
_TRAINS_AT: dict[Callable[..., Any], int] = {
    torch.alpha_dropout: 2,
    torch.alpha_dropout_: 2,
    torch.dropout_: 2,
    torch.feature_alpha_dropout: 2,
    torch.feature_alpha_dropout_: 2,
    torch.feature_dropout: 2,
    torch.feature_dropout_: 2,
    torch.rrelu: 3,
    torch.rrelu_: 3,
}


def _attention_drops(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))


def _heads_drop(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    p = args[10] if len(args) > 10 else kwargs["dropout_p"]
    trains = args[13] if len(args) > 13 else kwargs.get("training", True)
    return bool(p) and bool(trains)


def _recurrence_drops(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Of `has_biases, num_layers, dropout, train`, which follow tensors: one more for packed sequences."""
    at = next((at for at, arg in enumerate(args) if isinstance(arg, bool)), len(args))
    return len(args) > at + 3 and args[at + 1] > 1 and bool(args[at + 2]) and bool(args[at + 3])


# Functions that drop out inside of themselves, where no mode sees it -> whether this call does.
_WITH_DROPOUT: dict[Callable[..., Any], Callable[[tuple[Any, ...], dict[str, Any]], bool]] = {
    F.scaled_dot_product_attention: _attention_drops,
    F.multi_head_attention_forward: _heads_drop,
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrence_drops),
}


class _RowMode(TorchFunctionMode):
    def __init__(self, step: Step, *, given_blocks: bool) -> None:
        super().__init__()
        self.step = step
        self.given_blocks = given_blocks

    def _is_ours(self) -> bool:
        """Whether this call works on blocks: given as arguments, or (inside an object of the script's) used by now.

        A module called between two steps that has nothing to do with the graph keeps its own dropout and batch norm.
        """
        return self.given_blocks or self.step.block_used

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout and (self._is_ours() or self._has_level_rows(args, kwargs)):
            return _dropout(self.step, *args, **kwargs)
        if func is F.batch_norm and self._is_ours():
            return _batch_norm(self.step, *args, **kwargs)
        if func is torch.dropout and (self._is_ours() or self._has_level_rows(args, kwargs)):
            return _dropout(self.step, *args, **{("training" if k == "train" else k): v for k, v in kwargs.items()})
        if self.step.communicator.world_size > 1:
            if func is Tensor.backward and self.step.last_block_used:
                return _backward(self.step, *args, **kwargs)
            if func in _UNREPLICATED:
                _refuse_random(self.step, func, args, kwargs)
            if func in _UNREPLICATED_FACTORIES:
                _refuse_factory(self.step, func, args, kwargs)
            if func in _WITH_DROPOUT and self._is_ours() and _WITH_DROPOUT[func](args, kwargs):
                _raise_unreplicated(func)
        return func(*args, **kwargs)

    def _has_level_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        x = args[0] if args else kwargs.get("input")
        return isinstance(x, Tensor) and x.dim() > 0 and self.step.is_level(len(x))


def _dropout(step: Step, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0.0:
        return input
    if step.current_block is not None and step.current_block.is_dry_run:
        step.ask_for_edge_keys(wanted=True)  # other ranks make this call on real edges
        step.next_random_call()
        return input
    keys = step.keys_of(input, "dropout")
    call_index = step.next_random_call()
    dropped = replicated_dropout(input, p, keys, seed=step.seed, step=step.number, call_index=call_index)
    return input.copy_(dropped) if inplace else dropped


def _backward(
    step: Step,
    loss: Tensor,
    gradient: Tensor | None = None,
    *args: Any,
    retain_graph: bool | None = None,
    **others: Any,
) -> None:
    """Of a module that computes and backs its loss inside its forward: its output is not weighted yet."""
    entering = torch.ones_like(loss) if gradient is None and loss.numel() == 1 else gradient
    weighted = entering if entering is None else entering * step.loss_weight  # None: PyTorch's error
    if args:
        loss.backward(weighted, *args, **others)
    else:
        loss.backward(weighted, retain_graph=retain_graph, **others)


def _batch_norm(
    step: Step,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    num_rows = len(input)
    if input.dim() != 2 or not step.is_level(num_rows):
        raise BlockError(
            f"batch norm inside the model: a tensor of shape {tuple(input.shape)} does not hold one row for each "
            f"vertex of a level {sorted(set(step.level_sizes))}"
        )
    return distributed_batch_norm(
        input,
        step.owned[:num_rows].to(input.device),
        running_mean,
        running_var,
        weight,
        bias,
        training=True,
        momentum=momentum,
        eps=eps,
        communicator=step.communicator,
        num_vertices=step.num_vertices,
    )


def _refuse_random(step: Step, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tensor = next((x for x in (*args[:2], *kwargs.values()) if isinstance(x, Tensor)), None)
    at = _TRAINS_AT.get(func, len(args))
    trains = args[at] if at < len(args) else kwargs.get("training", kwargs.get("train", True))
    if tensor is not None and tensor.dim() and step.has_rows(len(tensor)) and trains:
        _raise_unreplicated(func)


def _refuse_factory(step: Step, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    shape = kwargs.get("size")
    if shape is None and func in (torch.rand, torch.randn):
        shape = args[0] if args and not isinstance(args[0], int) else args
    elif shape is None:
        shape = next((arg for arg in args if isinstance(arg, (tuple, list))), args[:1] or (kwargs.get("n"),))
    if len(shape) and isinstance(shape[0], int) and step.has_rows(shape[0]):
        _raise_unreplicated(func)


def _raise_unreplicated(func: Any) -> NoReturn:
    raise BlockError(
        f"{getattr(func, '__name__', func)} draws from each rank's own generator, so a row of a vertex or an edge and "
        f"its replicas would differ. Use nn.Dropout, which is replicated, or draw from a function of the ids."
    )


class _Session:
    """The state of the hooks: which call is outermost, and for which step."""

    def __init__(self) -> None:
        self.installed: list[Any] = []
        self.followed: list[weakref.ref[Step]] = []
        """Steps that may still be in use, the one that was yielded last at the end."""
        self.outermost: nn.Module | None = None
        self.depth = 0
        self.is_paused = False
        self.step: Step | None = None
        self.mode: _RowMode | None = None

    def follow(self, step: Step) -> None:
        self.followed = [ref for ref in self.followed if ref() is not None and ref() is not step]
        self.followed.append(weakref.ref(step))
        if self.depth > 0 and not _is_running(self.outermost):
            self._end()  # Ctrl-C ended the call: PyTorch calls forward hooks after an `Exception` only

    def latest(self) -> Step | None:
        """Returns the step that was yielded last, of those that anybody still holds."""
        return next((step for step in (ref() for ref in reversed(self.followed)) if step is not None), None)

    def _end(self) -> None:
        if self.mode is not None:
            self.mode.__exit__(None, None, None)
        self.outermost = self.step = self.mode = None
        self.depth = 0

    def check_followed(self, step: Step) -> None:
        """Raises if blocks are used inside a call that is taken to be about those of another loader."""
        is_given = self.mode is not None and self.mode.given_blocks
        if self.depth > 0 and self.step is not step and not is_given and not self.is_paused:
            raise BlockError(
                f"{type(self.outermost).__name__} uses blocks that it was not given as arguments, after another loader "
                f"has yielded: dropout, batch norm and the loss weight would be for that one's. Pass the blocks as "
                f"arguments, in lists, tuples or dicts if need be."
            )

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.depth > 0 and self._begins_inside(args):
            self._end()
        if self.depth == 0:
            if self.is_paused:
                return
            arguments = (args, _keyword_arguments_of_call())
            given = _find_step(arguments)
            step = given or self.latest()
            if step is None:
                return
            _check_not_weighted(module, arguments)
            self.outermost, self.step = module, step
            step.begin_call()
            self.mode = _RowMode(step, given_blocks=given is not None)
            self.mode.__enter__()
        self.depth += 1

    def _begins_inside(self, args: tuple[Any, ...]) -> bool:
        """Whether the call that is taken for outermost runs epochs of a loader, and this one is about the blocks that
        were yielded since it began.
        """
        if self.mode is None or self.mode.given_blocks or self.mode.step.block_used:
            return False
        given = _find_step((args, _keyword_arguments_of_call()))
        return given is not None and given is not self.step and given is self.latest()

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self.depth == 0:
            return None
        self.depth -= 1
        if self.depth > 0:
            return None
        step = self.step
        assert step is not None
        self._end()
        if output is None or not step.last_block_used:
            return None
        # A module that runs inside a backward pass is a recomputation: its output was weighted in the first run,
        # unless that ran without gradients (a reentrant checkpoint around the whole model).
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward:
            return self._weighted(output, step) if module in step.called_without_grad else None
        if torch.is_grad_enabled():
            step.was_trained = True
        else:
            step.called_without_grad.add(module)
        if step.on_call is not None:
            step.on_call(module, args, kwargs)
        return self._weighted(output, step)

    @staticmethod
    def _weighted(output: Any, step: Step) -> Any:
        if step.communicator.world_size == 1:
            return None  # the weight is one
        num_tensors = 0

        def weigh(value: Any) -> Any:
            nonlocal num_tensors
            num_tensors += isinstance(value, Tensor)
            return _weight(value, step.loss_weight)

        weighted = map_leaves(output, weigh)
        if num_tensors == 0 and torch.is_grad_enabled():
            raise BlockError(
                f"the model returned a {type(output).__name__}, in which no tensor can be found: the loss weight of "
                f"this rank could not be applied to it. Return tensors, in tuples, lists, dicts or dataclasses."
            )
        return weighted


_session = _Session()


def follow(step: Step, blocks: Iterable[LayerBlock]) -> None:
    """Begins to accompany the forwards of the blocks of a step, which a loader is about to yield."""
    if not _session.installed:
        _session.installed.append(register_module_forward_pre_hook(lambda module, args: _session.enter(module, args)))
        _session.installed.append(
            register_module_forward_hook(
                # After an exception PyTorch calls it without keyword arguments.
                lambda module, args, *rest: _session.leave(module, args, rest[0] if rest[1:] else {}, rest[-1]),
                with_kwargs=True,
                always_call=True,
            )
        )
    _session.follow(step)
    step.on_use = _session.check_followed
    for block in blocks:
        block.on_use = step.note_use
        block.on_edge_result = step.note_edge_result
        block.on_edge_dropout = step.edge_dropout


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Leaves module calls alone inside: for running a model on blocks that are not a loader's."""
    before, _session.is_paused = _session.is_paused, True
    try:
        yield
    finally:
        _session.is_paused = before


def stop() -> None:
    """Removes the hooks from PyTorch."""
    while _session.installed:
        _session.installed.pop().remove()


def _find_step(args: Any) -> Step | None:
    for value in flatten(args):
        if isinstance(value, LayerBlock):
            followed_by = getattr(value.on_use, "__self__", None)  # copies (`.to`, `.int()`) have it, too
            if isinstance(followed_by, Step):
                return followed_by
    return None


def _is_running(module: nn.Module | None) -> bool:
    """Whether a call of this module is on the stack of this thread."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename == _MODULE_FILE and frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back
    return False


def _keyword_arguments_of_call() -> Any:
    """The keyword arguments of the module call whose pre-hook is running; PyTorch's global pre-hooks are not told."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename == _MODULE_FILE:
            return frame.f_locals.get("kwargs") or {}
        frame = frame.f_back
    return {}


def _weight(tensor: Any, weight: float) -> Any:
    if not isinstance(tensor, Tensor) or not tensor.requires_grad:
        return tensor
    return weight_gradient(tensor, weight)


def _check_not_weighted(module: nn.Module, arguments: Any) -> None:
    given = [value.grad_fn for value in flatten(arguments) if isinstance(value, Tensor) and value.grad_fn is not None]
    if given and any(parameter.requires_grad for parameter in module.parameters()) and _comes_from_weighted(given):
        raise BlockError(
            f"{type(module).__name__} has parameters and gets the output of the module that used the last block. The "
            f"loss weight of this rank is applied to that output, so these parameters would miss it. Put both in one "
            f"nn.Module and call that."
        )


def _comes_from_weighted(nodes: Sequence[Any]) -> bool:
    """Whether a few operations at most (an activation, a slice) lie between these and a weighted output."""
    pending, seen = list(nodes), set(nodes)
    while pending and len(seen) < _MAX_NODES_SEARCHED:
        node = pending.pop(0)
        if is_weighting(node):
            return True
        following = [parent for parent, _ in node.next_functions if parent is not None and parent not in seen]
        pending.extend(following)
        seen.update(following)
    return False
