# SPDX-License-Identifier: Apache-2.0
"""What a script gets wrong, on one rank or on all: raised on every rank, with what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import dgl
import pytest
import torch
from dgl.data.utils import load_tensors, save_tensors
from dgl.distributed import DistTensor
from torch import Tensor, nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph, infer, partition_graph
from dgl_hybrid.errors import PartitionError, PlanError
from dgl_hybrid.planner import PlannerConfig, uniform_topology
from dgl_hybrid.training.fields import StoredFields
from dgl_hybrid.training.loader_arguments import num_layers_of
from tests.helpers.exactness import Case
from tests.helpers.graphs import power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import run_ranks, run_ranks_expect_errors
from tests.training.loader_cases import Centred, open_graph


def make_loader(rank: int, world_size: int, part_config: str, mistake: str) -> None:
    g, model = open_graph(part_config)
    seeds, options = g.owned_nodes("train_mask"), {"topology": uniform_topology(world_size)}
    sampler: Any = 2
    if mistake == "seed out of range" and rank == 1:
        seeds = torch.tensor([0, g.num_nodes()])
    elif mistake == "no seeds":
        seeds = seeds[:0]
    elif mistake == "float seeds" and rank == 0:
        seeds = seeds.double()
    elif mistake == "short mask" and rank == world_size - 1:
        seeds = torch.ones(3, dtype=torch.bool)
    elif mistake == "strategy":
        options["strategy"] = "best"
    elif mistake == "two strategies":
        options |= {"strategy": "hybrid", "planner": PlannerConfig(strategy="depcomm")}
    elif mistake == "plan depth":
        options["plan"] = [seeds[:0]] * 3
    elif mistake == "model depth":
        options["model"] = Case(kind="gcn_both", num_layers=1).build(g.ndata["feat"].shape[1])
    elif mistake == "last norm":
        options["model"] = _Normalised(model)
    elif mistake == "unlike" and rank == 2:
        options["plan"] = [seeds[:0]] * 2
    elif mistake == "unlike strategies" and rank == 1:
        options["strategy"] = "depcache"
    elif mistake == "unlike rates" and rank == 0:
        options["topology"] = None
    elif mistake == "no memory for an order of rows":
        options["row_order"] = "locality"
        if rank == 1:
            g.places = mock.Mock(find=mock.Mock(side_effect=MemoryError("no room for 5 clusters")))
    elif mistake == "unlike row orders" and rank == 1:
        options["row_order"] = "id"
    elif mistake == "float plan":
        options["plan"] = [torch.tensor([1.5]), seeds[:0]]
    elif mistake == "mask by name" and rank == 0:
        seeds = "train_mask"
    elif mistake == "no ids" and rank == 2:
        seeds = None
    elif mistake == "field of the whole graph" and rank == 1:
        seeds = object.__new__(_Field)
    elif mistake == "plan by folder":
        options["plan"] = "plans"
    elif mistake == "planner as a dictionary" and rank == 1:
        options["planner"] = {"strategy": "depcomm"}
    elif mistake == "half a row":
        options["chunk_rows"] = 1.5
    elif mistake == "more rows than there are" and rank == 1:
        options["chunk_rows"] = 2**63
    elif mistake == "autotune in words":
        options["autotune"] = "yes"
    elif mistake == "model by name":
        options["model"] = "sage"
    elif mistake == "mask of two columns" and rank == 0:
        with g.communicator.agreed():
            g.owned_nodes("feat")
    elif mistake == "mask of two columns":
        with g.communicator.agreed():
            pass
    elif mistake == "no such device" and rank == 1:
        options["device"] = "gpu"
    elif mistake == "no layers" and rank == 2:
        sampler = 0
    elif mistake == "nothing to prefetch" and rank == 0:
        sampler = dgl.dataloading.NeighborSampler([1, 1], prefetch_edge_feats=["colour"])
    elif mistake == "two types to prefetch" and rank == 1:
        sampler = dgl.dataloading.NeighborSampler([1, 1], prefetch_labels={"a": ["label"], "b": ["label"]})
    elif mistake == "no input":
        options["model"] = model
        if rank == 1:
            g.ndata = StoredFields({"x1": torch.zeros(len(g.nodes.owned()), 2)}, g.nodes, g.row_sets, "node")
    elif mistake == "function to infer":
        infer(lambda blocks, x: x, g, 2)  # type: ignore[arg-type]
    elif mistake == "mixing in a dataclass":
        options["model"] = _Wrapped(Centred(model))
    elif mistake == "mixing":
        options["model"] = Centred(model)
    FullGraphLoader(g, seeds, sampler, **options)


MISTAKE_TIMEOUT_S = 120.0
"""Ranks that are left alone wait for three quarters of it."""


class _Field(DistTensor):  # type: ignore[misc]
    """Of a `DistGraph`: every number that is asked for comes from a server."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: Any) -> Tensor:
        raise AssertionError("nobody is to read it number by number")

    def __del__(self) -> None: ...


