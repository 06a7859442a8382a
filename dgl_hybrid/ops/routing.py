# SPDX-License-Identifier: Apache-2.0
"""Lets unmodified `dgl.nn` modules reach our ops, forward and backward.

Every builtin message passing of DGL, and the functions of `dgl.ops` that modules call themselves, ends in one of three
functions that `dgl.ops` has imported by name: `gspmm_internal`, `gsddmm_internal` and `edge_softmax_internal`. While
hooks are around them, a call on a graph that is served goes to our ops where they do the same as DGL's own; where they
do not, DGL's own runs as before, and `op_counts` says which and why.

Served are `LayerBlock`s (`route_ops("layer_blocks")`, the default), every graph (`"all"`) or none (`"none"`), and in
any case graphs on a device that the installed DGL cannot use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
from dgl.base import ALL, is_all
from torch import Tensor

from dgl_hybrid.compat.hook_set import Hook, HookSet
from dgl_hybrid.errors import CompatError
from dgl_hybrid.ops.device_index import DeviceIndex, dgl_can_use, move_graph
from dgl_hybrid.ops.dgl_index import is_claimed, sparse_graph_of
from dgl_hybrid.ops.index_notes import kept_relation
from dgl_hybrid.ops.op_counts import count
from dgl_hybrid.ops.routed import Declined, routed_edge_softmax, routed_sddmm, routed_spmm

ServedGraphs = Literal["layer_blocks", "all", "none"]


class IndexStandIn(ABC):
    """What a graph of ours may answer `_graph` with, in place of DGL's index: it completes operands first.

    Each method gets the call of the DGL function of its name, and `proceed`, which runs that function on a real index
    through our ops or DGL's.
    """

    @abstractmethod
    def gspmm(self, proceed: Callable[..., Tensor], op: str, reduce_op: str, lhs_data: Any, rhs_data: Any) -> Tensor:
        """Messages by `op`, reduced by `reduce_op` into destinations."""

    @abstractmethod
    def gsddmm(
        self, proceed: Callable[..., Tensor], op: str, lhs_data: Any, rhs_data: Any, lhs_target: str, rhs_target: str
    ) -> Tensor:
        """Rows of edges by `op`."""

    @abstractmethod
    def edge_softmax(self, proceed: Callable[..., Tensor], logits: Any, eids: Any, norm_by: str) -> Tensor:
        """Softmax over the edges of each node."""


# ---------------------------------------------------------------------------------------- the three functions

_Original = Callable[..., Tensor]


def _gspmm(original: _Original, gidx: Any, op: str, reduce_op: str, lhs_data: Any, rhs_data: Any) -> Tensor:
    if isinstance(gidx, IndexStandIn):
        return gidx.gspmm(partial(_gspmm, original), op, reduce_op, lhs_data, rhs_data)
    if not _is_served(gidx):
        return original(gidx, op, reduce_op, lhs_data, rhs_data)
    message = {"copy_lhs": "copy_u", "copy_rhs": "copy_e"}.get(op, f"u_{op}_e")
    return _run(
        f"spmm.{message}.{reduce_op}",
        gidx,
        lambda: routed_spmm(gidx, op, reduce_op, lhs_data, rhs_data),
        lambda: original(gidx, op, reduce_op, lhs_data, rhs_data),
    )


def _gsddmm(
    original: _Original, gidx: Any, op: str, lhs_data: Any, rhs_data: Any, lhs_target: str = "u", rhs_target: str = "v"
) -> Tensor:
    if isinstance(gidx, IndexStandIn):
        return gidx.gsddmm(partial(_gsddmm, original), op, lhs_data, rhs_data, lhs_target, rhs_target)
    if not _is_served(gidx):
        return original(gidx, op, lhs_data, rhs_data, lhs_target, rhs_target)
    copies = {"copy_lhs": f"copy_{lhs_target}", "copy_rhs": f"copy_{rhs_target}"}
    return _run(
        f"sddmm.{copies.get(op, f'{lhs_target}_{op}_{rhs_target}')}",
        gidx,
        lambda: routed_sddmm(gidx, op, lhs_data, rhs_data, lhs_target, rhs_target),
        lambda: original(gidx, op, lhs_data, rhs_data, lhs_target, rhs_target),
    )


def _edge_softmax(original: _Original, gidx: Any, logits: Any, eids: Any = ALL, norm_by: str = "dst") -> Tensor:
    if isinstance(gidx, IndexStandIn):
        return gidx.edge_softmax(partial(_edge_softmax, original), logits, eids, norm_by)
    if not _is_served(gidx):
        return original(gidx, logits, eids, norm_by)
    return _run(
        f"edge_softmax.{norm_by}",
        gidx,
        lambda: routed_edge_softmax(gidx, logits, eids, norm_by),
        lambda: original(gidx, logits, eids, norm_by),
    )


def _run(name: str, gidx: Any, ours: Callable[[], Tensor | Declined], dgls: Callable[[], Tensor]) -> Tensor:
    result = Declined("routing is off") if _served == "none" and not isinstance(gidx, DeviceIndex) else ours()
    if isinstance(result, Tensor):
        count(name, "ours")
        return result
    _require_dgls_kernels(name, gidx, result.reason)
    count(name, f"dgl: {result.reason}")
    return dgls()


def _require_dgls_kernels(name: str, gidx: Any, reason: str) -> None:
    if isinstance(gidx, DeviceIndex):
        raise CompatError(
            f"{name} on {gidx.device} is not among our ops here ({reason}), and the installed DGL has no kernels for "
            f"this device. Run this module with graph and features on the CPU, or install a DGL built for CUDA."
        )


def are_blocks_served() -> bool:
    """Whether `LayerBlock`s reach our ops: unless `route_ops("none")`."""
    return _served != "none"


def _is_served(gidx: Any) -> bool:
    return _served == "all" or is_claimed(gidx) or isinstance(gidx, DeviceIndex)


def _get_relation_graph(original: Callable[..., Any], self: Any, etype: int) -> Any:
    return kept_relation(self, etype, original) if _is_served(self) else original(self, etype)


# ---------------------------------------------------------------------------------------- with every graph served


def _hetero(name: str, original: Callable[..., Any], gidx: Any, *args: Any, **kwargs: Any) -> Any:
    reason = "several edge types"
    _require_dgls_kernels(name, gidx, reason)
    count(name, f"dgl: {reason}")
    return original(gidx, *args, **kwargs)


def _to(original: Callable[..., Any], self: Any, device: Any, **kwargs: Any) -> Any:
    if device is None or dgl_can_use(torch.device(device)):
        return original(self, device, **kwargs)
    return graph_to_device(self, device, **kwargs)


def _out_degrees(original: Callable[..., Any], self: Any, u: Any = ALL, etype: Any = None) -> Any:
    # DGL checks its own node ids here, which would move them to the CPU in every forward of GraphConv.
    if isinstance(self._graph, DeviceIndex) and is_all(u):
        return self._graph.all_out_degrees(self.get_etype_id(etype)).clone()  # the caller's own
    return original(self, u, etype)


# ---------------------------------------------------------------------------------------- what is installed


def _in_ops(module: str, name: str, parameters: str, action: Callable[..., Any]) -> Hook:
    # By module: in `dgl.ops` itself, functions of the same names hide the modules.
    return Hook(module=f"dgl.ops.{module}", name=name, parameters=parameters, action=action)


_hooks = HookSet(
    (
        _in_ops("spmm", "gspmm_internal", "gidx op reduce_op lhs_data rhs_data", _gspmm),
        _in_ops("sddmm", "gsddmm_internal", "gidx op lhs_data rhs_data lhs_target rhs_target", _gsddmm),
        _in_ops("edge_softmax", "edge_softmax_internal", "gidx logits eids norm_by", _edge_softmax),
        Hook(
            module="dgl.heterograph_index",
            name="HeteroGraphIndex.get_relation_graph",
            parameters="self etype",
            action=_get_relation_graph,
        ),
    )
)
_hooks_for_all = HookSet(
    (
        _in_ops(
            "spmm", "gspmm_internal_hetero", "g op reduce_op lhs_len lhs_and_rhs_tuple", partial(_hetero, "spmm.hetero")
        ),
        _in_ops(
            "sddmm",
            "gsddmm_internal_hetero",
            "g op lhs_len lhs_target rhs_target lhs_and_rhs_tuple",
            partial(_hetero, "sddmm.hetero"),
        ),
        _in_ops(
            "edge_softmax",
            "edge_softmax_hetero_internal",
            "gidx eids norm_by logits",
            partial(_hetero, "edge_softmax.hetero"),
        ),
        Hook(module="dgl.heterograph", name="DGLGraph.to", parameters="self device kwargs", action=_to),
    )
)
_hooks_for_device_graphs = HookSet(
    (Hook(module="dgl.heterograph", name="DGLGraph.out_degrees", parameters="self u etype", action=_out_degrees),)
)
_served: ServedGraphs = "layer_blocks"
_has_blocks = False
_has_device_graphs = False


def route_ops(graphs: ServedGraphs) -> None:
    """Chooses whose message passing runs on our ops, in this process, from now on.

    Args:
        graphs: `"layer_blocks"` (the default): that of full-graph training. `"all"`: every DGL graph and block too;
            with a DGL without CUDA, `graph.to("cuda")` then works and its operations run on our kernels. `"none"`:
            DGL's own everywhere, and DGL's functions are the original objects again (except that `LayerBlock`s, once
            there are any, need theirs hooked for the exchange, and that sums over rows received in chunks are ours:
            DGL's kernels need all rows at once; layers that `optimize` has changed keep the operations that it gave
            them until `restore`). Ranks that train together must choose alike: exchanges differ.
    Raises:
        ValueError: Another word.
        CompatError: DGL's functions are not as expected; nothing is changed then.
    """
    global _served, _has_device_graphs
    if graphs not in get_args(ServedGraphs):
        raise ValueError(f"graphs must be one of {', '.join(get_args(ServedGraphs))} (got {graphs!r})")
    if graphs == "none":
        _has_device_graphs = False
    _install(for_all=graphs == "all")
    _served = graphs


def serve_blocks(has_blocks: bool) -> None:
    """Installs the hooks that `LayerBlock`s need whoever computes, or lets go of them.

    Raises:
        CompatError: DGL's functions are not as expected; nothing is changed then.
    """
    global _has_blocks
    before, _has_blocks = _has_blocks, has_blocks
    try:
        _install(for_all=_served == "all")
    except CompatError:
        _has_blocks = before
        raise


def graph_to_device(graph: Any, device: torch.device | str, **kwargs: Any) -> Any:
    """Does what `graph.to(device)` does, also for a CUDA device and a DGL built without CUDA.

    Operations on the result reach our ops, until `route_ops("none")`.

    Args:
        graph: A `DGLGraph` or DGL block.
        device: For example "cuda".
        kwargs: For the copies of features, as `Tensor.to` takes them.
    """
    global _has_device_graphs
    moved = move_graph(graph, device, **kwargs)
    if isinstance(moved._graph, DeviceIndex):
        _has_device_graphs = True
        _install(for_all=_served == "all")
    return moved


def _install(*, for_all: bool) -> None:
    """Installs what is needed and removes what is not; if something cannot be installed, changes nothing."""
    wanted = {
        _hooks: for_all or _has_blocks or _has_device_graphs,
        _hooks_for_all: for_all,
        _hooks_for_device_graphs: for_all or _has_device_graphs,
    }
    before = {hooks: hooks.is_installed for hooks in wanted}
    try:
        for hooks, is_wanted in wanted.items():
            if is_wanted:
                hooks.install()
    except CompatError:
        wanted = before
        raise
    finally:
        for hooks, is_wanted in wanted.items():
            if not is_wanted:
                hooks.remove()


__all__ = ["IndexStandIn", "count", "graph_to_device", "route_ops", "serve_blocks", "sparse_graph_of"]
