# SPDX-License-Identifier: Apache-2.0
"""What went wrong with tensors on a GPU and was found on a pretended one: each test tells its story."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import dgl
import dgl.nn as dglnn
import pytest
import torch
from dgl.distributed import DistEmbedding
from torch import Tensor, nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph
from dgl_hybrid.exchange import connect
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.ids import Ownership
from dgl_hybrid.graph import split_block
from dgl_hybrid.graph.edgeless_reduce import reduce_of_nothing
from dgl_hybrid.ops import SparseGraph
from dgl_hybrid.planner import uniform_topology
from dgl_hybrid.training import planning, stable_reads
from dgl_hybrid.training.fields import RowSets
from dgl_hybrid.training.stable_reads import StableReads
from tests.helpers.exactness import Case
from tests.helpers.graphs import NUM_FEATURES, power_law
from tests.helpers.partitions import PartitionStore
from tests.pretend_gpu.device import GPU
from tests.pretend_gpu.ranks import PretendedGpus
from tests.pretend_gpu.scripts import Script, assert_same_training, tolerance_of, train, train_twice

SAGE = Case(kind="sage_mean", plan="planned:hybrid", epochs=2)
EMBEDDING = "node~_N~embedding"


def check(script: Script, gpus: PretendedGpus, partitions: PartitionStore, world_size: int = 2) -> None:
    part_config = partitions.get("power_law", power_law(), world_size)
    for on_cpu, on_gpu in gpus.run(world_size, train_twice, part_config, script):
        assert_same_training(on_cpu, on_gpu, tolerance_of(script))
        assert on_gpu.is_planned == on_cpu.is_planned


# ---------------------------------------------------------------- embeddings


class EmbeddingRows:
    """The part of DGL's KVStore client, and of its `DistTensor`, that an embedding reads through."""

    num_servers = 1

    def __init__(self) -> None:
        self.data_store = {EMBEDDING: torch.arange(24.0).view(6, 4)}
        self.kvstore = self
        self._name = self.name = self.kvstore_key = EMBEDDING

    def pull(self, name: str, id_tensor: Tensor) -> Tensor:
        if id_tensor.device.type != "cpu":
            raise TypeError("can't convert cuda:0 device type tensor to numpy")  # as DGL's
        return self.data_store[name][id_tensor]

    def push(self, name: str, id_tensor: Tensor, data_tensor: Tensor) -> None:
        raise AssertionError("nobody writes")

    def barrier(self) -> None:
        pass

    def __getitem__(self, idx: Tensor) -> Tensor:
        rows: Tensor = self.pull(name=EMBEDDING, id_tensor=idx)
        return rows


class TwoRanks(Communicator):
    def __init__(self) -> None:
        super().__init__(None)
        self.world_size = 2


def train_embedding(rank: int, world_size: int, ids_on: str, asked_for: str) -> tuple[Tensor, list[str]]:
    """Returns the gradient that an optimizer would find, and where the gradients were that were summed over ranks."""
    rows, communicator = EmbeddingRows(), TwoRanks()
    row_sets, ownership = RowSets(communicator), Ownership(offsets=torch.tensor([0, 3, 6]), rank=0)
    ids = torch.arange(6, device=ids_on)
    row_sets.register_nodes(ids)
    reads = StableReads(rows, communicator, row_sets, ownership, ownership)
    embedding = DistEmbedding.__new__(DistEmbedding)
    embedding._tensor, embedding._trace, embedding._name = rows, [], EMBEDDING
    settled: list[str] = []

    def settle(grad: Tensor, *_: object) -> Tensor:
        settled.append(grad.device.type)
        return grad * 2.0

    with mock.patch.object(stable_reads, "settle_gradient", settle):
        read = embedding(ids, asked_for)
        reads.note_forward()
        (read * 3.0).sum().backward()
    ((_, leaf),) = embedding._trace
    some = rows.pull(name=EMBEDDING, id_tensor=ids[1:3])
    assert some.device == ids.device, "where its ids are, as of a PartitionedGraph"
    assert torch.equal(some.cpu(), rows.data_store[EMBEDDING][1:3])
    return leaf.grad.cpu(), settled


