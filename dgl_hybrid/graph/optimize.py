# SPDX-License-Identifier: Apache-2.0
"""`optimize(model)`: layers of `dgl.nn` stay what they are and get forwards that compute the same in fewer passes.

A layer is changed by giving the object another class, a subclass of its own of the same name: parameters, buffers,
hooks, `isinstance`, `state_dict` and `repr` stay, and whoever holds the layer (DDP, an optimizer, `torch.compile`)
holds it still. The subclasses are made here and cannot be looked up by name, so copies and pickles carry the layer's
own class and the wish to be optimised.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import dgl.nn as dglnn
from torch import nn
from torch.nn.utils import parametrize

from dgl_hybrid.graph.aggregate_first import forward_ginconv, forward_graphconv, forward_sageconv
from dgl_hybrid.graph.fused_attention import forward_gat, forward_gatv2
from dgl_hybrid.graph.untraced import untraced

FORWARDS: Mapping[type[nn.Module], Callable[..., Any]] = MappingProxyType(
    {
        dglnn.GATConv: forward_gat,
        dglnn.GATv2Conv: forward_gatv2,
        dglnn.GINConv: forward_ginconv,
        dglnn.GraphConv: forward_graphconv,
        dglnn.SAGEConv: forward_sageconv,
    }
)
"""Layer to a forward of the same parameters and results, which leaves what it cannot do to the layer's own."""

ModelT = TypeVar("ModelT", bound=nn.Module)


def optimize(model: ModelT) -> ModelT:
    """Lets the layers inside a model compute the same faster: `GATConv` and `GATv2Conv` as one fused operation,
    `GraphConv`, `SAGEConv` (mean, gcn) and `GINConv` (sum, mean) aggregating raw features before they transform them,
    once for all epochs.
    Features that are mostly zeros, and sums of them, are multiplied by the entries they have; where a loader's plan
    says so, other layers sum first, too; and a ReLU given as a layer's `activation` goes along with its product.

    In place. Works on `LayerBlock`s, DGL blocks and DGL graphs, on CPU and CUDA, before or after the model is wrapped
    in DDP; a second call changes nothing more. Outputs and gradients are those of DGL's own layers up to rounding. On a
    loader's blocks attention dropout draws the same mask as without; on DGL's own graphs it draws from PyTorch's
    generator, as ever, but other numbers.

    What the fused operation cannot do (edge weights, attention as a result, hooks on the dropout inside) runs on DGL's
    own forward, and `op_counts()` says so. Second derivatives are refused by an error. Subclasses with a forward of
    their own and layers with parametrizations (`torch.nn.utils.parametrize`) are left alone.

    Args:
        model: Any module; may itself be such a layer.
    Returns:
        `model`.

    Raises:
        TypeError: It is no module.
    """
    for module in _modules_of(model):
        layer = type(module)
        is_own = "forward" in vars(module) or parametrize.is_parametrized(module)  # that changes classes, too
        if not isinstance(module, _Optimized) and _forward_for(layer) is not None and not is_own:
            module.__class__ = _optimized_class(layer)
    return model


def restore(model: ModelT) -> ModelT:
    """Undoes `optimize`, in place: every layer has DGL's own forward again.

    Raises:
        ValueError: A layer was parametrized after `optimize`, or has got another class since.
    """
    for module in _modules_of(model):
        if isinstance(module, _Optimized):
            if parametrize.is_parametrized(module):
                raise ValueError(
                    f"{type(module).__name__} was parametrized after it was optimized, and both change its class: "
                    f"undo the parametrization first (torch.nn.utils.parametrize.remove_parametrizations)"
                )
            if not module.has_its_class:
                raise ValueError(
                    f"a {module.layer_class.__name__} got the class {type(module).__qualname__} after it was optimized "
                    f"and would lose it: undo that first"
                )
            module.__class__ = module.layer_class  # type: ignore[assignment]
    return model


def _modules_of(model: nn.Module) -> Iterator[nn.Module]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"a model must be a torch.nn.Module (got {type(model).__name__})")
    return model.modules()


class _Optimized:
    """What the subclasses have in common."""

    layer_class: ClassVar[type[nn.Module]]

    @property
    def has_its_class(self) -> bool:
        """Whether it is of a class made here, and not of one that a script or a tool has made of that since."""
        its_class: type[Any] = type(self)
        return its_class is _classes.get(self.layer_class)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(max(2, int(protocol)))
        is_plain = isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__  # type: ignore[attr-defined]
        if is_plain and self.has_its_class:
            return (_new_optimized, (self.layer_class,), *reduced[2:])
        return reduced  # a layer with a way of its own to be copied, or another class by now, comes back as that says


def _forward_for(layer: type[nn.Module]) -> Callable[..., Any] | None:
    for known, forward in FORWARDS.items():
        if issubclass(layer, known) and layer.forward is known.forward:
            return forward
    return None


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _optimized_class(layer: type[nn.Module]) -> type[nn.Module]:
    """Returns the subclass for a layer's class; the same at every call, so that equal layers have equal types."""
    if layer not in _classes:
        namespace = {
            "forward": _forward_for(layer),
            "layer_class": layer,
            "__doc__": layer.__doc__,
            "__module__": layer.__module__,
            "__qualname__": layer.__qualname__,
        }
        # By the layer's own name, which `repr` of a model and tools that look at layers print.
        made = type(layer.__name__, (_Optimized, layer), namespace)
        _classes[layer] = untraced("forward")(made)  # dynamo would look into the kernels' own making
    return _classes[layer]


def _new_optimized(layer: type[nn.Module]) -> nn.Module:
    cls = _optimized_class(layer)
    return cls.__new__(cls)
