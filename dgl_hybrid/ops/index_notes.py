# SPDX-License-Identifier: Apache-2.0
"""What is noted about a DGL graph index, on the index itself.

DGL's graph indices never change: `add_edges` and the like give a graph a new one. Notes on the Python object are there
as long as the graph is and go with it. (A table keyed by the index is not possible: DGL 2.1's indices cannot be
hashed.) `update_all` does not run on the graph's own index but on that of its edge type, a Python object that DGL makes
anew on each call: see `kept_relation`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dgl_hybrid.ops.sparse_graph import SparseGraph

_NOTES = "_dgl_hybrid_notes"
_RELATIONS = "_dgl_hybrid_relations"


@dataclass(slots=True)
class Notes:
    """Of one index, or of a graph's index and that of its only edge type."""

    is_claimed: bool = False
    """Whether it is of a graph of ours."""
    graphs: dict[torch.device, SparseGraph] = field(default_factory=dict)
    """The first is where DGL's structure lies."""
    edgeless: dict[torch.device, Tensor | None] = field(default_factory=dict)
    """Destinations without in-edges."""
    answers: dict[tuple[torch.device, Hashable], tuple[Tensor, ...]] = field(default_factory=dict)
    """To questions about the structure, on devices that DGL cannot use."""


def existing_notes(index: Any) -> Notes | None:
    """Returns the notes of an index if there are any."""
    # By `vars`, because DGL asks its library for attributes that Python lacks.
    notes: Notes | None = vars(index).get(_NOTES)
    return notes


def notes_of(index: Any) -> Notes:
    """Returns the notes of an index, to be read and written."""
    notes = existing_notes(index)
    if notes is None:
        notes = Notes()
        setattr(index, _NOTES, notes)
    return notes


def kept_relation(index: Any, etype: int, make: Callable[[Any, int], Any]) -> Any:
    """Returns the index of one edge type; the same object on every call for `index`.

    Args:
        index: Of a graph.
        etype: Position of the edge type.
        make: DGL's `HeteroGraphIndex.get_relation_graph`.
    """
    kept: dict[int, Any] = vars(index).setdefault(_RELATIONS, {})
    relation = kept.get(int(etype))
    if relation is None:
        relation = kept[int(etype)] = make(index, etype)
        if index.number_of_etypes() == 1:  # the same edges
            setattr(relation, _NOTES, notes_of(index))
    return relation
