# SPDX-License-Identifier: Apache-2.0
"""Accompanies a model's forward: makes its randomness and its batch norm agree on all ranks, and weights its loss.

PyTorch's global module hooks tell when an outermost module is called with blocks of a loader. During that call a
`TorchFunctionMode` answers `F.dropout` and `F.batch_norm`; at its end the output gets the loss weight. Nothing of
PyTorch or DGL is replaced.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from dgl import DGLError
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import checkpoint

from dgl_hybrid.errors import BlockError
from dgl_hybrid.graph.call_template import flatten, map_leaves
from dgl_hybrid.graph.layer_block import LayerBlock
from dgl_hybrid.graph.untraced import settle_untraced, untraced
from dgl_hybrid.graph.watched_modules import OWN_HOOKS
from dgl_hybrid.training.loss import LossWeight, is_weighting, weight_gradient
from dgl_hybrid.training.row_mode import RowMode
from dgl_hybrid.training.step import Step, common_weight

_MODULE_FILE = nn.modules.module.__file__
_CHECKPOINT_FILE = checkpoint.__file__
_MAX_NODES_SEARCHED = 256


@dataclass
class _Part:
    """A module by a step that it was called for."""

    step: weakref.ref[Step]
    is_ours: bool
    """The outermost call, then, was known to work on the step's blocks, at one of the module's calls at least."""


class _Call(threading.local):
    """The outermost call of this thread. Another thread may run modules beside it, that have nothing to do with it."""

    def __init__(self) -> None:
        super().__init__()
        self.has_used = False
        """A module of this thread has used blocks."""
        self.forget()

    def forget(self) -> None:
        self.outermost: nn.Module | None = None
        self.depth = 0
        self.had_used: list[bool] = []
        """Of each of these calls, the outermost first: whether blocks had been used before it began."""
        self.step: Step | None = None
        self.mode: RowMode | None = None
        self.used: list[Step] = []
        """Steps whose blocks it has used."""
        self.weighed: list[Step] = []
        """Steps whose last block it has used where gradients are taken: its output gets their loss weight."""


@untraced("enter", "leave", "check_step")
class _Session:
    """The state of the hooks: which call is outermost, and for which step."""

    def __init__(self) -> None:
        self.installed: list[Any] = []
        self.followed: list[weakref.ref[Step]] = []
        """Steps that may still be in use, the one that was yielded last at the end."""
        self.call = _Call()
        self.is_paused = False
        self.parts: weakref.WeakKeyDictionary[nn.Module, list[_Part]] = weakref.WeakKeyDictionary()
        """Modules that were called inside of a followed call which trains; for the step that comes last, at the end."""
        self.is_used = False
        """A module of any thread has used blocks."""

    def follow(self, step: Step) -> None:
        self.followed = [ref for ref in self.followed if ref() is not None and ref() is not step]
        self.followed.append(weakref.ref(step))
        if self.call.depth > 0 and not _is_running(self.call.outermost):
            self._end()  # Ctrl-C ended the call: PyTorch calls forward hooks after an `Exception` only

    def latest(self) -> Step | None:
        """Returns the step that was yielded last, of those that anybody still holds."""
        return next((step for step in (ref() for ref in reversed(self.followed)) if step is not None), None)

    def is_amid_another(self, step: Step) -> bool:
        """Whether a script is in the loop of an epoch of which another step is."""
        others = (ref() for ref in self.followed)
        return any(x is not None and x is not step and not (x.is_over or x.is_left or x.is_replaced) for x in others)

    def _steps_of_piece(self) -> list[Step]:
        """Returns the steps that a call may be about that is given no blocks, the latest first: those that take pieces,
        else the latest; none in a thread that has nothing to do with it. What a backward repeats in threads of its own
        is in `parts`. None is of a plan that was replaced: Dynamo's cache may hold one after its loader is gone.
        """
        held = (ref() for ref in reversed(self.followed))
        steps = [step for step in held if step is not None and not step.is_retired]
        first = next((step for step in steps if step.takes_pieces), steps[0] if steps else None)
        if first is None or not self._is_of_this_thread(first):
            return []
        open_steps = (step for step in steps if step is not first and step.takes_pieces and not step.is_replaced)
        return [first, *(step for step in open_steps if self._is_of_this_thread(step))]

    def _is_of_this_thread(self, step: Step) -> bool:
        """Whether modules that this thread calls may be about a step, although they are given no blocks."""
        this = threading.current_thread()
        if this is step.thread or self.call.has_used:
            return True
        return not self.is_used and this is threading.main_thread()  # another thread fetches its batches

    def _end(self) -> None:
        if self.call.mode is not None:
            self.call.mode.is_over = True
            self.call.mode.__exit__(None, None, None)
        self.call.forget()

    @contextlib.contextmanager
    def _outside(self) -> Iterator[None]:
        """Takes no call for running inside: modules that are called there are outermost themselves."""
        call, step = vars(self.call).copy(), self.call.step
        used = None if step is None else step.uses()
        self.call.forget()
        try:
            yield
        finally:
            has_used = self.call.has_used
            vars(self.call).update(call, has_used=has_used)
            if step is not None and used is not None:
                step.set_uses(used)

    def check_followed(self, step: Step, block: LayerBlock, operands: Sequence[Tensor]) -> None:
        """Raises if blocks are used inside a call that is taken to be about others: another loader's, or made-up ones.

        Raises:
            BlockError: In the first case.
            RuntimeError: In the second: by one rank alone they must not exchange anything.
        """
        if self.is_paused:
            raise RuntimeError("called with other blocks, the model uses those of an epoch, which some object holds")
        call = self.call
        if call.depth == 0:
            is_known = self._is_of_this_thread(step) or _is_in_backward()
            if not is_known and next(_module_calls(), None) is not None:
                raise BlockError(
                    "a module uses blocks that it was not given as arguments, in a thread that has not used any so "
                    "far: dropout, batch norm and the loss weight would be missed. Pass the blocks as arguments."
                )
            if torch.is_grad_enabled():
                step.note_training_use(None, lambda: [*block.fields_to_train(), *operands])
            return
        is_given = call.mode is not None and call.mode.given_blocks
        if call.step is not step and not is_given:
            raise BlockError(
                f"{type(call.outermost).__name__} uses blocks that it was not given as arguments, after another loader "
                f"has yielded: dropout, batch norm and the loss weight would be for that one's. Pass the blocks as "
                f"arguments, in lists, tuples or dicts if need be."
            )
        call.has_used = self.is_used = True
        if not any(other is step for other in call.used):
            call.used.append(step)
        if step.is_last(block) and not any(other is step for other in call.weighed) and _may_have_gradients():
            call.weighed.append(step)
        if call.outermost is not None and torch.is_grad_enabled():
            step.note_training_use(call.outermost, call.outermost.parameters)

    def check_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Raises where an optimizer steps by gradients that have no loss weight.

        On every rank, as what uses the blocks follows from the program. Not as gradients pass, which may be of anything
        (saliency, a term of the script's own) and on one rank alone.
        """
        latest = self.latest()
        for step in (ref() for ref in self.followed):
            if step is None or not self._is_of_this_thread(step):
                continue
            parameters = (x for group in optimizer.param_groups for x in group["params"])
            if not step.misses_weight(parameters, is_latest=step is latest):
                continue
            raise BlockError(
                f"an optimizer steps by gradients that lack the loss weight of this rank: it is applied to what a "
                f"module returns that uses the block of layer {len(step.level_sizes) - 1}, the last one, and none has "
                f"used it in this epoch. Make the loader for as many layers as the model has (the length of the "
                f"sampler's fanouts), and use the last block inside of a module. Or weight the loss yourself: "
                f"FullGraphLoader(..., loss_reduction='weighted'), and multiply the mean over this rank's seeds by the "
                f"number of ranks times this rank's share of all seeds."
            )

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        call = self.call
        # Ctrl-C may have ended the call that is taken for outermost: PyTorch calls forward hooks after an `Exception`
        # only. No other module is being called then.
        if call.depth > 0 and (not _is_inside_another_call() or self._begins_inside(args)):
            self._end()
        if call.depth == 0:
            if self.is_paused:
                return
            _install()  # a script may compile its model once it has a batch to show it
            arguments = (args, _keyword_arguments_of_call())
            given = steps_of(arguments)
            # A checkpoint may repeat a part of a model after another loader has yielded, which is for the step that it
            # was for, and has no need for blocks.
            parts = self._parts_of(module) if not given and _is_in_backward() else []
            repeated = [step for part in reversed(parts) if (step := part.step()) is not None]
            steps = given or repeated or self._steps_of_piece()
            if not steps:
                return
            step = steps[0]
            _check_not_weighted(module, arguments)
            call.outermost, call.step = module, step
            step.begin_call()
            call.mode = RowMode(
                step,
                others=steps[1:],
                used=lambda: call.used,
                given_blocks=bool(given),
                outside=self._outside,
                weigh=self._weigh,
                is_in_call=_is_in_call,
                is_in_backward=bool(repeated),
                is_repeated=bool(repeated) and all(part.is_ours for part in parts),
                may_be_piece=bool(repeated) or step.takes_pieces,
            )
            call.mode.__enter__()
        may_be_repeated = (module.training or torch.is_grad_enabled()) and not _is_in_backward()
        if may_be_repeated and call.mode is not None and call.step is not None:
            self._note_part(module, call.step, is_ours=call.mode.is_ours)
        call.depth += 1
        call.had_used.append(call.step is not None and bool(call.step.layers_used))
        _check_batch_norm(module, call)
        _check_in_degrees(module, args)

    def _parts_of(self, module: nn.Module) -> list[_Part]:
        return [part for part in self.parts.get(module, ()) if part.step() is not None]

    def _note_part(self, module: nn.Module, step: Step, *, is_ours: bool) -> None:
        parts = self.parts.get(module)
        if parts and parts[-1].step() is step:
            parts[-1].is_ours |= is_ours
            return
        parts = self._parts_of(module)
        was_ours = any(part.step() is step and part.is_ours for part in parts)
        # What went back in an epoch that is over is not repeated any more, and its rows could be taken for these.
        pending = [part for part in parts if (x := part.step()) is not None and x is not step and not x.is_done]
        self.parts[module] = [*pending, _Part(weakref.ref(step), is_ours or was_ours)]

    def _begins_inside(self, args: tuple[Any, ...]) -> bool:
        """Whether the call that is taken for outermost runs epochs of a loader, and this one is about the blocks that
        were yielded since it began.
        """
        call = self.call
        if call.mode is None or call.mode.given_blocks or call.mode.step.block_used:
            return False
        given = steps_of((args, _keyword_arguments_of_call()))
        return bool(given) and given[0] is not call.step and given[0] is self.latest()

    def leave(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        """Args: keyword arguments, which PyTorch leaves out after an exception, and the output."""
        has_raised = not rest[1:]
        kwargs, output = ({}, rest[0]) if has_raised else rest
        call = self.call
        if call.depth == 0:
            return None
        call.depth -= 1
        had_used = call.had_used.pop()
        if call.depth > 0:
            if not had_used and not has_raised:
                self._tell_of_inner_call(module, args, kwargs)
            return None
        step, weighed = call.step, call.weighed
        assert step is not None
        given_only = call.mode is not None and call.mode.given_blocks and not call.used
        self._end()
        if given_only and torch.is_grad_enabled() and not _is_in_backward():
            # Its loss is of this step's seeds as any other's, and nothing weights it.
            step.note_training_use(module, module.parameters)
        if has_raised or not (step.last_block_used or weighed):
            return None
        weighed = weighed or [step]
        # A module that runs inside a backward pass is a recomputation: its output was weighted in the first run,
        # unless that ran without gradients (a reentrant checkpoint around the whole model).
        if _is_in_backward():
            is_owed = output is not None and any(
                ctx in step.unweighted_functions for ctx in _functions_that_run("backward")
            )
            return self._weighted(output, module, step, weighed) if is_owed else None
        if torch.is_grad_enabled():
            for used in weighed:
                used.was_trained = True
            _notice_backward(output, weighed)
        else:
            step.unweighted_functions.update(_functions_that_run("forward"))
        if step.on_call is not None and step.last_block_used:
            step.on_call(step, module, args, kwargs)
        if output is None:
            return None  # a step that has backed its loss itself, or an evaluation
        return self._weighted(output, module, step, weighed)

    def _tell_of_inner_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        outermost, step = self.call.outermost, self.call.step
        if outermost is None or step is None or step.on_inner_call is None or not step.all_blocks_used:
            return
        if not _is_in_backward():
            step.on_inner_call(step, outermost, module, args, kwargs)

    def _weigh(self) -> LossWeight | None:
        """Returns the weight of a loss that the outermost call backs itself, None if it has used no last block."""
        call = self.call
        weighed = call.weighed or ([call.step] if call.step is not None and call.step.last_block_used else [])
        for step in weighed:
            step.has_gone_back = True
        return _weigh(weighed, call.outermost) if weighed else None

    def _weighted(self, output: Any, module: nn.Module, step: Step, weighed: Sequence[Step]) -> Any:
        """Returns the output with the loss weight.

        Args:
            step: Of the blocks that the module was given, or of the rows.
            weighed: Whose loss is made of the output: mostly that step alone.
        """
        if step.communicator.world_size == 1:
            return None  # the weight is one
        weight: LossWeight | None = None
        num_tensors = num_weighted = 0
        hiding: list[str] = []

        def weigh(value: Any) -> Any:
            nonlocal num_tensors, num_weighted, weight
            if not isinstance(value, Tensor):
                if _hides_gradient(value):
                    hiding.append(type(value).__name__)
                return value
            num_tensors += 1
            if not value.requires_grad:
                return value
            num_weighted += 1
            weight = weight or _weigh(weighed, module)
            return weight_gradient(value, weight)

        weighted = map_leaves(output, weigh)
        is_step = num_weighted == 0 and step.was_differentiated and not step.was_backed
        if is_step and torch.is_grad_enabled() and not step.loss_weight.is_one:
            raise BlockError(
                "the model took gradients inside its forward (torch.autograd.grad) and returned nothing that has one: "
                "those of a loss lack the loss weight of this rank. Call loss.backward() there, which applies it, or "
                "return the logits. If it only evaluates, call it under torch.no_grad() and enable gradients inside."
            )
        if (num_tensors == 0 or hiding) and torch.is_grad_enabled() and not step.was_backed:
            raise BlockError(
                f"the model returned a {(hiding or [type(output).__name__])[0]}, in which no tensor can be found: the "
                f"loss weight of this rank could not be applied to it. Return tensors, in tuples, lists, dicts, "
                f"dataclasses or namespaces."
            )
        return weighted


def _weigh(steps: Sequence[Step], module: nn.Module | None) -> LossWeight:
    """Returns the weight of what the outermost module makes of the last blocks of these steps, which have it then."""
    weight = common_weight(steps, module)
    for step in steps:
        step.was_weighted = True
    return weight


def _notice_backward(output: Any, steps: Sequence[Step]) -> None:
    """Has these steps know once gradients come to the output of a module."""
    refs = [weakref.ref(step) for step in steps]  # a script may hold the output for longer

    def note(_: Any) -> None:
        for step in (ref() for ref in refs):
            if step is not None:
                step.has_gone_back = True

    # Of the node, not of the tensor: such hooks would be lost, and warned of, where a script saves it.
    for node in {x.grad_fn for x in flatten(output) if isinstance(x, Tensor) and x.grad_fn is not None}:
        node.register_prehook(note)


def _hides_gradient(value: Any) -> bool:
    """Whether an object that is not looked into (a distribution, a set) has a tensor of which a loss may be made."""
    if isinstance(value, (LayerBlock, nn.Module)):
        return False
    inside = value if isinstance(value, (set, frozenset, deque)) else getattr(value, "__dict__", {}).values()
    return any(isinstance(x, Tensor) and x.requires_grad for x in inside)


def _check_batch_norm(module: nn.Module, call: _Call) -> None:
    """Raises where PyTorch would make statistics global by itself.

    Raises:
        BlockError: On all ranks.
    """
    if not isinstance(module, nn.SyncBatchNorm) or not module.training:
        return
    if call.mode is not None and call.mode.given_blocks and call.mode.step.communicator.world_size > 1:
        raise BlockError(
            "SyncBatchNorm counts vertices that several ranks hold several times. Leave out convert_sync_batchnorm: "
            "statistics of nn.BatchNorm1d are those of all ranks' vertices here."
        )


def _check_in_degrees(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Raises on all ranks what a layer of DGL would raise on those alone that have a vertex without in-edges.

    Raises:
        DGLError: On all ranks.
    """
    if module.__dict__.get("_allow_zero_in_degree", True):  # no layer that asks, or one that need not
        return
    given = (*args, *_keyword_arguments_of_call().values())
    layer = next((x.layer for x in given if isinstance(x, LayerBlock) and x.structure.has_empty_rows), None)
    if layer is not None:
        raise DGLError(
            f"{type(module).__name__}, layer {layer}: some vertices have no in-edges (0-in-degree nodes), on this rank "
            f"or another one, and their output would be that of no message at all. Add self-loops before the graph is "
            f"partitioned (dgl.add_self_loop), or make the layer with allow_zero_in_degree=True."
        )


_session = _Session()


def follow(step: Step, blocks: Iterable[LayerBlock]) -> None:
    """Begins to accompany the forwards of the blocks of a step, which a loader is about to yield. Collective in the
    first step of the blocks of a plan.
    """
    _install()
    _session.follow(step)
    blocks = list(blocks)
    step.learn_counts(blocks)
    step.on_use = _session.check_followed
    for block in blocks:
        block.on_use = step.note_use
        block.on_edge_result = step.note_edge_result
        block.on_edge_dropout = step.edge_dropout


def is_amid_another(step: Step) -> bool:
    """Tells whether a step ends in the midst of an epoch of another loader."""
    return _session.is_amid_another(step)


def _install() -> None:
    """Puts the hooks in, anew once dynamo is not to follow them."""
    if settle_untraced():
        stop()
    if _session.installed:
        return
    of_modules = [
        register_module_forward_pre_hook(_session.enter),
        register_module_forward_hook(_session.leave, with_kwargs=True, always_call=True),
    ]
    OWN_HOOKS.update(handle.id for handle in of_modules)
    _session.installed += of_modules
    _session.installed.append(register_optimizer_step_pre_hook(_session.check_step))
    _session.installed.append(register_optimizer_step_post_hook(_session.check_step))  # closures train inside of it


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Leaves module calls alone inside: for running a model on blocks that are not a loader's."""
    before, _session.is_paused = _session.is_paused, True
    try:
        yield
    finally:
        _session.is_paused = before


def is_paused() -> bool:
    """Tells whether a model is being run on blocks that are not a loader's."""
    return _session.is_paused


def stop() -> None:
    """Removes the hooks from PyTorch."""
    while _session.installed:
        _session.installed.pop().remove()


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _functions_that_run(method: str) -> Iterator[Any]:
    """Yields the contexts of the autograd functions whose `forward` or `backward` is being run, the innermost first."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == method and code.co_argcount:
            ctx = frame.f_locals.get(code.co_varnames[0])
            if isinstance(ctx, BackwardCFunction):
                yield ctx
        frame = frame.f_back


def _may_have_gradients() -> bool:
    """Whether what is made now may get gradients: not under `torch.no_grad`, but inside of a reentrant checkpoint."""
    if torch.is_grad_enabled():
        return True
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != _CHECKPOINT_FILE:
        frame = frame.f_back
    return frame is not None


def steps_of(args: Any) -> list[Step]:
    """Returns the steps of the blocks among arguments, each once."""
    steps: list[Step] = []
    for value in flatten(args):
        if isinstance(value, LayerBlock):
            followed_by = getattr(value.on_use, "__self__", None)  # copies (`.to`, `.int()`) have it, too
            if isinstance(followed_by, Step) and not any(followed_by is step for step in steps):
                steps.append(followed_by)
    return steps


def _module_calls() -> Iterator[dict[str, Any]]:
    """Yields the variables of the module calls on the stack of this thread, the innermost first."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename == _MODULE_FILE:
            yield frame.f_locals
        frame = frame.f_back


def _is_inside_another_call() -> bool:
    """Whether the module call whose pre-hook is running was made, however far away, by another one. Mostly near."""
    frame: FrameType | None = inspect.currentframe()
    was_call, num_calls = False, 0
    while frame is not None:
        is_call = frame.f_code.co_filename == _MODULE_FILE
        num_calls += is_call and not was_call  # each has several frames
        if num_calls == 2:
            return True
        was_call, frame = is_call, frame.f_back
    return False


def _is_in_call() -> bool:
    """Whether any module is being called in this thread."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != _MODULE_FILE:
        frame = frame.f_back
    return frame is not None


def _is_running(module: nn.Module | None) -> bool:
    return any(call.get("self") is module for call in _module_calls())


def _keyword_arguments_of_call() -> Any:
    """The keyword arguments of the module call whose pre-hook is running; PyTorch's global pre-hooks are not told."""
    return next(_module_calls(), {}).get("kwargs") or {}


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