@pytest.mark.parametrize("asked_for", ["cpu", "cuda"])
@pytest.mark.parametrize("ids_on", ["cpu", "cuda"])
def test_gradients_of_embeddings_are_summed_on_any_device(ids_on: str, asked_for: str, gpus: PretendedGpus) -> None:
    """`DistEmbedding(ids, device)` hands out a copy where the rows were read elsewhere: the sum over ranks was then
    bound to the tensor that it was copied from, whose gradient nobody asks for.
    """
    ((grad, settled),) = gpus.run(1, train_embedding, ids_on, asked_for)
    assert settled == [asked_for]
    assert torch.equal(grad, torch.full((6, 4), 6.0))


# ---------------------------------------------------------------- scripts that move their blocks


@pytest.mark.parametrize("kind", ["sage_mean", pytest.param("gat_attn_drop", marks=pytest.mark.slow)])
def test_dropout_in_a_script_that_moves_its_blocks(kind: str, gpus: PretendedGpus, partitions: PartitionStore) -> None:
    """Keys of rows lay where the loader was told to put its blocks, not where the rows are."""
    case = Case(kind=kind, plan="random:1:0.3", epochs=2, dropout=0.5)
    check(Script(case=case, moves_blocks=True), gpus, partitions)


@dataclass(kw_only=True)
class PlansOfMovedBlocks:
    devices: set[str] = field(default_factory=set)
    """Whose rates plans were made of."""
    are_cast: list[bool] = field(default_factory=list)
    """Whether each plan is of a call under autocast."""
    num_waits: int = 0
    """For the GPU."""
    advice: list[str] = field(default_factory=list)


def plan_moved_blocks(rank: int, world_size: int, part_config: str, names_model: bool) -> PlansOfMovedBlocks:
    case = replace(SAGE, epochs=4, dtype=torch.float32)
    script = Script(case=case, moves_blocks=True, names_model=names_model, has_rates=False, is_autocast=True)
    told = PlansOfMovedBlocks()
    make = planning.PlanMaker.make

    def note(self: planning.PlanMaker, model: Any, template: Any, **options: Any) -> Any:
        outcome = make(self, model, template, **options)
        told.are_cast.append(template.autocast is not None)
        assert self._graph.topology is not None
        told.devices.add(self._graph.topology.device)
        return outcome

    with (
        mock.patch.object(planning.PlanMaker, "make", note),
        mock.patch.object(torch.cuda, "synchronize", mock.Mock()) as waited,
        mock.patch.object(logging.getLogger("dgl_hybrid.training.loader"), "warning", mock.Mock()) as warned,
    ):
        train(rank, world_size, part_config, script, "cuda")
    told.num_waits = waited.call_count
    told.advice = [call.args[0] for call in warned.call_args_list if "device=" in call.args[0]]
    return told


@pytest.mark.parametrize("names_model", [True, False])
def test_planning_for_a_script_that_moves_its_blocks(
    names_model: bool, gpus: PretendedGpus, partitions: PartitionStore
) -> None:
    """Rates were probed and the model timed on the CPU, epochs timed by their launches, and autocast not seen."""
    results = gpus.run(2, plan_moved_blocks, partitions.get("power_law", power_law(), 2), names_model)
    for told in results:
        assert told.devices == {"cuda"}
        assert told.num_waits > 0
        assert told.are_cast == [False, True] if names_model else [True]
    assert [len(told.advice) for told in results] == [1, 0]


def exchanges_for_edge_data(rank: int, world_size: int, part_config: str, prefetches: bool) -> list[int]:
    """Of each epoch, by reads with the edge ids of blocks that the script has moved."""
    g = PartitionedGraph.open(part_config)
    nothing = torch.empty(0, dtype=torch.int64)
    names = ["w"] if prefetches else []  # then blocks have their edge ids before they are moved
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(2, prefetch_edge_feats=names)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), sampler, plan=[nothing, nothing], seed=1)
    counts = []
    for _ in range(3):
        for _, _, blocks in loader:
            moved = [block.to("cuda") for block in blocks]
            before = g.communicator.num_calls
            for block in moved:
                assert g.edata["w"][block.edata[dgl.EID]].device == GPU
            counts.append(g.communicator.num_calls - before)
    return counts


