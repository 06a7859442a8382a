# SPDX-License-Identifier: Apache-2.0
"""What PyTorch functions do to rows inside a model's forward: randomness and batch norm that all ranks agree on.

A row and its replicas on other ranks must get the same numbers. Dropout and batch norm have a form that gives them;
other random functions on rows do not, and are refused where there are replicas.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dgl_hybrid.errors import BlockError
from dgl_hybrid.graph.untraced import keep_out_of_graphs, untraced
from dgl_hybrid.training.batch_norm import distributed_batch_norm
from dgl_hybrid.training.dropout import replicated_dropout
from dgl_hybrid.training.loss import LossWeight
from dgl_hybrid.training.step import Step, levels_of, peek_token

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
        torch._sample_dirichlet,
        torch._standard_gamma,
        torch.bernoulli,
        torch.binomial,
        torch.dropout_,
        torch.feature_alpha_dropout,
        torch.feature_alpha_dropout_,
        torch.feature_dropout,
        torch.feature_dropout_,
        torch.multinomial,
        torch.native_dropout,
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
keep_out_of_graphs(func for func in _UNREPLICATED | _UNREPLICATED_FACTORIES if func is getattr(torch, func.__name__, 0))
# Where those that `F` is made of say whether they train, if not by keyword.
_TRAINS_AT: dict[Callable[..., Any], int] = {
    torch.alpha_dropout: 2,
    torch.alpha_dropout_: 2,
    torch.dropout_: 2,
    torch.feature_alpha_dropout: 2,
    torch.feature_alpha_dropout_: 2,
    torch.feature_dropout: 2,
    torch.feature_dropout_: 2,
    torch.native_dropout: 2,
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


_ANSWERED: frozenset[Callable[..., Any]] = frozenset(
    {
        *(F.dropout, torch.dropout, F.batch_norm, Tensor.backward, torch.autograd.backward, torch.autograd.grad),
        *(*_UNREPLICATED, *_UNREPLICATED_FACTORIES, *_WITH_DROPOUT),
    }
)


@untraced("__torch_function__")
class RowMode(TorchFunctionMode):
    """Answers those functions while it is entered.

    Args:
        step: Whose rows they are, or the first of those whose they may be.
        others: The others of those: whose blocks the call was given, too; or of calls that it may repeat; or, if it was
            given none, that a script works on at the same time.
        given_blocks: The call that runs was given blocks of the step as arguments.
        is_in_backward: It may repeat part of another call.
        is_repeated: That worked on blocks of the step.
        used: Returns the steps whose blocks the call has used so far.
        may_be_piece: A call that was given no blocks, and uses none, may yet work on rows of the step.
        is_in_call: Tells whether any module is being called. If none is, Ctrl-C has ended that call, and this is over.
        outside: What runs inside of this context is no part of that call: a backward, in which checkpoints call parts
            of the model again.
        weigh: Returns the weight of a loss that the call backs itself; None, if it has used no last block so far.
    """

    def __init__(
        self,
        step: Step,
        *,
        given_blocks: bool,
        outside: Callable[[], contextlib.AbstractContextManager[None]],
        weigh: Callable[[], LossWeight | None],
        is_in_call: Callable[[], bool],
        others: Sequence[Step] = (),
        used: Callable[[], Sequence[Step]] = tuple,
        is_in_backward: bool = False,
        is_repeated: bool = False,
        may_be_piece: bool = True,
    ) -> None:
        super().__init__()
        self.step, self._steps, self._used = step, (step, *others), used
        self.given_blocks, self.is_repeated, self.may_be_piece = given_blocks, is_repeated, may_be_piece
        self._outside, self._weigh, self._is_in_call = outside, weigh, is_in_call
        self._is_in_backward = is_in_backward
        self.is_over = False
        """The call has ended: nothing is answered any more, should this still be entered."""

    @property
    def is_ours(self) -> bool:
        """Whether this call works on blocks: given as arguments, or (inside an object of the script's) used by now.

        A module called between two steps that has nothing to do with the graph keeps its own dropout and batch norm,
        unless it gets the rows of a level: then it is a piece of a model whose other pieces are given the blocks, or
        comes before the first of them.
        """
        return self.given_blocks or self.is_repeated or self.step.block_used

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _ANSWERED:  # nearly all that it is asked about, attributes of tensors among it
            return func(*args, **kwargs)
        self.is_over = self.is_over or not self._is_in_call()
        if self.is_over:
            return func(*args, **kwargs)
        if self.step.communicator.world_size > 1 and self._is_reducing() and _differs_by_rank(func, args, kwargs):
            _raise_in_reduce(func)
        if func is F.dropout and _drops(*args, **kwargs):
            found = self._find(args, kwargs, draws=True)
            if found is not None:
                return _dropout(found[0], *args, **kwargs)
        if func is F.batch_norm and _normalises(*args, **kwargs):
            found = self._find(args, kwargs, draws=False)
            if found is not None and found[1] is not None:
                return self._batch_norm_of_piece(found[0], found[1], *args, **kwargs)
            if found is not None:
                found[0].note_norm(args[0] if args else kwargs["input"])
                return _batch_norm(found[0], found[0].num_vertices, *args, **kwargs)
        if func is torch.dropout:
            named = {("training" if k == "train" else k): v for k, v in kwargs.items()}
            found = self._find(args, kwargs, draws=True) if _drops(*args, **named) else None
            if found is not None:
                return _dropout(found[0], *args, **named)
        if func is Tensor.backward and (weight := self._weigh()) is not None:
            return self._backward(weight, *args, **kwargs)
        if func is torch.autograd.backward and (weight := self._weigh()) is not None:
            return self._backward_of_all(weight, *args, **kwargs)
        if func is torch.autograd.grad and self.step.last_block_used:
            return self._gradients(*args, **kwargs)
        if self.step.communicator.world_size > 1:
            if func in _UNREPLICATED:
                _refuse_random(self.step, func, args, kwargs)
            if func in _UNREPLICATED_FACTORIES:
                _refuse_factory(self.step, func, args, kwargs)
            if func in _WITH_DROPOUT and _WITH_DROPOUT[func](args, kwargs) and self._may_be_of_rows(args, kwargs):
                _raise_unreplicated(func)
        return func(*args, **kwargs)

    def _is_reducing(self) -> bool:
        """Whether a reduce of the user's runs, on a block of one of the steps."""
        blocks = (step.current_block for step in self._steps if step.block_used)
        return any(block is not None and block.is_reducing for block in blocks)

    def _backward(
        self,
        weight: LossWeight,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Of a module that computes and backs its loss inside its forward: its output is not weighted yet."""
        self.step.was_backed = True
        with self._outside():
            weighted = _weighted(loss, gradient, weight)
            torch.autograd.backward(loss, weighted, retain_graph, create_graph, inputs=inputs)

    def _backward_of_all(
        self,
        weight: LossWeight,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        """The same of several losses at once; older versions of PyTorch do not ask modes about it."""
        self.step.was_backed = True
        losses = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        given = grad_tensors if grad_tensors is not None else grad_variables
        gradients = (given,) if given is None or isinstance(given, Tensor) else tuple(given)
        if len(gradients) == 1:
            gradients *= len(losses) if gradients[0] is None else 1
        if len(gradients) == len(losses):  # else PyTorch's error
            given = tuple(_weighted(*pair, weight) for pair in zip(losses, gradients, strict=True))
        with self._outside():
            torch.autograd.backward(losses, given, retain_graph, create_graph, inputs=inputs)

    def _gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Of a loss inside the forward, or of something else (forces, saliency): as they are, and remembered."""
        gradients = torch.autograd.grad(*args, **kwargs)
        self.step.has_gone_back = True
        self.step.was_differentiated |= not any(x is not None and x.requires_grad for x in gradients)
        return gradients

    def _batch_norm_of_piece(self, step: Step, level: int, *args: Any, **kwargs: Any) -> Tensor:
        """Batch norm of a module that is given no blocks: the trace of a model need not have seen it."""
        if level == len(step.level_sizes) - 1:
            return _batch_norm(step, None, *args, **kwargs)  # a head's: what the script gives it are the seeds
        step.dense_below = max(step.dense_below, level + 1)
        return _batch_norm(step, step.num_vertices, *args, **kwargs)

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, draws: bool) -> tuple[Step, int | None] | None:
        """Returns of which step's rows dropout or batch norm is, and of which level's, where no block is in use; None:
        they have nothing to do with any. Collective where no block is in use, and where there are several steps.

        In such a call as well, all ranks must take part in batch norm, or none.

        Raises:
            BlockError: On all ranks: the rows could be those of several steps, or of none whose blocks are in use.
        """
        if self.is_ours and len(self._steps) == 1:
            return self.step, None
        x = args[0] if args else kwargs.get("input")
        if not isinstance(x, Tensor):
            return (self.step, None) if self.is_ours else None
        if draws and len(self._steps) > 1:
            # What a checkpoint repeats draws the number that it drew before; so may one rank alone, without edges.
            token = peek_token()
            drawn = [step for step in self._steps if step.knows_token(token)]
            if len(drawn) == 1:
                if self._is_in_backward:  # what it norms is of the same one
                    self.step, self._steps = drawn[0], (drawn[0],)
                return drawn[0], None
        if self.is_ours:
            return self._step_in_use(x, draws=draws), None
        if not self.may_be_piece or x.dim() == 0:
            return None
        levels = levels_of(self._steps, len(x))
        found = [(step, level) for step, level in zip(self._steps, levels, strict=True) if level is not None]
        if found:
            self._check_same([step for step, _ in found], x, draws=draws)
        return found[0] if found else None

    def _step_in_use(self, x: Tensor, *, draws: bool) -> Step:
        """Returns of which of several steps that the call is about rows are. Collective."""
        told = [step.possible_rows(x) for step in self._steps]
        if self.step.communicator.world_size > 1:
            ranks = self.step.communicator.gather_ints([value for of_step in told for value in of_step])
            everywhere = iter([int(all(column)) for column in zip(*ranks, strict=True)])
            told = [[next(everywhere) for _ in of_step] for of_step in told]
        # Batch norm is of vertices.
        lengths = [len(step.level_sizes) if not draws else len(of_step) for step, of_step in zip(self._steps, told)]
        found = [step for step, of_step, n in zip(self._steps, told, lengths, strict=True) if any(of_step[:n])]
        used = self._used()
        found = [step for step in found if any(step is other for other in used)] or found
        if not found:
            raise BlockError(
                f"rows of shape {tuple(x.shape)} are neither the vertices of a level nor the edges of a layer of any "
                f"of the {len(self._steps)} loaders that this call may be about, on every rank. Call the modules for "
                f"one loader after another, with its blocks as arguments."
            )
        self._check_same(found, x, draws=draws)
        return found[0]

    def _check_same(self, steps: Sequence[Step], x: Tensor, *, draws: bool) -> None:
        """Raises on all ranks, if the same rows of these steps are other vertices on any. Collective, if there are
        several.
        """
        first, *rest = steps
        if not rest or first.communicator.world_size == 1:
            return  # one rank has all vertices
        is_same = all(first.has_same_rows(step, len(x), by_key=draws) for step in rest)
        if not all(row[0] for row in first.communicator.gather_ints([int(is_same)])):
            raise BlockError(
                f"rows of shape {tuple(x.shape)} could be those of {len(steps)} loaders, which have other vertices: "
                f"dropout and batch norm cannot tell whose they are. Pass the blocks as arguments, of one loader in a "
                f"call, to a module that does both. Take a batch that only evaluates under torch.no_grad()."
            )

    def _may_be_of_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """The same of what drops out inside of itself, where rows need not come first. Not collective."""
        if self.is_ours or not self.may_be_piece:
            return self.is_ours
        x = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        return x is not None and any(self.step.has_rows(count) for count in x.shape[:-1])


def _weighted(loss: Any, gradient: Tensor | None, weight: LossWeight) -> Tensor | None:
    """Returns the gradient that enters at a loss, with the weight; None where none can be made up."""
    if gradient is None and isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
        gradient = torch.ones_like(loss)
    return None if gradient is None else gradient * weight.value  # None: PyTorch's error


def _drops(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    return training and p != 0.0


def _normalises(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    *rest: Any,
    **options: Any,
) -> bool:
    """Whether by the statistics of these rows, not by those that were taken before."""
    return training


def _dropout(step: Step, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if step.current_block is not None and step.current_block.is_dry_run:
        step.draw_nothing(step.current_block)
        return input
    call_index = step.next_random_call()
    keys = step.keys_of(input, "dropout", call_index=call_index)
    dropped = replicated_dropout(input, p, keys, seed=step.seed, step=step.number, call_index=call_index)
    return input.copy_(dropped) if inplace else dropped


def _batch_norm(
    step: Step,
    num_vertices: int | None,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    num_rows = len(input) if input.dim() else 0
    expected = (
        f"batch norm inside the model: a tensor of shape {tuple(input.shape)} does not hold one row for each vertex "
        f"of a level {sorted(set(step.level_sizes))}"
    )
    if input.dim() < 2:
        raise BlockError(expected)
    is_level = step.is_level(num_rows)
    return distributed_batch_norm(
        input,
        step.owned[:num_rows].to(input.device) if is_level else input.new_zeros(num_rows, dtype=torch.bool),
        running_mean,
        running_var,
        weight,
        bias,
        training=True,
        momentum=momentum,
        eps=eps,
        communicator=step.communicator,
        num_vertices=num_vertices,
        why_not=None if is_level else expected,
    )


def _differs_by_rank(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether one of the answered functions draws, or normalises by the rows that it is given."""
    if func is F.dropout:
        return _drops(*args, **kwargs)
    if func is torch.dropout:
        return _drops(*args, **{("training" if k == "train" else k): v for k, v in kwargs.items()})
    if func is F.batch_norm:
        return _normalises(*args, **kwargs)
    if func in _UNREPLICATED:
        return _trains(func, args, kwargs)
    return func in _UNREPLICATED_FACTORIES or (func in _WITH_DROPOUT and _WITH_DROPOUT[func](args, kwargs))


def _trains(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    at = _TRAINS_AT.get(func, len(args))
    return bool(args[at] if at < len(args) else kwargs.get("training", kwargs.get("train", True)))


def _refuse_random(step: Step, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tensor = next((x for x in (*args[:2], *kwargs.values()) if isinstance(x, Tensor)), None)
    if tensor is not None and _is_of_rows(step, tensor.shape) and _trains(func, args, kwargs):
        _raise_unreplicated(func)


def _refuse_factory(step: Step, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    shape = kwargs.get("size")
    if shape is None and func in (torch.rand, torch.randn):
        shape = args[0] if args and not isinstance(args[0], int) else args
    elif shape is None:
        shape = next((arg for arg in args if isinstance(arg, (tuple, list))), args[:1] or (kwargs.get("n"),))
    if _is_of_rows(step, shape):
        _raise_unreplicated(func)


def _is_of_rows(step: Step, shape: Sequence[Any]) -> bool:
    """Whether any dimension may count rows: the first, or, before the last, that of several draws for each."""
    return any(isinstance(size, int) and step.has_rows(size) for size in (*shape[:1], *shape[1:-1]))


def _raise_unreplicated(func: Any) -> NoReturn:
    raise BlockError(
        f"{getattr(func, '__name__', func)} draws from each rank's own generator, so a row of a vertex or an edge and "
        f"its replicas would differ. Use nn.Dropout, which is replicated, or draw from a function of the ids."
    )


def _raise_in_reduce(func: Any) -> NoReturn:
    raise BlockError(
        f"{getattr(func, '__name__', func)} inside a reduce function: DGL runs that on the vertices of one in-degree "
        f"after those of another, and each rank has others of them, so a vertex and its replicas would get different "
        f"numbers. Apply it to what was reduced, after update_all (nn.Dropout also in the message function)."
    )
