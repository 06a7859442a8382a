# SPDX-License-Identifier: Apache-2.0
"""The fields that a sampler's `prefetch_*` lists ask for, in a loader's blocks before each epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dgl

from dgl_hybrid.graph.call_template import FieldShapes, StaticFields
from dgl_hybrid.graph.layer_block import LayerBlock
from dgl_hybrid.training.fields import GraphFields
from dgl_hybrid.training.partitioned_graph import PartitionedGraph


class Prefetch:
    """Static fields that a sampler's `prefetch_*` lists ask for, put into the blocks once."""

    def __init__(self, node_fields: list[str], label_fields: list[str], edge_fields: list[str]) -> None:
        self.node_fields, self.label_fields, self.edge_fields = node_fields, label_fields, edge_fields

    @staticmethod
    def from_sampler(sampler: Any) -> Prefetch:
        def names(attribute: str) -> list[str]:
            value = getattr(sampler, attribute, None) or []
            if isinstance(value, Mapping):
                if len(value) > 1:
                    raise ValueError(
                        f"{attribute} names fields of {len(value)} types ({', '.join(map(str, value))}): full-graph "
                        f"training is for graphs of one type of nodes and edges"
                    )
                (value,) = value.values()
            return [value] if isinstance(value, str) else [str(name) for name in value]

        return Prefetch(names("prefetch_node_feats"), names("prefetch_labels"), names("prefetch_edge_feats"))

    def shapes(self, g: PartitionedGraph) -> StaticFields:
        def of(fields: GraphFields, names: list[str]) -> FieldShapes:
            return {name: (tuple(fields[name].shape[1:]), fields[name].dtype) for name in names}

        return StaticFields(
            source=of(g.ndata, self.node_fields),
            destination=of(g.ndata, self.label_fields),
            edge=of(g.edata, self.edge_fields),
        )

    def fill(self, g: PartitionedGraph, blocks: list[LayerBlock]) -> None:
        """Leaves the fields' rows in the blocks and nothing else, before each epoch. Collective where they are to be
        read anew, in the order of the fields' names as the sampler lists them.
        """
        for block in blocks:
            block.put_ids_back()
        source = {name: g.ndata[name][blocks[0].srcdata[dgl.NID]] for name in self.node_fields}
        destination = {name: g.ndata[name][blocks[-1].dstdata[dgl.NID]] for name in self.label_fields}
        for block in blocks:
            block.begin_epoch(
                source if block is blocks[0] else {},
                destination if block is blocks[-1] else {},
                {name: g.edata[name][block.edata[dgl.EID]] for name in self.edge_fields},
            )
