# SPDX-License-Identifier: Apache-2.0
"""What full-graph training says to a `DistGraph` it cannot use, and DGL's standalone mode; no servers needed."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import dgl
import pytest
import torch
from torch import nn

from dgl_hybrid import FullGraphLoader, PartitionedGraph, infer
from dgl_hybrid.errors import ExchangeError, PartitionError
from dgl_hybrid.exchange import connect
from dgl_hybrid.exchange.connect import create_communicator
from dgl_hybrid.exchange.ids import Ownership
from dgl_hybrid.partition import SharedLists, SharedStructure, manifest, partition_graph
from dgl_hybrid.training import dist_graph, partitioned_graph
from dgl_hybrid.training.config import ModelConfig, StrategyConfig, TrainConfig, TrainJob
from dgl_hybrid.training.dist_graph import _complete_elsewhere, _ranks_of_machines, _read_structure
from dgl_hybrid.training.gradients import average_gradients
from dgl_hybrid.training.trainer import open_graph
from tests.helpers.exactness import Case, assert_close
from tests.helpers.graphs import power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.world import COLLECTIVE_TIMEOUT_S, RaisedError, run_ranks, run_ranks_expect_errors

CHECKOUT = Path(__file__).resolve().parents[2]


def ranks_of(rank: int, world_size: int, part_of_rank: list[int], num_parts: int) -> tuple[int, int]:
    found = _ranks_of_machines(create_communicator(), part_of_rank[rank], num_parts)
    return found.start, found.stop


def test_ranks_of_a_machine() -> None:
    assert run_ranks(4, ranks_of, [0, 0, 1, 2], 3) == [(0, 2), (0, 2), (2, 3), (3, 4)]


def messages(errors: list[RaisedError]) -> set[tuple[str, str]]:
    return {(error.type_name.rpartition(".")[2], error.message) for error in errors}


def test_ranks_in_another_order() -> None:
    ((kind, message),) = messages(run_ranks_expect_errors(3, ranks_of, [0, 1, 0], 2))
    assert kind == ExchangeError.__name__
    assert "must be numbered machine by machine" in message
    assert "got the partitions [0, 1, 0] by rank" in message


def test_machines_with_other_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was forgotten when the graph was partitioned again has parts of the same sizes, maybe."""
    config = tmp_path / "g.json"
    monkeypatch.setenv("DGL_CONF_PATH", str(config))
    graph: Any = SimpleNamespace(graph_name="g", get_partition_book=lambda: SimpleNamespace(partid=0))
    assert dist_graph._digest_of_folder(graph) is None, "it is not seen here"
    for name in ("g.json", "hybrid_manifest.json"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(dist_graph, "read_partition_summary", lambda path: SimpleNamespace(graph_name="g"))
    digest = dist_graph._digest_of_folder(graph)
    assert digest is not None
    graph.graph_name = "another"
    assert dist_graph._digest_of_folder(graph) is None
    for name in ("_read_structure", "_check_inner"):
        monkeypatch.setattr(dist_graph, name, lambda *_: None)
    monkeypatch.setattr(dist_graph, "_bounds", lambda *_: [0, 5, 9])
    sizes = [[0, 5, 9], [0, 5, 9]]
    for of_others, message in (
        ([[*sizes, "other"]], "the machine of rank 2 has another partition of 'another' than others: its files have"),
        ([[[0, 4, 9], sizes[1], None]], "the machine of rank 2 .* its parts have other sizes"),
    ):
        known: Any = SimpleNamespace(
            agreed=contextlib.nullcontext, gather_json=lambda mine, others=of_others: [mine, [*sizes, digest], *others]
        )
        with pytest.raises(PartitionError, match=message):
            dist_graph.share_partition(graph, known)


def test_a_sidecar_of_a_partition_that_was_written_over_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A graph of nearest neighbours, made anew: all in-degrees are the same, and so is the JSON file that DGL writes.

    Norms of `GraphConv` were made of the old graph's out-degrees.
    """

    def nearest(step: int) -> dgl.DGLGraph:
        nodes = torch.arange(12)
        return dgl.graph((nodes // step, nodes), num_nodes=12)

    def find(rank: int = 0, fault_of_first: str = "") -> Any:
        part = dgl.load_graphs(str(tmp_path / "part0" / "graph.dgl"))[0][0]
        graph: Any = SimpleNamespace(graph_name="g", get_partition_book=lambda: SimpleNamespace(partid=0))
        known: Any = SimpleNamespace(
            rank=rank, gather_json=lambda mine: [mine] if rank == 0 else [fault_of_first, mine]
        )
        return dist_graph._find_sidecar(graph, SharedStructure.of_graph(part), known, 0, [0, 12], [0, 12])

    config = tmp_path / "g.json"
    monkeypatch.setenv("DGL_CONF_PATH", str(config))
    partition_graph(nearest(2), "g", 1, tmp_path, part_method="random")
    of_first = [2] * 6 + [0] * 6
    assert find().out_degrees.tolist() == of_first
    written = config.read_bytes()
    hashed: list[Path] = []
    with monkeypatch.context() as context:
        hash_file = manifest.hash_file
        context.setattr(manifest, "hash_file", lambda path: hashed.append(path) or hash_file(path))
        assert find(rank=1).out_degrees.tolist() == of_first, "as the first rank of the machine has found it"
        assert [path.name for path in hashed] == ["g.json"]
    # DGL's conversion to GraphBolt writes this file anew.
    config.write_text(json.dumps(json.loads(written) | {"node_attr_dtype": {}}))
    assert find().out_degrees.tolist() == of_first
    config.write_bytes(written)
    assert caplog.text == ""
    assert find(rank=1, fault_of_first="graph.dgl cannot be read") is None
    assert "original ids and out-degrees are not read from the partition folder: graph.dgl cannot be" in caplog.text
    caplog.clear()

    def refuse(path: Path) -> Any:
        if path.suffix == ".json":
            return hash_file(path)
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as context:
        context.setattr(manifest, "hash_file", refuse)
        assert find() is None, "the rank that cannot read it went on alone, by an error"
    assert "part0/graph.dgl cannot be read: Permission denied" in caplog.text
    caplog.clear()
    dgl.distributed.partition_graph(nearest(3), "g", 1, str(tmp_path), part_method="random")
    assert config.read_bytes() == written, "nothing but the structure tells"
    assert find() is None
    assert "original ids and out-degrees are not read from the partition folder: " in caplog.text
    assert "part0/graph.dgl" in caplog.text
    caplog.clear()
    dgl.distributed.partition_graph(nearest(3), "g", 1, str(tmp_path), part_method="metis")
    assert find() is None
    assert "part0/graph.dgl" in caplog.text


def test_a_machine_without_a_trainer() -> None:
    ((kind, message),) = messages(run_ranks_expect_errors(2, ranks_of, [0, 2], 3))
    assert kind == ExchangeError.__name__
    assert "every machine must run a trainer" in message
    assert "(got none for partitions [1])" in message


def complete_of(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """Rank 0 owns nodes 0, 1 and rank 1 nodes 2, 3. Edges: 2->0, 3->1, 0->2, 1->2, 0->3; rank 0 misses 1->2."""
    if rank == 0:
        node_global, edges = [0, 1, 3, 2], ([3, 2, 0, 0], [0, 1, 3, 2])
    else:
        node_global, edges = [2, 3, 1, 0], ([3, 2, 3], [0, 0, 1])
    part = dgl.graph(edges, num_nodes=4)
    part.ndata[dgl.NID], part.edata[dgl.EID] = torch.tensor(node_global), torch.arange(part.num_edges())
    structure = SharedStructure.of_graph(part)
    nodes = Ownership(offsets=torch.tensor([0, 2, 4]), rank=rank)
    first = 2 * rank
    found = _complete_elsewhere(
        structure, create_communicator(), nodes, SharedLists(structure, (0, 2)), first, first + 2
    )
    return found[0].tolist(), found[1].tolist()


def test_incomplete_lists_of_halo_nodes_are_not_used() -> None:
    assert run_ranks(2, complete_of) == [([3], [2]), ([], [])]


def graph_like(**facts: Any) -> Any:
    plain = {"graph_name": "g", "ntypes": ["_N"], "etypes": ["_E"], "local_partition": None}
    return SimpleNamespace(**{**plain, **facts})


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"ntypes": ["a", "b"]}, r"'g' is a heterograph \(node types \['a', 'b'\].*dgl\.to_homogeneous"),
        ({"etypes": ["a", "b"]}, "'g' is a heterograph"),
        ({}, "has no part in this machine's shared memory"),
        ({"local_partition": "a GraphBolt graph"}, "use_graphbolt=False"),
        ({"local_partition": dgl.graph(([0], [1])).formats("csr")}, r"needs the graph format csc \(got \['csr'\]\)"),
    ],
)
def test_graphs_that_cannot_be_read(facts: dict[str, Any], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        _read_structure(graph_like(**facts))


def test_neither_kind_of_graph() -> None:
    for action in (
        lambda: FullGraphLoader(dgl.graph(([0], [1])), torch.tensor([0]), 1),
        lambda: infer(nn.Identity(), dgl.graph(([0], [1])), 1),
    ):
        with pytest.raises(TypeError, match=r"takes a dgl\.distributed\.DistGraph or a dgl_hybrid\.PartitionedGraph"):
            action()


def test_transport_of_a_folder(partitions: PartitionStore) -> None:
    g = PartitionedGraph.open(partitions.get("power_law", power_law(), 1))
    with pytest.raises(ValueError, match="transport is for a DistGraph"):
        FullGraphLoader(g, g.owned_nodes(), 1, transport="kvstore")
    with pytest.raises(ValueError, match=r"give it to PartitionedGraph\.open\(part_config, timeout_s=…\)"):
        FullGraphLoader(g, g.owned_nodes(), 1, timeout_s=60.0)


def timeouts_of_a_folder(rank: int, world_size: int, part_config: str) -> list[float]:
    """Returns how long peers may stay away, of a graph that is opened with nothing said of it, and of others."""
    found = []
    for given in ({}, {"timeout_s": 77.0}):
        with mock.patch.object(connect.dist, "new_group", wraps=connect.dist.new_group) as made:
            g = PartitionedGraph.open(part_config, **given)  # type: ignore[arg-type]
        found.append(made.call_args.kwargs["timeout"].total_seconds())
    with pytest.raises(ValueError, match="timeout_s is for a new communicator"):
        PartitionedGraph.open(part_config, communicator=g.communicator, timeout_s=77.0)
    training = TrainConfig(exchange_timeout_s=88.0)
    job = TrainJob(
        part_config=part_config, dataset="", model=ModelConfig(), strategy=StrategyConfig(), training=training
    )
    with mock.patch.object(connect.dist, "new_group", wraps=connect.dist.new_group) as made:
        open_graph(job)
    return [*found, made.call_args.kwargs["timeout"].total_seconds()]


def test_ranks_wait_as_long_as_they_are_told(partitions: PartitionStore) -> None:
    """It was ten minutes, and planning for a large graph may take longer."""
    graph = power_law()
    graph.ndata["feat"] = graph.ndata["feat"].float()
    for split in ("val_mask", "test_mask"):
        graph.ndata[split] = ~graph.ndata["train_mask"]
    folder = partitions.get("timeouts", graph, 2)
    # Told nothing, as long as in the group that the script has made.
    assert run_ranks(2, timeouts_of_a_folder, folder) == [[COLLECTIVE_TIMEOUT_S, 77.0, 88.0]] * 2
    for bad in (0.0, float("inf")):
        with pytest.raises(ValueError, match="timeout_s must be positive and finite"):
            create_communicator(timeout_s=bad)
        with pytest.raises(ValueError, match="exchange_timeout_s must be positive and finite"):
            TrainConfig(exchange_timeout_s=bad)


def test_a_graph_has_the_timeout_that_it_was_first_seen_with() -> None:
    graph, view = SimpleNamespace(), object()
    told: list[float] = []

    def connect_and_stop(g: Any, transport: str, *, timeout_s: float) -> None:
        told.append(timeout_s)
        raise ExchangeError("no trainers")

    with mock.patch.object(partitioned_graph, "connect_trainers", connect_and_stop):
        for given in (None, 77.0):
            with pytest.raises(ExchangeError, match="no trainers"):
                PartitionedGraph.from_dist_graph(graph, timeout_s=given)
    assert told == [600.0, 77.0]
    graph._dgl_hybrid_views = {"auto": (view, 77.0)}
    for given in (None, 77.0):
        assert PartitionedGraph.from_dist_graph(graph, timeout_s=given) is view
    with pytest.raises(ValueError, match=r"wait 77 s for each other \(got timeout_s=78\)"):
        PartitionedGraph.from_dist_graph(graph, timeout_s=78.0)


# ------------------------------------------------------------------------------------------------ average_gradients


def averaged(rank: int, world_size: int, part_config: str) -> list[torch.Tensor | None]:
    g = PartitionedGraph.open(part_config)
    loader = FullGraphLoader(g, g.owned_nodes(), 1)
    model = nn.ModuleList([nn.Linear(2, 3), nn.Linear(1, 1).double(), nn.Linear(1, 1), nn.Embedding(4, 2, sparse=True)])
    model[0].weight.requires_grad_(False)
    model[0].bias.grad = torch.tensor([1.0, 2.0, 3.0]) * (rank + 1)
    if rank == 1:  # a gradient that the others lack
        model[1].weight.grad = torch.ones(1, 1, dtype=torch.float64)
    model[3](torch.tensor([rank])).sum().backward()
    scaled = nn.Linear(1, 1, bias=False).half()
    scaled.weight.grad = torch.full((1, 1), 6e4, dtype=torch.float16)
    average_gradients(scaled, loader)
    assert torch.equal(scaled.weight.grad, torch.full((1, 1), 6e4, dtype=torch.float16)), "their sum does not fit"
    average_gradients(model, loader)
    torch.optim.SparseAdam(model[3].parameters()).step()
    return [parameter.grad for parameter in model.parameters()]


def test_average_gradients(partitions: PartitionStore) -> None:
    for grads in run_ranks(3, averaged, partitions.get("power_law", power_law(), 3)):
        frozen, bias, lone, _, unused, _, embedding = grads
        assert frozen is None
        assert unused is None
        assert_close(bias, torch.tensor([2.0, 4.0, 6.0]), "the mean", 1e-6)
        assert_close(lone, torch.full((1, 1), 1 / 3, dtype=torch.float64), "zero elsewhere")
        expected = torch.tensor([[1.0, 1.0]] * 3 + [[0.0, 0.0]]) / 3
        assert embedding is not None
        assert embedding.is_sparse, "as under DDP: SparseAdam takes no other"
        assert embedding.coalesce().indices().tolist() == [[0, 1, 2]], "rows that any rank used"
        assert_close(embedding.to_dense(), expected, "a sparse gradient", 1e-6)


# ------------------------------------------------------------------------------------------------ standalone mode

STANDALONE = """
import gc, sys, weakref
import dgl_hybrid
import dgl, torch
dgl.distributed.initialize("none")
g = dgl.distributed.DistGraph("whole", part_config=sys.argv[1])
sampler = dgl.dataloading.NeighborSampler([5, 5], prefetch_edge_feats=["w"])
from tests.helpers.exactness import Case
model = Case(kind="edge_weight_norm").build(g.ndata["feat"].shape[1])
g.ndata["plain"] = torch.ones(g.num_nodes())  # DGL takes what it is given
loader = dgl_hybrid.FullGraphLoader(g, torch.arange(g.num_nodes()), sampler)
for epoch in range(3):
    with torch.set_grad_enabled(epoch < 2):
        for input_nodes, seeds, blocks in loader:
            logits = model(blocks, g.ndata["feat"][input_nodes])
assert g.ndata["feat"][input_nodes] is g.ndata["feat"][input_nodes]
torch.save((g.ndata["id"][seeds], logits.detach()), sys.argv[2])
view = loader.graph
assert "plain" not in set(view.ndata) and "feat" in set(view.ndata)
try:
    view.ndata["plain"]
except TypeError as error:
    assert "field 'plain' must be a DistTensor" in str(error), error
else:
    raise AssertionError("it is not the servers'")
# A function that opens a graph and returns: it ends there on all ranks, not whenever Python looks for cycles.
gc.collect()
gc.disable()
graph = weakref.ref(g)
del loader, view, blocks, input_nodes, seeds, logits, g
assert graph() is None
"""


def test_standalone_mode(tmp_path: Path, partitions: PartitionStore) -> None:
    graph = power_law()
    graph.ndata["id"] = torch.arange(graph.num_nodes())
    config = partitions.get("whole", graph, 1)
    command = [sys.executable, "-c", STANDALONE, config, str(tmp_path / "out.pt")]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    ids, logits = torch.load(tmp_path / "out.pt")
    model = Case(kind="edge_weight_norm").build(graph.ndata["feat"].shape[1])
    assert_close(logits[torch.argsort(ids)], model([graph] * 2, graph.ndata["feat"]).detach(), "logits")
