# SPDX-License-Identifier: Apache-2.0
"""Graphs on a device that DGL cannot use: structure stays on the CPU, answers and results lie on the device.

Without a GPU here, the stand-in is forced upon CPU tensors, which shows values, and upon the meta device, which shows
that no structure is asked of it and no tensor is left behind. The last test needs a GPU.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import dgl
import dgl.function as fn
import pytest
import torch
from torch import Tensor, nn

from dgl_hybrid.errors import CompatError
from dgl_hybrid.ops import device_index, dgl_index
from dgl_hybrid.ops.device_index import DeviceIndex, dgl_can_use, move_graph
from dgl_hybrid.ops.dgl_index import sparse_graph_of
from dgl_hybrid.ops.op_counts import op_counts, reset_op_counts
from dgl_hybrid.ops.routing import graph_to_device, route_ops
from tests.graph.modules import MODULES, WIDTH
from tests.helpers.exactness import assert_close
from tests.ops.routes import BLOCK_MODULE_NAMES, FLOAT32_ONLY, MODULE_NAMES, make_block, make_graph, run_step
from tests.ops.test_routes import forbid_dgls_kernels

META = torch.device("meta")
CPU = torch.device("cpu")


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Plays `request.param` ("cpu" or "meta") as the first GPU, which this DGL cannot use."""
    played = torch.device(request.param)
    to_backend_ctx = dgl.backend.to_backend_ctx
    monkeypatch.setattr(
        dgl.backend, "to_backend_ctx", lambda ctx: played if ctx.device_type == 2 else to_backend_ctx(ctx)
    )
    monkeypatch.setattr(dgl.backend, "copy_to", lambda tensor, ctx, **kwargs: tensor.to(ctx, **kwargs))
    monkeypatch.setattr(device_index, "dgl_can_use", lambda target: target.type == "cpu")
    yield played
    route_ops("none")
    route_ops("layer_blocks")
    reset_op_counts()


def on_device(graph: Any, device: torch.device) -> Any:
    """`graph_to_device`, also to the CPU, where the graph lies already."""
    route_ops("all")  # for the hooks
    moved = graph.local_var()
    moved._graph = DeviceIndex.of(graph._graph, device)
    moved._node_frames = [frame.to(device) for frame in graph._node_frames]
    moved._edge_frames = [frame.to(device) for frame in graph._edge_frames]
    return moved