@pytest.mark.parametrize("prefetches", [False, True])
def test_edge_data_of_moved_blocks_is_fetched_once(
    prefetches: bool, gpus: PretendedGpus, partitions: PartitionStore
) -> None:
    """Edge ids were new tensors in every epoch, so what they name was fetched from its owners every time."""
    for counts in gpus.run(2, exchanges_for_edge_data, partitions.get("power_law", power_law(), 2), prefetches):
        assert counts[0] > 0
        assert counts[1:] == [0, 0]


# ---------------------------------------------------------------- tensors besides parameters


@pytest.mark.parametrize(("holds", "names_model"), [("attribute", True), ("literal", False)])
def test_models_that_hold_tensors_of_their_device_are_planned(
    holds: str, names_model: bool, gpus: PretendedGpus, partitions: PartitionStore
) -> None:
    """Costs are traced on a copy of the model on the CPU, where `.cpu()` moves parameters and buffers alone."""
    check(Script(case=SAGE, holds=holds, names_model=names_model), gpus, partitions, world_size=1)


def plan_with_argument(rank: int, world_size: int, part_config: str, holds: Any) -> tuple[bool, list[bool]]:
    """Returns whether a plan was made, and whether by times of the model, for each time that one was priced."""
    script = Script(case=replace(SAGE, dtype=torch.float32), holds=holds, names_model=False, has_rates=False)
    with mock.patch.object(planning, "cost_model", wraps=planning.cost_model) as priced:
        trained = train(rank, world_size, part_config, script, "cuda")
    return trained.is_planned, [call.args[3] is not None for call in priced.call_args_list]


@pytest.mark.parametrize("holds", ["scalar", "vector"])
def test_models_with_other_tensor_arguments_are_traced_and_timed(
    holds: str, gpus: PretendedGpus, partitions: PartitionStore
) -> None:
    """A number on the GPU ended the trace; other tensors that are no rows came back on the CPU when the model was to be
    timed on the GPU.
    """
    ((is_planned, is_timed),) = gpus.run(1, plan_with_argument, partitions.get("power_law", power_law(), 1), holds)
    assert is_planned
    assert is_timed
    assert all(is_timed)


# ---------------------------------------------------------------- blocks and their structure


def reduce_without_edges(rank: int, world_size: int) -> tuple[str, tuple[int, ...], str]:
    x = torch.ones(5, 3, device=GPU, requires_grad=True)
    results = reduce_of_nothing(
        lambda edges: {"m": edges.src["x"] * 2.0},
        lambda nodes: {"y": nodes.mailbox["m"].sum(1)},
        sources={"x": x},
        destinations={},
        edges={},
        num_dst=4,
    )
    results["y"].sum().backward()
    assert x.grad is not None
    return results["y"].device.type, tuple(results["y"].shape), x.grad.device.type


def test_a_reduce_on_a_rank_without_edges(gpus: PretendedGpus) -> None:
    """Its made-up edge was moved by DGL itself, whose build for CPUs knows no other device."""
    assert gpus.run(1, reduce_without_edges) == [("cuda", (4, 3), "cuda")]


