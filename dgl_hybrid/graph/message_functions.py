# SPDX-License-Identifier: Apache-2.0
"""Which fields a message function reads. Pure."""

from __future__ import annotations

from typing import Any

import dgl
from dgl import function as fn


def fields_of(func: fn.BuiltinFunction) -> list[tuple[Any, str]]:
    """Returns (target, field name) of what a builtin message function reads, in order."""
    if isinstance(func, fn.BinaryMessageFunction):
        return [(func.lhs, func.lhs_field), (func.rhs, func.rhs_field)]
    return [(func.target, func.in_field)]


def targets_of(func: fn.BuiltinFunction) -> list[Any]:
    """Returns at which end of an edge, or on it, each of these fields is."""
    return [target for target, _ in fields_of(func)]


def source_fields_of(func: Any) -> list[str] | None:
    """Returns the source fields a builtin message function reads, without repetition; None for a user's function."""
    if not isinstance(func, fn.BuiltinFunction):
        return None
    return list(dict.fromkeys(name for target, name in fields_of(func) if target == fn.TargetCode.SRC))


def may_read_edge_ids(func: Any) -> bool:
    """Tells whether a message function may read the global ids of edges: a user's may read anything."""
    return not isinstance(func, fn.BuiltinFunction) or (fn.TargetCode.EDGE, dgl.EID) in fields_of(func)
