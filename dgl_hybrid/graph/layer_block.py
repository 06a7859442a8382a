# SPDX-License-Identifier: Apache-2.0
"""`LayerBlock`: one layer's graph on one rank, on which unmodified `dgl.nn` modules compute the full-graph result.

It answers as a DGL block of |C_(l-1)| sources and |C_l| destinations. A real `DGLBlock` behind it has the received
sources too; a source field is exchanged when an operation first reads it, so the row that travels is the operand
itself (after a layer's `x @ W`, where it transforms first).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Literal, Protocol

import dgl
import torch
from dgl import function as fn
from torch import Tensor

from dgl_hybrid.errors import BlockError
from dgl_hybrid.exchange.approximate import ApproximateRows
from dgl_hybrid.exchange.closure import LayerStructure, ReplicaRows
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.plan import ExchangePlan
from dgl_hybrid.exchange.rows import extend_rows
from dgl_hybrid.graph import dispatch
from dgl_hybrid.graph.block_interface import DELEGATED, HINTS, DestinationNodes, SourceNodes
from dgl_hybrid.graph.block_runs import BlockRuns
from dgl_hybrid.graph.degrees import FullDegrees
from dgl_hybrid.graph.edge_ids import EdgeIds
from dgl_hybrid.graph.edge_weight_norm import normalise_edge_weights
from dgl_hybrid.graph.fields import SourceFields
from dgl_hybrid.graph.message_functions import fields_of, may_read_edge_ids, source_fields_of, targets_of
from dgl_hybrid.graph.split_block import SplitBlock
from dgl_hybrid.graph.split_exchange import Scale
from dgl_hybrid.graph.split_sum import SplitSum
from dgl_hybrid.graph.static_results import RowsT, StaticResults, nothing_is_static
from dgl_hybrid.graph.untraced import untraced
from dgl_hybrid.ops import EdgeDropout, scaled_sum
from dgl_hybrid.ops.device_index import move_graph
from dgl_hybrid.ops.dgl_index import claim, sparse_graph_of
from dgl_hybrid.ops.op_counts import count
from dgl_hybrid.ops.routing import are_blocks_served
from dgl_hybrid.ops.unseen import unseen

FusedOp = Literal["gat", "gatv2"]


class WeightedOutDegrees(Protocol):
    """Answers with the full-graph weighted out-degrees of a block's sources, or None for unknown weights."""

    def __call__(self, block: LayerBlock, edge_weight: Tensor, /) -> Tensor | None: ...


class BlockObserver(Protocol):
    """Sees what a block is asked to do; tracing a model uses it."""

    def on_exchange(self, layer: int, fields: list[Tensor]) -> None: ...

    def on_message_passing(self, layer: int, fields: list[Tensor], *, is_weighted: bool) -> None: ...

    def on_attention(self, layer: int, op: FusedOp, x: Tensor, *, has_dropout: bool) -> None: ...

    def on_kept_result(self, layer: int, operands: tuple[Tensor, ...]) -> None: ...

    def on_choice_of_order(self, layer: int) -> None: ...

    def on_work_beside(self, layer: int, flops: float) -> None: ...