class Twice(nn.Module):
    """A layer on its block and on a copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = dglnn.GraphConv(NUM_FEATURES, NUM_FEATURES, norm="none", allow_zero_in_degree=True).double()

    def forward(self, blocks: Sequence[Any], x: Tensor) -> Tensor:
        for block in blocks:
            x = self.layer(block, x) + self.layer(block.local_var(), x)
        return x


def count_structures(rank: int, world_size: int, part_config: str) -> int:
    g = PartitionedGraph.open(part_config)
    nothing = torch.empty(0, dtype=torch.int64)
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 2, "cuda", plan=[nothing, nothing])
    model = Twice().to("cuda")
    with mock.patch.object(split_block, "split_layer", wraps=split_block.split_layer) as split:
        for input_nodes, _, blocks in loader:
            model(blocks, g.ndata["feat"][input_nodes].clone()).sum().backward()
    return split.call_count


def test_one_structure_for_a_device_named_without_its_number(gpus: PretendedGpus, partitions: PartitionStore) -> None:
    """Blocks were made on "cuda", and copies of them asked for what belongs to "cuda:0"."""
    assert gpus.run(2, count_structures, partitions.get("power_law", power_law(), 2)) == [2, 2]


# ---------------------------------------------------------------- random numbers


def waits_for_rows_by_source(rank: int, world_size: int) -> list[tuple[str, bool]]:
    graph = SparseGraph.from_coo(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), 2, 2).to(GPU)
    waits = []

    def note_wait() -> None:
        waits.append((asked_for, getattr(graph, f"_{asked_for}") is not None))

    stream = SimpleNamespace(cuda_stream=0, synchronize=note_wait)
    with mock.patch.object(torch.cuda, "current_stream", return_value=stream):
        for asked_for in ("out_neighbours", "out_edges", "out_neighbours", "out_edges"):
            assert getattr(graph, asked_for).num_rows == 2
    return waits


def test_rows_by_source_are_there_before_others_find_them(gpus: PretendedGpus) -> None:
    """They were made on the stream of whoever asked first, and another stream's kernels could read them unfinished."""
    assert gpus.run(1, waits_for_rows_by_source) == [[("out_neighbours", False), ("out_edges", False)]]


def generator_around_planning(rank: int, world_size: int, part_config: str) -> bool:
    g = PartitionedGraph.open(part_config)
    model = replace(SAGE, dropout=0.5).build(NUM_FEATURES).to("cuda")
    before = torch.cuda.get_rng_state()
    loader = FullGraphLoader(
        g, g.owned_nodes("train_mask"), 2, "cuda", model=model, topology=uniform_topology(world_size)
    )
    assert loader.outcome is not None
    return torch.equal(torch.cuda.get_rng_state(), before)


def test_planning_leaves_the_generator_of_the_gpu_alone(gpus: PretendedGpus, partitions: PartitionStore) -> None:
    """Rank 0 alone traces models, and drew rows to time on the GPU: ranks went different ways from then on."""
    assert gpus.run(2, generator_around_planning, partitions.get("power_law", power_law(), 2)) == [True, True]


def test_rounding_is_no_draw_of_the_model(gpus: PretendedGpus, partitions: PartitionStore) -> None:
    """Rows of int8 are rounded at random in the model's forward. Where the length of what is drawn equals a number of
    rows it was taken for a draw of the model, and refused, on some ranks or all.
    """
    case = Case(kind="gat", num_layers=3, plan="random:1:0.3", epochs=2)
    check(Script(case=case, approximate="int8"), gpus, partitions)


# ---------------------------------------------------------------- which backend


class AskedFor(Exception):
    pass


def backend_asked_for(rank: int, world_size: int, has_own: bool) -> str:
    """Where the script named none, by ranks that see the same GPU, or each one of its own."""

    def note(*args: object, backend: str, **kwargs: object) -> Any:
        raise AskedFor(backend)

    own, shared = SimpleNamespace(uuid=f"GPU-{rank}"), torch.cuda.get_device_properties()
    with (
        mock.patch.object(connect.dist, "is_nccl_available", return_value=True),
        mock.patch.object(connect.dist, "get_backend", return_value="cpu:gloo,cuda:nccl"),
        mock.patch.object(connect.dist, "new_group", note),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=own if has_own else shared),
    ):
        try:
            connect.create_communicator()
        except AskedFor as asked:
            return str(asked)
    raise AssertionError("no group was made")


@pytest.mark.parametrize(("has_own", "backend"), [(False, "gloo"), (True, "nccl")])
def test_ranks_that_share_a_gpu_use_gloo(has_own: bool, backend: str, gpus: PretendedGpus) -> None:
    """All ranks that saw a GPU were given NCCL, which refuses two on one."""
    assert gpus.run(2, backend_asked_for, has_own) == [backend, backend]