class _Normalised(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.norm = model, nn.BatchNorm1d(3).double()

    def forward(self, blocks: list[object], x: Tensor) -> Tensor:
        return self.norm(self.model(blocks, x))


@dataclass
class _Output:
    logits: Tensor


class _Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, blocks: list[object], x: Tensor) -> _Output:
        return _Output(self.model(blocks, x))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("seed out of range", r"seeds must lie in \[0, 60\) \(got 60, and 1 such in all\)"),
        ("no seeds", "no rank has a seed"),
        ("float seeds", "one-dimensional integer tensor"),
        ("short mask", "a mask of seeds must have"),
        ("strategy", "unknown strategy .*choose one of hybrid"),
        ("two strategies", r"strategy='hybrid' and planner=PlannerConfig\(strategy='depcomm'\) contradict each other"),
        ("plan depth", "the plan has 3 layers, but the model has 2"),
        (
            "unlike",
            "make the same loader: plan given is 0 on rank 0 and 1 on rank 2$",
        ),
        ("unlike strategies", r"make the same loader: strategy is \d on rank 0 and \d on rank 1$"),
        ("unlike rates", "make the same loader: rates given is 0 on rank 0 and 1 on rank 1$"),
        ("no memory for an order of rows", "no room for 5 clusters"),
        ("unlike row orders", r"loader: row_order \(of auto, id, locality\) is 0 on rank 0 and 1 on rank 1$"),
        ("float plan", "the ids of a plan must be integers"),
        ("mask by name", r"nids must be ids of nodes.*got str 'train_mask'\): g\.owned_nodes\('train_mask'\), say"),
        ("no ids", r"nids must be ids of nodes, or a mask over this rank's own \(got NoneType None\)"),
        ("field of the whole graph", r"nids must be ids of nodes.*\(got _Field\): g\.owned_nodes\('train_mask'\), say"),
        (
            "plan by folder",
            r"plan must be a DependencyPlan, or ids by level \(got 'plans'\): .*load_plan\(folder, rank\)",
        ),
        ("planner as a dictionary", r"planner must be a PlannerConfig \(got dict\)"),
        ("half a row", r"chunk_rows must be an integer from 1 to 10\^18 or None \(got 1\.5\)"),
        (
            "more rows than there are",
            r"chunk_rows must be an integer from 1 to 10\^18 or None \(got 9223372036854775808\)",
        ),
        ("autotune in words", r"autotune must be a bool or a share of at least 0 \(got 'yes'\)"),
        ("model by name", r"model must be the torch\.nn\.Module that is trained, or None \(got str\)"),
        ("mask of two columns", r"a mask has one entry for each node \(field 'feat' has \(\d+,\)\)"),
        ("no such device", "Expected one of cpu, cuda"),
        ("no layers", r"the number of layers must be at least 1 \(got 0\)"),
        ("nothing to prefetch", "no edge field .{1,3}colour"),
        ("two types to prefetch", r"prefetch_labels names fields of 2 types \(a, b\)"),
        ("no input", r"cannot tell which node field is the model's input.* \(got fields \['x1'\]\)"),
        ("function to infer", r"infer needs a torch\.nn\.Module, called as model\(blocks, x\) \(got function\)"),
        ("model depth", "zip|does not use the blocks"),
        ("last norm", "normalises the output of its last layer"),
        ("mixing", "mixes rows of different vertices"),
        ("mixing in a dataclass", "mixes rows of different vertices"),
    ],
)
def test_a_mistake_on_one_rank_is_raised_on_all(mistake: str, message: str, partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 3)
    errors = run_ranks_expect_errors(3, make_loader, folder, mistake, timeout=MISTAKE_TIMEOUT_S)
    assert len(errors) == 3
    for error in errors:
        assert re.search(message, error.message), error.message