CASES = [
    pytest.param(name, make, id=f"{name}-{make.__name__.removeprefix('make_')}")
    for names, make in ((MODULE_NAMES, make_graph), (BLOCK_MODULE_NAMES, make_block))
    for name in names
]


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize(("name", "make"), CASES)
def test_modules_give_the_same_behind_the_stand_in(
    name: str, make: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.float32 if name in FLOAT32_ONLY else torch.float64
    graph = make(name, dtype)
    route_ops("none")
    expected = run_step(name, graph, dtype)
    forbid_dgls_kernels(monkeypatch)
    actual = run_step(name, on_device(graph, device), dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-9
    assert_close(actual.output, expected.output, "output", tolerance)
    assert_close(actual.input_grad, expected.input_grad, "input gradient", tolerance)
    for key, grad in expected.weight_grads.items():
        assert_close(actual.weight_grads[key], grad, f"gradient of {key}", tolerance)


READ_VALUES = {
    # Stock code of these reads values or moves tensors to the CPU, so no shapes alone can run it.
    "SAGEConv-lstm": "degree buckets",
    "PNAConv": "degree buckets",
    "DGNConv": "degree buckets",
    "EGATConv": "looks for destinations without in-edges",
    "RelGraphConv": "sorts edges by type",
    "RelGraphConv-basis": "sorts edges by type",
    "RelGraphConv-bdd": "sorts edges by type",
    "HGTConv": "sorts edges by type",
    "GatedGraphConv": "selects edges by type",
    "GatedGraphConv-steps": "selects edges by type",
    "AtomicConv": "selects edges by type",
    "TWIRLSConv": "looks for vertices without edges",
}


@pytest.mark.parametrize("device", ["meta"], indirect=True)
@pytest.mark.parametrize(("name", "make"), [case for case in CASES if case.values[0] not in READ_VALUES])
def test_modules_leave_nothing_on_the_cpu(name: str, make: Any, device: torch.device) -> None:
    """Any operand on the CPU, or question for a value, is an error on the meta device."""
    graph = make(name, torch.float32)
    route_ops("none")
    expected = run_step(name, graph, torch.float32)
    moved = on_device(graph, device)
    entry = MODULES[name]
    module = entry.make().to(device)
    x = torch.empty(graph.num_src_nodes(), WIDTH, device=device, requires_grad=True)
    output = entry.call(module, moved, x)
    output.sum().backward()
    assert output.device == device
    assert output.shape == expected.output.shape
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert {key for key, p in module.named_parameters() if p.grad is not None} == set(expected.weight_grads)


@pytest.mark.parametrize("device", ["meta"], indirect=True)
def test_moving_a_graph(device: torch.device) -> None:
    graph = make_graph("", torch.float32)
    graph.ndata["h"] = torch.rand(graph.num_nodes(), 3)
    moved = graph_to_device(graph, device)
    assert moved.device == device
    assert graph.device == CPU
    assert moved.ndata["h"].device == device
    assert moved.idtype == graph.idtype
    assert moved.num_edges() == graph.num_edges()
    assert graph_to_device(moved, device) is moved
    moved.update_all(fn.copy_u("h", "m"), fn.sum("m", "y"))
    assert moved.ndata["y"].shape == (graph.num_nodes(), 3)
    assert op_counts() == {"spmm.copy_u.sum/ours": 1}
    back = moved.to("cpu")
    assert back._graph is graph._graph


@pytest.mark.parametrize("device", ["meta"], indirect=True)
def test_dgls_own_to_moves_graphs_while_all_are_served(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = make_block("", torch.float32)
    with pytest.raises(KeyError):
        graph.to(device)
    route_ops("all")
    monkeypatch.setattr("dgl_hybrid.ops.routing.dgl_can_use", lambda target: target.type == "cpu")
    moved = graph.to(device)
    assert moved.is_block
    assert isinstance(moved._graph, DeviceIndex)
    assert moved.to(device) is moved
    assert moved.to("cpu")._graph is graph._graph
    assert graph.to("cpu").device == CPU
    assert moved.int().idtype == torch.int32
    assert moved.int().device == device
    sizes = dgl.batch([dgl.graph(([0], [1])), dgl.graph(([0, 1], [1, 0]))]).to(device)
    assert sizes.batch_num_nodes().device == device
    route_ops("layer_blocks")
    moved.update_all(fn.copy_e("w", "m"), fn.sum("m", "y"))
    assert moved.dstdata["y"].device == device, "graphs that were moved are served as long as there may be any"


def questions(graph: Any) -> dict[str, Any]:
    """What a graph can be asked, by name."""
    u, v = graph.edges()
    ids = torch.arange(5, dtype=graph.idtype, device=graph.device)
    return {
        "edges": graph.edges("all"),
        "edges in order": graph.edges("all", order="srcdst"),
        "in_degrees": graph.in_degrees(),
        "in_degrees of some": graph.in_degrees(ids),
        "out_degrees": graph.out_degrees(),
        "out_degree of one": graph.out_degrees(3),
        "find_edges": graph.find_edges(ids),
        "in_edges": graph.in_edges(ids, form="all"),
        "out_edges": graph.out_edges(ids, form="all"),
        "has_nodes": graph.has_nodes(ids),
        "has_edges_between": graph.has_edges_between(u[:5], v[:5]),
        "edge_ids": graph.edge_ids(u[:5], v[:5]),
        "all edge_ids": graph.edge_ids(u[:5], v[:5], return_uv=True),
        "predecessors": graph.predecessors(1),
        "successors": graph.successors(1),
        "adjacency": graph.adj_tensors("csc"),
        "coordinates": graph.adj_tensors("coo"),
        "nodes of a subgraph": dgl.node_subgraph(graph, ids).ndata[dgl.NID],
        "edges of a subgraph": dgl.node_subgraph(graph, ids).edata[dgl.EID],
        "degrees in a subgraph": dgl.edge_subgraph(graph, ids).in_degrees(),
        "degrees of the reverse": dgl.reverse(graph).in_degrees(),
        "degrees in another format": graph.formats("csc").in_degrees(),
    }


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_questions_have_dgls_answers(device: torch.device, ids: torch.dtype) -> None:
    graph = make_graph("", torch.float64)
    graph = graph.int() if ids == torch.int32 else graph.long()
    expected = questions(graph)
    moved = on_device(graph, device)
    assert isinstance(moved._graph, DeviceIndex)
    actual = questions(moved)
    for name, answer in expected.items():
        given = actual[name] if isinstance(answer, tuple) else (actual[name],)
        answer = answer if isinstance(answer, tuple) else (answer,)
        assert len(given) == len(answer)
        for ours, dgls in zip(given, answer, strict=True):
            if isinstance(dgls, Tensor):
                assert ours.dtype == dgls.dtype, name
                assert torch.equal(ours, dgls), name
            else:
                assert ours == dgls, name


@pytest.mark.parametrize("device", ["meta"], indirect=True)
def test_structure_is_moved_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    convert = dgl_index._convert
    monkeypatch.setattr(dgl_index, "_convert", lambda index: made.append(1) or convert(index))
    graph = make_graph("", torch.float32)
    first, second = on_device(graph, device), on_device(graph, device)
    assert first._graph is not second._graph
    assert sparse_graph_of(first._graph) is sparse_graph_of(second._graph)
    assert sparse_graph_of(first._graph).device == device
    assert sparse_graph_of(graph._graph).device == CPU
    assert first.edges()[0] is second.edges()[0]
    for served in ("all", "layer_blocks"):
        route_ops(served)
        moved = graph_to_device(graph, device)
        for _ in range(2):
            moved.update_all(fn.copy_e("w", "m"), fn.sum("m", "y"))
    assert made == [1]


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_what_was_first_asked_in_inference_mode_serves_training(device: torch.device, ids: torch.dtype) -> None:
    """A backward saves no tensors of inference mode, so an evaluation before the first step must not leave any."""
    graph = make_graph("", torch.float64)
    moved = on_device(graph.int() if ids == torch.int32 else graph.long(), device)
    with torch.inference_mode():
        questions(moved)
        moved._graph.all_out_degrees(0)
    factor = torch.ones((), requires_grad=True)
    for answer in (*moved.edges(), *moved.adj_tensors("csc"), moved._graph.all_out_degrees(0)):
        (factor * answer).sum().backward()  # saves the answer


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_operators_we_lack_run_as_rows_of_edges(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = make_block("", torch.float64)
    x, w = torch.rand(graph.num_src_nodes(), 3), torch.rand(graph.num_edges(), 1)
    route_ops("none")
    expected = [dgl.ops.u_add_e_max(graph, x, w), dgl.ops.u_sub_e_sum(graph, x, w)]
    moved = on_device(graph, device)
    forbid_dgls_kernels(monkeypatch)
    reset_op_counts()
    actual = [dgl.ops.u_add_e_max(moved, x, w), dgl.ops.u_sub_e_sum(moved, x, w)]
    assert op_counts() == {"spmm.u_add_e.max/ours": 1, "spmm.u_sub_e.sum/ours": 1}
    for ours, dgls in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, dgls)


@pytest.mark.parametrize("device", ["meta"], indirect=True)
def test_what_nobody_can_do_says_so(device: torch.device) -> None:
    graph = on_device(make_graph("", torch.float32), device)
    logits = torch.empty(2, 1, device=device)
    with pytest.raises(CompatError, match=r"edge_softmax.dst on meta .*\(some edges only\), and the installed"):
        dgl.ops.edge_softmax(graph, logits, torch.zeros(2, dtype=torch.int64, device=device))
    hetero = dgl.heterograph({("a", "x", "b"): ([0], [0]), ("a", "y", "b"): ([0], [0])})
    hetero = on_device(hetero, device)
    hetero.nodes["a"].data["h"] = torch.empty(1, 1, device=device)
    with pytest.raises(CompatError, match=r"spmm.hetero on meta .*several edge types"):
        hetero.update_all(fn.copy_u("h", "m"), fn.sum("m", "y"))


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_stand_ins_can_be_sent_to_other_processes(device: torch.device) -> None:
    moved = on_device(make_graph("", torch.float64), device)
    copied = pickle.loads(pickle.dumps(moved._graph))
    assert isinstance(copied, DeviceIndex)
    assert copied.device == device
    assert torch.equal(copied.edges(0, "eid")[0], moved.edges(order="eid")[0])


def test_what_dgl_can_use_it_moves_itself() -> None:
    graph = dgl.graph(([0, 1], [1, 0]))
    assert dgl_can_use(CPU)
    assert move_graph(graph, "cpu") is graph


@pytest.mark.cuda
def test_a_module_trains_on_a_gpu() -> None:
    route_ops("all")
    try:
        graph = make_graph("", torch.float32)
        x = torch.rand(graph.num_nodes(), WIDTH)
        conv = dgl.nn.GATConv(WIDTH, 8, 2, allow_zero_in_degree=True)
        expected = conv(graph, x)
        expected.sum().backward()
        grads = [parameter.grad.clone() for parameter in conv.parameters()]
        conv.zero_grad()
        conv = nn.Module.to(conv, "cuda")
        actual = conv(graph.to("cuda"), x.cuda())
        actual.sum().backward()
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-5)
        for parameter, grad in zip(conv.parameters(), grads, strict=True):
            torch.testing.assert_close(parameter.grad.cpu(), grad, rtol=1e-4, atol=1e-5)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            reduced = dgl.ops.copy_u_sum(graph.to("cuda"), x.cuda())
        assert reduced.dtype == torch.bfloat16, "as DGL's own on CUDA"
    finally:
        route_ops("layer_blocks")
