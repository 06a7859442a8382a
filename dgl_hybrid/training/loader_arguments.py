# SPDX-License-Identifier: Apache-2.0
"""What a script gives a loader, checked, as the loader needs it. Not collective: ranks may find different faults."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Any

import dgl
import torch
from dgl.distributed import DistTensor
from torch import Tensor, nn

from dgl_hybrid.errors import PlanError
from dgl_hybrid.exchange.transport import Transport
from dgl_hybrid.planner import DependencyPlan, PlannerConfig, chunk_rows_within
from dgl_hybrid.training.partitioned_graph import PartitionedGraph

IGNORED = frozenset(
    (
        *("batch_size", "shuffle", "drop_last", "collate_fn", "num_workers", "use_ddp", "ddp_seed", "pin_memory"),
        *("use_uva", "persistent_workers", "prefetch_factor", "queue_size"),
    )
)
"""What `DistNodeDataLoader` takes and a loader of one batch has no use for."""


def sampler_of(sampler: Any, graph_sampler: Any) -> Any:
    """Returns the sampler, which may be given by the name that it has in DGL.

    Raises:
        TypeError: It is given twice, or not at all.
    """
    if sampler is not None and graph_sampler is not None:
        raise TypeError(
            "FullGraphLoader got sampler and graph_sampler, which is DGL's name for it: give one of the two"
        )
    if sampler is None and graph_sampler is None:
        raise TypeError("FullGraphLoader needs a sampler or a number of layers (got neither sampler nor graph_sampler)")
    return graph_sampler if sampler is None else sampler


def num_layers_of(sampler: Any) -> int:
    """Returns the number of layers of a DGL sampler, or the number itself.

    Raises:
        TypeError, ValueError: If there is no telling, or it is not positive.
    """
    if isinstance(sampler, dgl.dataloading.EdgePredictionSampler):
        raise TypeError("full-graph link prediction is not there yet: give a node sampler (got EdgePredictionSampler)")
    if isinstance(sampler, dgl.dataloading.ShaDowKHopSampler):
        raise TypeError(
            "ShaDowKHopSampler draws one subgraph for all layers, and an epoch here has a block for each: give a "
            "neighbour sampler or a number of layers (got ShaDowKHopSampler)"
        )
    is_of_dgl = isinstance(sampler, (dgl.dataloading.NeighborSampler, dgl.dataloading.LaborSampler))
    for name in ("prob", "mask") if is_of_dgl else ():  # elsewhere such names may mean anything
        if getattr(sampler, name, None) is not None:
            raise ValueError(
                f"the sampler draws edges by {getattr(sampler, name)!r}, which would leave some out: every in-edge is "
                f"aggregated here. Remove those edges from the graph, or multiply messages by edge weights."
            )
    if is_of_dgl and getattr(sampler, "edge_dir", "in") != "in":
        raise ValueError(f"blocks are made of in-edges (got edge_dir={sampler.edge_dir!r}): reverse the graph first")
    if isinstance(sampler, int) and not isinstance(sampler, bool):
        depth = sampler
    elif hasattr(sampler, "fanouts"):
        depth = len(sampler.fanouts)
    elif hasattr(sampler, "num_layers"):
        depth = int(sampler.num_layers)
    else:
        raise TypeError(
            f"the sampler must have `fanouts` or `num_layers`, or be a number of layers (got {type(sampler).__name__})"
        )
    if depth < 1:
        raise ValueError(f"the number of layers must be at least 1 (got {depth})")
    return depth


def config_of(strategy: str | None, planner: PlannerConfig | None) -> PlannerConfig:
    """Returns the planner's options.

    Raises:
        TypeError: Of something else than options.
        ValueError: Of an unknown strategy, or two different ones.
    """
    if not isinstance(planner, (PlannerConfig, NoneType)):
        raise TypeError(f"planner must be a PlannerConfig (got {type(planner).__name__})")
    if planner is None:
        return PlannerConfig() if strategy is None else PlannerConfig(strategy=strategy)
    if strategy is not None and strategy != planner.strategy:
        raise ValueError(
            f"strategy={strategy!r} and planner=PlannerConfig(strategy={planner.strategy!r}) contradict each other: "
            f"the strategy of a planner is 'hybrid' unless it is given another. Write "
            f"planner=PlannerConfig(strategy={strategy!r}, …)"
        )
    return planner


def check_autotune(autotune: Any) -> None:
    """Checks how much trials of plans may take.

    Raises:
        ValueError: It is no bool and no share of at least 0.
    """
    if isinstance(autotune, str) or not autotune >= 0.0:
        raise ValueError(f"autotune must be a bool or a share of at least 0 (got {autotune!r})")


def check_model(model: object) -> None:
    """Checks what is to be planned for.

    Raises:
        TypeError: It is no module.
    """
    if not isinstance(model, (nn.Module, NoneType)):
        raise TypeError(f"model must be the torch.nn.Module that is trained, or None (got {type(model).__name__})")


def seed_ids(nids: Any, g: PartitionedGraph) -> Tensor:
    """Returns the global ids a script asks for by ids, or by a mask over its own nodes; on the CPU, unchecked.

    Raises:
        TypeError, ValueError: Of a dictionary by node type, what is no ids, or a mask of another length.
    """
    if isinstance(nids, dict):
        raise TypeError("full-graph training on heterogeneous graphs is not there yet: give one tensor of node ids")
    try:
        if isinstance(nids, DistTensor):  # which PyTorch would read number by number from its servers
            raise TypeError("a field of the whole graph")
        ids = torch.as_tensor(nids)
    except (TypeError, ValueError, RuntimeError) as error:
        what = type(nids).__name__ if isinstance(nids, DistTensor) else f"{type(nids).__name__} {nids!r:.60}"
        raise TypeError(
            f"nids must be ids of nodes, or a mask over this rank's own (got {what}): "
            f"g.owned_nodes('train_mask'), say, or dgl.distributed.node_split of a DistGraph"
        ) from error
    if ids.numel() == 0 and ids.dim() == 1 and ids.dtype != torch.bool:
        return ids.new_empty(0, dtype=torch.int64, device="cpu")  # an empty list or array is floating by default
    if ids.dtype == torch.bool:
        owned = g.nodes.owned()
        if ids.shape != owned.shape:
            raise ValueError(
                f"a mask of seeds must have {len(owned)} entries, one for each own node (got {tuple(ids.shape)})"
            )
        return owned[ids.cpu()]
    return ids.cpu()


def cached_of(plan: DependencyPlan | Sequence[Tensor], num_layers: int, g: PartitionedGraph) -> list[Tensor]:
    """Returns the (n,) int64 global ids that a plan caches at each level from 0.

    Raises:
        PlanError: Of a plan of another rank, or for another number of layers.
        TypeError, ValueError: Of ids that are no integers, or out of range.
    """
    where = f"rank {g.rank()} of {g.nodes.world_size}"
    if isinstance(plan, DependencyPlan):
        if plan.rank != g.rank() or plan.world_size != g.nodes.world_size:
            raise PlanError(
                f"the plan is for rank {plan.rank} of {plan.world_size}, but this is {where}. Load each rank's own."
            )
        cached = list(plan.cached)
    else:
        if isinstance(plan, (str, Path)):
            raise TypeError(
                f"plan must be a DependencyPlan, or ids by level (got {str(plan)!r}): "
                f"dgl_hybrid.planner.load_plan(folder, rank) reads a rank's own"
            )
        given = [torch.as_tensor(ids) for ids in plan]
        if any(ids.is_floating_point() and len(ids) for ids in given):
            raise TypeError(f"the ids of a plan must be integers (got {[str(ids.dtype) for ids in given]}) on {where}")
        cached = [torch.unique(ids.to(torch.int64)) for ids in given]
    if len(cached) != num_layers:
        raise PlanError(
            f"the plan has {len(cached)} layers, but the model has {num_layers} ({where}). Plan again for this model."
        )
    for level, ids in enumerate(cached):
        g.nodes.check_range(ids, f"cached ids of level {level}")
    return cached


def check_budget(plan: object, budget_bytes: float | None) -> None:
    """Checks that a plan which was made before holds no more than may be held now.

    Raises:
        PlanError: It was predicted to.
    """
    if budget_bytes is None or not isinstance(plan, DependencyPlan) or plan.estimate is None:
        return
    if plan.chunk_rows is not None:
        fitting = None if plan.trace is None else chunk_rows_within(plan.trace, budget_bytes)
        if plan.trace is not None and (fitting is None or plan.chunk_rows > fitting):
            raise PlanError(
                f"the plan receives {plan.chunk_rows:,} rows at a time, and the memory budget of {budget_bytes:,.0f} "
                f"bytes has room for {fitting or 0:,}: plan again with this budget, or leave it out"
            )
        return
    held = max(of_rank.held_bytes for of_rank in plan.estimate.ranks)
    if held > budget_bytes:
        raise PlanError(
            f"the plan lets a rank hold {held:,.0f} bytes of other ranks' rows, and the memory budget is "
            f"{budget_bytes:,.0f}: plan again with this budget, or leave it out"
        )


def check_device(device: torch.device, transport: Transport | None) -> None:
    """Checks that blocks lie where rows are moved from, if that is a GPU.

    Raises:
        ValueError: They would lie on another one.
    """
    gpu = None if transport is None else transport.device
    if gpu is not None and gpu.type == "cuda" == device.type and gpu != device:
        raise ValueError(
            f"blocks would lie on {device}, and NCCL moves tensors of {gpu} on this rank: give device={str(gpu)!r}, or "
            f"call torch.cuda.set_device before device='cuda'"
        )


def dense_below_of(plan: object, num_layers: int) -> int:
    """Returns the level below which every owned node is computed: the last that batch norm couples, where known."""
    if not isinstance(plan, DependencyPlan) or plan.trace is None:
        return num_layers
    return max((level + 1 for level, layer in enumerate(plan.trace.layers) if layer.mixes_rows), default=0)


def keeps_first_layer(plan: object) -> bool:
    """Whether the model that the plan was made for keeps what its first layer aggregates; bare ids do not say."""
    return isinstance(plan, DependencyPlan) and plan.trace is not None and plan.trace.layers[0].keeps_result


def sums_first_of(plan: object, num_layers: int) -> tuple[bool, ...]:
    """Returns which layers sum before they multiply; bare ids say nothing of the model, which then runs as DGL has it.

    Raises:
        PlanError: Of a plan that was made for a model of another number of layers.
    """
    if not isinstance(plan, DependencyPlan) or plan.trace is None:
        return ()
    if plan.trace.num_layers != num_layers:
        raise PlanError(
            f"the plan of rank {plan.rank} of {plan.world_size} holds the trace of a model of {plan.trace.num_layers} "
            f"layers, but this one has {num_layers}. Plan again for this model."
        )
    return plan.trace.sums_first