def open_wrong_number(rank: int, world_size: int, part_config: str) -> None:
    PartitionedGraph.open(part_config)


def test_other_number_of_ranks_than_parts(partitions: PartitionStore) -> None:
    errors = run_ranks_expect_errors(2, open_wrong_number, partitions.get("power_law", power_law(), 3))
    assert all("has 3 parts, but 2 ranks are running" in error.message for error in errors)
    assert not any("init_process_group" in error.message for error in errors)


def train_within(rank: int, world_size: int, part_config: str, num_bytes: int) -> str | int | None:
    g, model = open_graph(part_config)
    planner = PlannerConfig(memory_budget_bytes=num_bytes)
    try:
        loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, model=model, planner=planner, autotune=False)
    except PlanError as error:
        return str(error)
    assert loader.best_plan is not None
    return loader.best_plan.chunk_rows


@pytest.mark.parametrize(("num_nodes", "chunk_rows"), [(60, None), (4000, 64)])
def test_the_budget_that_an_error_names_is_enough(
    num_nodes: int, chunk_rows: int | None, partitions: PartitionStore
) -> None:
    """It was what all rows at once take, also where messages of 64 of them need less."""
    graph = power_law(num_nodes, 5 * num_nodes)
    folder = partitions.get(f"power_law {num_nodes}", graph, 2)
    (said, _) = run_ranks(2, train_within, folder, 1)
    assert isinstance(said, str)
    needed = int(re.findall(r"needs at least (\d+) bytes for its halo rows\.", said)[0])
    assert run_ranks(2, train_within, folder, needed) == [chunk_rows] * 2
    assert isinstance(run_ranks(2, train_within, folder, needed - 1)[0], str)


def count_vertices(rank: int, world_size: int, location: str) -> int:
    return PartitionedGraph.open(location).num_nodes()


def test_a_partition_is_named_by_its_folder_too(partitions: PartitionStore) -> None:
    file = Path(partitions.get("power_law", power_law(), 2))
    assert run_ranks(2, count_vertices, str(file.parent)) == run_ranks(2, count_vertices, str(file))


def test_who_opens_a_graph_before_the_process_group_is_told(partitions: PartitionStore) -> None:
    """Under torchrun each of two ranks was told that one was running."""
    with pytest.raises(PartitionError, match=r"has 3 parts, but 1 ranks .*call init_process_group before"):
        PartitionedGraph.open(partitions.get("power_law", power_law(), 3))


def open_another(rank: int, world_size: int, part_configs: list[str]) -> str:
    try:
        PartitionedGraph.open(part_configs[rank])
    except PartitionError as error:
        return str(error)
    return ""


def test_ranks_on_different_partitions_are_told(tmp_path: Path) -> None:
    """Each is sound in itself: copied at another time to another host. Rows of another graph were exchanged."""
    graph = power_law()
    for name in ("old", "new"):
        partition_graph(graph, "g", 2, tmp_path / name, part_method="contiguous")
        graph.ndata["feat"] = graph.ndata["feat"] + 1.0
    for said in run_ranks(2, open_another, [str(tmp_path / name / "g.json") for name in ("old", "new")]):
        assert said.startswith("rank 1 of 2 has opened another partition than rank 0 has")
        assert "Copy one partition folder to all hosts again" in said