@untraced(
    *("update_all", "apply_edges", "in_degrees", "out_degrees", "scaled_sum", "keep", "complete_sources"),
    "sums_beside_work",
    "normalise_edge_weights",
)
class LayerBlock:
    """The graph of layer `layer` on this rank.

    Attributes:
        layer: From 1.
        srcdata: Mapping of (|C_(l-1)|, ...) fields, exchanged at first use.
        dstdata, edata: The real block's: (|C_l|, ...) and (E, ...) fields.
        static_results: What is made from the loader's own tensors, and so kept from epoch to epoch.
        approximation: What becomes of rows that need a gradient; None: they are exchanged exactly.
        sums_first: Whether optimised layers sum before they multiply also where products make rows narrower.
        is_retired: Whether its plan was replaced by another one.
    """

    is_block = True
    is_retired = False

    def __init__(
        self,
        structure: LayerStructure,
        communicator: Communicator,
        *,
        rows_global: Tensor,
        out_degrees: Tensor,
        device: torch.device,
        weighted_out_degrees: WeightedOutDegrees | None = None,
        static_results: StaticResults | None = None,
        approximation: ApproximateRows | None = None,
        split: SplitBlock | None = None,
        sums_first: bool = False,
        edge_numbers: Tensor | None = None,
        edge_ids: EdgeIds | None = None,
        in_degrees: Tensor | None = None,
        alike: LayerBlock | None = None,
        _block: Any = None,
        _idtype: torch.dtype = torch.int64,
    ) -> None:
        self.structure = structure
        self.layer = structure.layer
        self.plan: ExchangePlan = structure.exchange.to(device)
        self._communicator = communicator
        self._rows_global = rows_global
        self._replicas = None if structure.replicas is None else structure.replicas.to(device)
        self._weighted_out_degrees = weighted_out_degrees
        self.static_results = StaticResults(nothing_is_static) if static_results is None else static_results
        self.approximation = approximation
        self.sums_first = sums_first
        self._split = split
        self._where = f"rank {communicator.rank} of {communicator.world_size}, layer {self.layer}"
        self.observer: BlockObserver | None = None
        self.on_use: Callable[[LayerBlock, Sequence[Tensor]], None] | None = None
        """Told of each use, with what is read besides fields of this block."""
        self.on_edge_result: Callable[[Tensor, int], None] | None = None
        self.on_edge_dropout: Callable[[LayerBlock, float], EdgeDropout | None] | None = None
        """Draws the attention dropout of a fused layer with this probability, so that ranks agree on it."""
        self.is_normalising = False
        """Whether weights of edges are being divided by those of their ends, for which no rows travel."""
        self._block = self._build_block(device, edge_numbers, alike) if _block is None else _block
        self._edge_ids, self._idtype = edge_ids, _idtype
        self._destination_ids: Tensor = self._block.dstdata[dgl.NID]
        claim(self._block._graph)
        of_destinations = None if in_degrees is None else in_degrees.to(device)
        self._degrees = FullDegrees(out_degrees.to(device)[: structure.num_held], of_destinations, self._block)
        self._source = SourceFields(structure.num_held, self._where, is_approximate=approximation is not None)
        self._runs = BlockRuns(self._block, self._source)
        ids = torch.cat([rows_global[: structure.num_held], structure.exchange.recv_global]).to(device)
        self._source.set_complete(dgl.NID, ids[: structure.num_held], ids)
        dispatch.install()

    def _build_block(self, device: torch.device, edge_numbers: Tensor | None, alike: LayerBlock | None) -> Any:
        structure = self.structure
        if alike is not None:  # DGL's structure, and what our ops make of it, are shared
            return self._with_ids(alike._block.local_var(), device)
        num_src = structure.num_held + structure.exchange.num_received
        # Edge ids are spelled out although they are 0..E-1: without them DGL's float32 kernels fail on the reversed
        # block ("Check notnull: edges"), that is in the backward of attention. Layers share the memory of all this. DGL
        # sorts it in place for global negative sampling alone, which is not for these blocks (`DELEGATED`).
        dtype = structure.indices.dtype
        numbers = torch.arange(structure.num_edges, dtype=dtype) if edge_numbers is None else edge_numbers
        block = dgl.create_block(
            ("csc", (structure.indptr.to(dtype), structure.indices, numbers[: structure.num_edges].to(dtype))),
            num_src_nodes=num_src,
            num_dst_nodes=structure.num_dst,
        )
        return self._with_ids(move_graph(block, device), device)

    def _with_ids(self, block: Any, device: torch.device) -> Any:
        block.dstdata[dgl.NID] = self._rows_global[: self.structure.num_dst].to(device)
        return block

    # ---------------------------------------------------------------- data

    @property
    def srcdata(self) -> MutableMapping[str, Tensor]:
        return self._source

    @property
    def dstdata(self) -> Any:
        return self._block.dstdata

    @property
    def edata(self) -> Any:
        self._spell_out_edge_ids()
        return self._block.edata

    def _spell_out_edge_ids(self) -> None:
        if self._edge_ids is not None and dgl.EID not in self._block.edata:
            self._block.edata[dgl.EID] = self._edge_ids.get()

    @property
    def idtype(self) -> torch.dtype:
        """What ids of this block are given as; its structure may be held in fewer bytes, and positions that a user's
        function asks DGL's batches for (`edges.edges()`) are as wide as that.
        """
        return self._idtype

    @property
    def dstnodes(self) -> Any:
        """As DGL's: `dstnodes()` are positions, `dstnodes[ntype].data` fields."""
        return DestinationNodes(self._block.dstnodes, self._idtype)

    @property
    def _graph(self) -> dispatch.DeferredIndex:
        # `dgl.ops` functions take operands directly and reach for this; see `dispatch`.
        self._check_has_all_edges()
        # Made for each operation: kept here it would hold this block as this block holds it, and a layer's `local_var`,
        # with all fields that were set in it, would stay until somebody looks for cycles.
        return dispatch.DeferredIndex(self._block._graph, self._extend_one, self._note_edge_result)

    @property
    def split(self) -> SplitBlock | None:
        """What runs exchange and aggregation together; None: nothing does."""
        return self._split

    @property
    def is_dry_run(self) -> bool:
        """Whether the user's functions are being run on one made-up edge, whose result nobody reads."""
        return self._runs.is_dry_run

    @property
    def is_reducing(self) -> bool:
        """Whether a reduce of the user's is being run: on some destinations after others, in an order of DGL's."""
        return self._runs.is_reducing

    @property
    def is_in_scope(self) -> bool:
        """Whether a `local_scope` of this block is open: a layer is at work."""
        return self._source.is_in_scope

    def num_src_nodes(self, ntype: str | None = None) -> int:
        """Returns |C_(l-1)|: the rows a model's tensors have here, received ones not counted."""
        return self.structure.num_held

    number_of_src_nodes = num_src_nodes

    @property
    def srcnodes(self) -> SourceNodes:
        """As DGL's: `srcnodes()` are positions, `srcnodes[ntype].data` fields."""
        return SourceNodes(self._block.srcnodes, self._source, self.structure.num_held, self._idtype, self._where)

    def in_degrees(self, v: Any = None, etype: Any = None) -> Tensor:
        """Returns full-graph in-degrees of the destinations; most have all their in-edges in the block."""
        degrees = self._degrees.of_destinations.to(self._idtype)
        # As of a DGL graph they are the caller's own, which layers change in place (`+= 1`, `clamp_`).
        return degrees.clone() if _is_all(v) else degrees[v].clone()

    def out_degrees(self, u: Any = None, etype: Any = None) -> Tensor:
        """Returns the *full-graph* out-degrees of the (|C_(l-1)|,) sources held here, not those inside the block."""
        degrees = self._degrees.of_sources.to(self._idtype)
        return degrees.clone() if _is_all(u) else degrees[u].clone()

    def degree_factors(self, norm: str, dtype: torch.dtype, *, of_sources: bool) -> Tensor:
        """Returns what DGL's layers multiply rows by: the root of 1 / degree for the norm "both", else 1 / degree.

        Degrees are those of the full graph, at least 1. (C,) of the sources held here or (N,) of the destinations; the
        same tensor at every call, made at the first: not to be written to.
        """
        return self._degrees.factors(norm, dtype, of_sources=of_sources)

    @property
    def has_empty_rows(self) -> bool:
        """Whether some destination has no in-edges."""
        return self._degrees.has_empty_rows

    def weighted_out_degrees(self, edge_weight: Tensor) -> Tensor:
        """Returns the full-graph sum of out-edge weights of every source, received ones too, (C + R,).

        Raises:
            BlockError: If `edge_weight` is not a static edge field of the graph, or was changed since it was read.
        """
        sums = None if self._weighted_out_degrees is None else self._weighted_out_degrees(self, edge_weight)
        if sums is None:
            raise BlockError(
                f"EdgeWeightNorm(norm='both') needs the weights of all out-edges of a node, most of which are not in "
                f"this block ({self._where}). Pass the static edge field as it came from the loader, not written to: "
                f"`block.edata[name]` with prefetch_edge_feats=[name], or `g.edata[name][block.edata[dgl.EID]]`; for "
                f"learned or computed weights use norm='right' or 'none'. Blocks that a script moves to a device hold "
                f"copies: give FullGraphLoader(device=...) that device."
            )
        return sums

    def normalise_edge_weights(self, edge_weight: Tensor, *, norm: str, eps: float) -> Tensor:
        """Returns what `EdgeWeightNorm` gives for this block's edges on the whole graph; see `edge_weight_norm`."""
        self.is_normalising = True
        try:
            return normalise_edge_weights(self._block, edge_weight, self.weighted_out_degrees, norm=norm, eps=eps)
        finally:
            self.is_normalising = False

    def known_ids(self) -> list[Tensor]:
        """Returns the id tensors by which a script may have read rows."""
        of_edges = [] if self._edge_ids is None else self._edge_ids.all_made()
        return [self._source[dgl.NID], self._block.dstdata[dgl.NID], *of_edges]

    def source_ids(self) -> Tensor:
        """Returns the (C + R,) global ids of all sources, received ones last."""
        return torch.cat([self._rows_global[: self.structure.num_held], self.structure.exchange.recv_global])

    def rename_sources(self, held_ids: Tensor) -> None:
        """Has these be the ids of the sources held here; received ones keep theirs. For blocks that are made up."""
        received = self.structure.exchange.recv_global.to(held_ids.device)
        self._source.set_complete(dgl.NID, held_ids, torch.cat([held_ids, received]))

    def raised_degrees_of_first(self) -> contextlib.AbstractContextManager[None]:
        """Says of row 0 that it has more edges than any other, inside of this context. For blocks that are made up."""
        return self._degrees.raised_of_first()

    @contextlib.contextmanager
    def local_scope(self) -> Iterator[None]:
        """Forgets, at its end, fields set inside; as `DGLGraph.local_scope`."""
        self._used()
        with self._block.local_scope():
            self._source.push_scope()
            try:
                yield
            finally:
                self._source.pop_scope()

    def put_ids_back(self) -> None:
        """Before what is read by them: a script may have written its own, as it does with blocks of a sampler."""
        self._source.put_complete_back()
        if self._block.dstdata.get(dgl.NID) is not self._destination_ids:
            self._block.dstdata[dgl.NID] = self._destination_ids
        # Those of edges are spelled out when they are asked for.
        if self._edge_ids is not None and self._block.edata.get(dgl.EID) is not self._edge_ids.made:
            self._block.edata.pop(dgl.EID, None)

    def begin_epoch(
        self, source: Mapping[str, Tensor], destination: Mapping[str, Tensor], edge: Mapping[str, Tensor]
    ) -> None:
        """Forgets what the last epoch left in it: a block is new to every epoch, as blocks of a sampler are.

        Args:
            source, destination, edge: Fields that are there from the beginning. Rows received for the same tensor
                before stay, unless nothing is kept or exchanges are approximated, which are counted from the beginning.
        """
        self._source.reset(source, keeps_received=self.approximation is None and self.static_results.keeps)
        _reset_frame(self._block.srcdata, {}, None)
        _reset_frame(self._block.dstdata, destination, dgl.NID)
        _reset_frame(self._block.edata, edge, dgl.EID)
        if self.approximation is not None:
            self.approximation.begin_epoch()

    def begin_call(self) -> None:
        """A model is called: fields that are in the block by now are of calls before, whose backward may be done."""
        self._source.begin_call()

    def retire(self) -> None:
        """Lets go of everything, whoever still holds this block; using it raises an error from now on."""
        if self._split is not None:
            self._split.retire()
        self.__dict__.clear()
        self.__class__ = _RetiredBlock

    def local_var(self) -> LayerBlock:
        """Returns a copy whose fields can be changed without changing this block's."""
        return self._retyped(self._idtype)

    def _rebuilt(self, block: Any, idtype: torch.dtype) -> LayerBlock:
        device = torch.device(block.device)
        edge_ids = self._edge_ids
        if edge_ids is not None and device != torch.device(self._block.device):
            edge_ids = edge_ids.on(device)
        copy = LayerBlock(
            self.structure,
            self._communicator,
            rows_global=self._rows_global,
            out_degrees=self._degrees.of_sources,
            device=device,
            weighted_out_degrees=self._weighted_out_degrees,
            static_results=self.static_results,
            approximation=self.approximation,
            split=None if self._split is None else self._split.on(device),
            sums_first=self.sums_first,
            edge_ids=edge_ids,
            in_degrees=self._degrees.known_of_destinations,
            _block=block,
            _idtype=idtype,
        )
        copy.observer, copy.on_use = self.observer, self.on_use
        copy.on_edge_result, copy.on_edge_dropout = self.on_edge_result, self.on_edge_dropout
        return copy

    def _retyped(self, idtype: torch.dtype) -> LayerBlock:
        """A copy on the same device, with the same tensors for its fields (ids are known by identity)."""
        copy = self._rebuilt(self._block.local_var(), idtype)
        copy._source.adopt(self._source)
        return copy

    def to(self, device: torch.device | str, **kwargs: Any) -> LayerBlock:
        """Returns this block on `device`; itself when it is there already."""
        target = torch.device(device)
        current = torch.device(self._block.device)
        if target.type == current.type and target.index in (None, current.index):
            return self
        copy = self._rebuilt(move_graph(self._block, target, **kwargs), self._idtype)
        if copy._edge_ids is not None:  # known by identity, so not what moving has copied
            copy._block.edata.pop(dgl.EID, None)
        for name, value in self._source.items():
            if name != dgl.NID:
                copy.srcdata[name] = value.to(target)
        copy._source.adopt_calls(self._source)
        return copy

    def int(self) -> LayerBlock:
        return self if self._idtype == torch.int32 else self._retyped(torch.int32)

    def long(self) -> LayerBlock:
        return self if self._idtype == torch.int64 else self._retyped(torch.int64)

    # ---------------------------------------------------------------- message passing

    def update_all(self, message_func: Any, reduce_func: Any, apply_node_func: Any = None, etype: Any = None) -> None:
        """As `DGLGraph.update_all`, over held and received sources. Collective where it reads source fields.

        What builtins make of the loader's own tensors is made once and kept; the next epochs neither exchange nor sum.
        Each call gets a copy of its own, which a layer may divide in place.
        """
        self._used()
        operands = self._operands_of(message_func, reduce_func) if apply_node_func is None else ()
        if not self.static_results.are_static(operands):
            self._update_all(message_func, reduce_func, apply_node_func)
            return

        def aggregate() -> Tensor:
            self._update_all(message_func, reduce_func, None)
            result: Tensor = self._block.dstdata[reduce_func.out_field]
            return result

        key = (message_func.name, *targets_of(message_func), reduce_func.name)
        self._block.dstdata[reduce_func.out_field] = self.keep(key, operands, aggregate).clone()

    def keep(self, key: Hashable, operands: tuple[Tensor, ...], make: Callable[[], RowsT]) -> RowsT:
        """Returns what `make` returned the first time it was called for these operands. Collective where `make` is.

        Args:
            key: Says what is made of them.
            operands: For which `static_results.are_static` holds.
            make: Called without gradients; may use this block.
        """
        self._used()

        def make_and_release() -> RowsT:
            result = make()
            if self._split is not None:
                self._split.release()
            return result

        result = self.static_results.get(key, operands, make_and_release)
        if self.observer is not None:
            self.observer.on_kept_result(self.layer, operands)
        return result

    def sums_before_product(self, *, is_narrower: bool) -> bool:
        """Returns whether a layer whose product makes rows narrower, or does not, is to sum before it multiplies."""
        if is_narrower and self.observer is not None:
            self.observer.on_choice_of_order(self.layer)
        return self.sums_first or not is_narrower

    def _operands_of(self, message_func: Any, reduce_func: Any) -> tuple[Tensor, ...]:
        """Returns the fields that builtins read, if they are all of sources and edges, and are set; else nothing."""
        if not isinstance(message_func, fn.BuiltinFunction) or not isinstance(reduce_func, fn.BuiltinFunction):
            return ()
        data = {fn.TargetCode.SRC: self._source, fn.TargetCode.EDGE: self._block.edata}
        fields = fields_of(message_func)
        if any(target not in data or name not in data[target] for target, name in fields):
            return ()
        return tuple(data[target][name] for target, name in fields)

    def _update_all(self, message_func: Any, reduce_func: Any, apply_node_func: Any) -> None:
        if apply_node_func is not None:
            self._update_and_apply(message_func, reduce_func, apply_node_func)
            return
        if self._replicas is None:
            self._update_by_edges(message_func, reduce_func)
            return
        before = dict(self._block.dstdata)
        self._update_by_edges(message_func, reduce_func)
        for name in sorted(self._block.dstdata):
            result = self._block.dstdata[name]
            if before.get(name) is not result:
                self._block.dstdata[name] = self._with_rows_of_owners(result, self._replicas)

    def _update_and_apply(self, message_func: Any, reduce_func: Any, apply_node_func: Any) -> None:
        """As DGL does: the function sees what was reduced beside the fields of destinations, and what it returns alone
        is set.
        """
        self._complete(message_func)
        self._observe(message_func)
        before = dict(self._block.dstdata)
        rows = before | self._runs.reduced(message_func, reduce_func)
        if self._replicas is not None:
            for name in sorted(rows):
                if before.get(name) is not rows[name]:
                    rows[name] = self._with_rows_of_owners(rows[name], self._replicas)
        ids = before[dgl.NID] if dgl.NID in before else self.dstnodes()
        self._runs.apply_nodes(apply_node_func, reduce_func, ids, rows)

    @unseen
    def _with_rows_of_owners(self, rows: Tensor, replicas: ReplicaRows) -> Tensor:
        """Returns (|C_l|, ...) rows, those of replicas as their owners have them. Collective; differentiable."""
        plan = replicas.exchange
        if rows.requires_grad:
            (extended,) = extend_rows([rows], plan, self._communicator)
            order = torch.arange(len(rows), device=rows.device)
            order[replicas.positions] = torch.arange(len(rows), len(extended), device=rows.device)
            return extended.index_select(0, order)
        sent = rows.index_select(0, plan.send_index)
        received = self._communicator.exchange(sent, plan.send_counts, plan.recv_counts, layer=self.layer)
        return rows.index_copy(0, replicas.positions, received)

    def _update_by_edges(self, message_func: Any, reduce_func: Any) -> None:
        if self._sum_split(message_func, reduce_func):
            return
        self._complete(message_func)
        self._observe(message_func)
        self._runs.update_all(message_func, reduce_func)

    def _sum_split(self, message_func: Any, reduce_func: Any) -> bool:
        """Runs sums and means of rows, and of rows times constant weights, with their exchange inside.

        Returns whether it did; alike on every rank, as it follows from the program. After `route_ops("none")` only
        rows that are received in chunks are summed here: DGL's kernels would need them all.
        """
        if not isinstance(message_func, fn.BuiltinFunction) or not isinstance(reduce_func, fn.BuiltinFunction):
            return False
        if not are_blocks_served() and (self._split is None or not self._split.is_chunked):
            return False
        (target, name), *more = fields_of(message_func)
        is_product = message_func.name == "u_mul_e"
        if reduce_func.name not in ("sum", "mean") or not (is_product or message_func.name == "copy_u"):
            return False
        if target != fn.TargetCode.SRC or self.split_of((name,), is_sum=True) is None:
            return False
        assert self._split is not None
        x = self._source[name]
        if not is_product:
            summed = self._split.sum(x)
        else:
            ((_, weight_name),) = more
            weights = self._block.edata.get(weight_name)
            if weights is None or weights.requires_grad or weights.dtype != x.dtype:
                return False
            summed = self._split.plain_sums(x, weights)
        if reduce_func.name == "mean":
            degrees = self._block.in_degrees().clamp(min=1).to(summed)
            summed = summed / degrees.view(-1, *(1,) * (summed.dim() - 1))
        count(message_func.name, "ours: split by source")
        self._block.dstdata[reduce_func.out_field] = summed
        return True

    def scaled_sum(self, name: str, factors: Tensor, *, of_sources: bool) -> Tensor:
        """Sums a source field over in-edges, rows or sums times a factor each. Collective.

        As multiplying before `update_all` with `copy_u` and `sum`, or after it, but without a pass of its own where the
        sum is ours.

        Args:
            factors: (|C_(l-1)|, 1) or, of sums, (|C_l|, 1), of the field's dtype; without gradients.
            of_sources: Which of the two.
        """
        self._used()
        x = self._source[name]
        if self._replicas is None and self.observer is None and not self.static_results.are_static((x,)):
            split = self.split_of((name,), is_sum=True)
            if split is not None:
                count("copy_u", "ours: split by source")
                return split.sum(x, Scale(factors.reshape(-1), of_sources))
            edges = sparse_graph_of(self._block._graph, x.device) if self.plan.is_idle and x.requires_grad else None
            if edges is not None and not torch.is_autocast_enabled(x.device.type):
                count("copy_u", "ours: with factors")
                return scaled_sum(edges, x, factors, of_sources=of_sources)
        with self.local_scope():
            self.srcdata[name] = x * factors if of_sources else x
            self.update_all(fn.copy_u(name, "m"), fn.sum("m", name))
            summed: Tensor = self.dstdata[name]
        return summed if of_sources else summed * factors

    @unseen
    def sums_beside_work(self, x: Tensor, *weights: Tensor, flops: float) -> SplitSum | None:
        """Returns what sums rows, x or what a layer makes of it, while others of its work run; None: nothing does, as
        the exchange and the sum are not ours, or rows go through memory: there next to nothing is waited for, and work
        in another order holds more at a time. Collective at its first use.

        Args:
            x: (C, ...), the layer's input.
            weights: What it multiplies x by before anything is summed.
            flops: Of that other work, forward and backward.
        """
        self._used(x, *weights)
        if self.observer is not None:
            self.observer.on_work_beside(self.layer, flops)
        is_at_hand = self._replicas is not None or self.static_results.are_static((x,))
        if is_at_hand or not self._communicator.moves_in_background:
            return None
        with self.local_scope():
            self.srcdata["h"] = x
            split = self.split_of(("h",), is_sum=True)
        if split is None:
            return None
        count("copy_u", "ours: split by source, work beside")
        return split.sums(is_trained=torch.is_grad_enabled() and any(rows.requires_grad for rows in (x, *weights)))

    @unseen
    def split_of(self, names: Sequence[str], *, is_sum: bool = False) -> SplitBlock | None:
        """Returns what runs an operation that reads these source fields with their exchange inside; None: not possible.

        Not where rows are at hand already, are not float32 or float64, would travel with other fields, or are
        approximated (but for narrower rows of sums).
        """
        if self._split is None or self.observer is not None:
            return None
        if self.approximation is not None and (not is_sum or self.approximation.approximation.is_stale):
            return None
        fields = [self._source[name] for name in names if name in self._source]
        dtypes = {x.dtype for x in fields}
        if len(fields) != len(names) or len(dtypes) != 1 or not dtypes <= {torch.float32, torch.float64}:
            return None
        if torch.is_autocast_enabled(fields[0].device.type):
            return None
        travelling = [set(self._source.would_travel(name)) for name in names]
        return self._split if all(together == set(names) for together in travelling) else None

    def apply_edges(self, func: Any, edges: Any = None, etype: Any = None) -> None:
        """As `DGLGraph.apply_edges` on all edges. Collective where it reads source fields."""
        if not _is_all(edges):
            raise BlockError(f"apply_edges on some edges only is not possible on a LayerBlock ({self._where})")
        self._used()
        self._complete(func)
        self._observe(func)
        self._runs.apply_edges(func)

    @unseen
    def complete_sources(self, names: Sequence[str]) -> list[Tensor]:
        """Returns source fields with the received rows, each (C + R, ...), exchanged as an operation would. Collective.

        For layers whose operation is no builtin of DGL: it runs on `real_index`.
        """
        self._used()
        completed = self._source.complete(names, self._extend)
        return [completed[name] for name in names]

    @property
    def real_index(self) -> Any:
        """DGL's index of the edges from held and received sources."""
        self._check_has_all_edges()
        return self._block._graph

    def _check_has_all_edges(self) -> None:
        """For operations whose results this block does not see, so that it could not take some of them from others."""
        self.static_results.are_not_all = True
        if self._replicas is not None:
            raise BlockError(
                f"{self._where}: when the plan was made, this layer did nothing but sum up features that never change, "
                f"so vertices that are cached here get those sums from their owners and have no in-edges. What runs "
                f"now (attention, or an operation of dgl.ops) needs them. Make the loader with keep_static=False."
            )

    def _used(self, *operands: Tensor) -> None:
        if self.on_use is not None:
            self.on_use(self, operands)

    def fields_to_train(self) -> list[Tensor]:
        """Returns the fields of sources, destinations and edges that need a gradient."""
        frames: tuple[Mapping[str, Tensor], ...] = (self._source, self._block.dstdata, self._block.edata)
        fields = [frame[name] for frame in frames for name in frame]  # `values()` of DGL's are not the tensors
        return [rows for rows in fields if rows.requires_grad]

    def _complete(self, func: Any) -> None:
        """Hands the real block the fields that `func` reads: source fields, by an exchange, and ids of edges."""
        if may_read_edge_ids(func):
            self._spell_out_edge_ids()
        for name, tensor in self._source.complete(self._runs.names_read_by(func), self._extend).items():
            self._block.srcdata[name] = tensor

    @unseen
    def _extend(self, fields: list[Tensor]) -> list[Tensor]:
        if self.observer is not None:
            self.observer.on_exchange(self.layer, fields)
        return extend_rows(fields, self.plan, self._communicator, approximation=self.approximation)

    def _extend_one(self, field: Tensor) -> Tensor:
        self._used(field)
        return self._extend([field])[0]

    def _note_edge_result(self, result: Tensor) -> None:
        if self.on_edge_result is not None:
            self.on_edge_result(result, self.layer)

    def _observe(self, func: Any) -> None:
        if self.observer is not None:
            fields = [self._block.srcdata[name] for name in (source_fields_of(func) or [])]
            is_weighted = isinstance(func, fn.BinaryMessageFunction) and fn.TargetCode.EDGE in (func.lhs, func.rhs)
            self.observer.on_message_passing(self.layer, fields, is_weighted=is_weighted)

    # ---------------------------------------------------------------- the rest

    def __getitem__(self, key: Any) -> LayerBlock:
        return self

    def __getattr__(self, name: str) -> Any:
        if name in DELEGATED:
            return getattr(self.__dict__["_block"], name)
        if name.startswith("__") or not hasattr(dgl.DGLGraph, name):
            raise AttributeError(f"'LayerBlock' object has no attribute {name!r}")
        hint = HINTS.get(name, "use `update_all`, `apply_edges`, `srcdata`, `dstdata`, `edata` and the degrees")
        raise BlockError(f"'{name}' is not available on a LayerBlock ({self._where}): {hint}.")

    def __deepcopy__(self, memo: Any) -> LayerBlock:
        raise BlockError(
            f"a LayerBlock ({self._where}) cannot be copied: its exchanges are agreed on with the other ranks. Keep "
            f"the block itself, which is the same in every epoch until the plan changes."
        )

    def __repr__(self) -> str:
        s = self.structure
        return (
            f"LayerBlock(layer={s.layer}, num_src_nodes={s.num_held} (+ {s.exchange.num_received} received), "
            f"num_dst_nodes={s.num_dst}, num_edges={s.num_edges})"
        )


class _RetiredBlock(LayerBlock):
    """A block whose plan was replaced by another one."""

    is_retired = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"'LayerBlock' object has no attribute {name!r}")
        raise BlockError(
            "this block is of a plan that was replaced since: take the blocks, and the ids, that the loader yields in "
            "each epoch (plans take turns in the first epochs of strategy 'hybrid' unless autotune=False)"
        )

    def __repr__(self) -> str:
        return "LayerBlock(of a plan that was replaced)"


def _reset_frame(frame: Any, known: Mapping[str, Tensor], ids: str | None) -> None:
    for name in [name for name in frame if name not in known and name != ids]:
        frame.pop(name)
    for name, rows in known.items():
        if name not in frame or frame[name] is not rows:
            frame[name] = rows


def _is_all(selection: Any) -> bool:
    return selection is None or (isinstance(selection, str) and selection == dgl.ALL)