@pytest.mark.parametrize("fault", ["no field", "narrower", "another dtype", "edges", "none in rank 0"])
def test_parts_with_other_fields_are_told(fault: str, tmp_path: Path) -> None:
    """Nothing in a plain folder says what its parts hold: one rank failed where it read, and the others waited for it,
    or took its bytes for rows of their own width.
    """
    dgl.distributed.partition_graph(power_law(), "g", 3, str(tmp_path), part_method="random")
    part = 0 if fault == "none in rank 0" else 2
    kind, key = ("edge", "_N:_E:_N/w") if fault == "edges" else ("node", "_N/feat")
    path = tmp_path / f"part{part}" / f"{kind}_feat.dgl"
    data = load_tensors(str(path))
    if fault in ("no field", "none in rank 0"):
        del data[key]
    elif fault == "narrower":
        data[key] = data[key][:, 1:].contiguous()
    elif fault == "another dtype":
        data[key] = data[key].to(torch.float16)
    else:
        data[key] = data[key][:, None].expand(-1, 2).contiguous()
    save_tensors(str(path), data)
    other = 1 if part == 0 else 2
    for error in run_ranks_expect_errors(3, open_wrong_number, str(tmp_path / "g.json")):
        assert error.type_name == "PartitionError"
        assert f"the {kind} field {key.partition('/')[2]!r} is " in error.message
        assert "in the part of rank 0, and " in error.message
        assert f"in that of rank {other} of 3" in error.message


def make_with_loss(rank: int, world_size: int, part_config: str, **of_rank: dict[str, Any]) -> str:
    g = PartitionedGraph.open(part_config)
    try:
        FullGraphLoader(g, g.owned_nodes(), 2, **of_rank[f"rank{rank}"])
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            {"loss_reduction": "none"},
            {"loss_reduction": "none"},
            "loss_reduction must be one of mean, sum, weighted (got 'none')",
        ),
        ({}, {"loss_reduction": "Sum"}, "loss_reduction must be one of mean, sum, weighted (got 'Sum')"),
        ({}, {"loss_reduction": "sum"}, "loss_reduction is 0 on rank 0 and 1 on rank 1"),
        (*[{"loss_reduction": "sum", "loss_denominator": 3.0}] * 2, "has no meaning with loss_reduction='sum'"),
        (
            *[{"loss_reduction": "weighted", "loss_denominator": 1.0}] * 2,
            "has no meaning with loss_reduction='weighted'",
        ),
        # Where the other rank has one seed, or none, that is a number there: it waited for this one.
        ({"loss_denominator": torch.ones(5)}, {"loss_denominator": torch.ones(1)}, "(got a tensor of shape (5,))"),
        ({}, {"loss_denominator": "all"}, "must be a number, what the mean divides by on this rank"),
    ],
)
def test_how_the_loss_is_reduced_is_checked(
    first: dict[str, Any], second: dict[str, Any], message: str, partitions: PartitionStore
) -> None:
    """Anything but "sum" was taken for "mean", on each rank by itself: the weights of the loss were wrong."""
    part_config = partitions.get("power_law", power_law(), 2)
    for said in run_ranks(2, make_with_loss, part_config, rank0=first, rank1=second):
        assert message in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": "keep"}, "draws edges by 'keep'"),
        ({"prob": "w"}, "draws edges by 'w'"),
        ({"edge_dir": "out"}, "'out'"),
    ],
)
def test_samplers_that_leave_edges_out_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        num_layers_of(dgl.dataloading.MultiLayerFullNeighborSampler(2, **options))
    assert num_layers_of(dgl.dataloading.MultiLayerFullNeighborSampler(2)) == 2
    assert num_layers_of(SimpleNamespace(fanouts=[3, 4], prob=0.0, edge_dir="both")) == 2, "of the script's own"


def test_a_sampler_of_one_subgraph_for_all_layers_is_refused() -> None:
    """It has fanouts, too: a script got a list of blocks where it expects a graph."""
    with pytest.raises(TypeError, match="one subgraph for all layers"):
        num_layers_of(dgl.dataloading.ShaDowKHopSampler([5, 5]))
