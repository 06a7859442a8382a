# SPDX-License-Identifier: Apache-2.0
"""Functions of `dgl.ops` give with our ops what they give with DGL's: shapes, gradients, ties; what is left to DGL."""

from __future__ import annotations

import gc
import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import dgl
import dgl.function as fn
import pytest
import torch
from dgl.heterograph_index import HeteroGraphIndex
from torch import Tensor

from dgl_hybrid.errors import CompatError
from dgl_hybrid.graph import dispatch
from dgl_hybrid.ops import dgl_index, routing
from dgl_hybrid.ops.device_index import DeviceIndex
from dgl_hybrid.ops.dgl_index import sparse_graph_of
from dgl_hybrid.ops.op_counts import count, op_counts, reset_op_counts
from dgl_hybrid.ops.sparse_graph import edge_neighbours, edge_rows
from tests.helpers.exactness import assert_close
from tests.ops.routes import routed
from tests.ops.test_routes import forbid_dgls_kernels

SHAPES = (
    ((), ()),
    ((3,), (3,)),
    ((3,), (1,)),
    ((1,), (3,)),
    ((2, 3), (2, 1)),
    ((2, 1), (2, 3)),
    ((2, 3), (3,)),
    ((3,), (2, 1)),
)
"""Feature shapes of two operands, every way in which DGL broadcasts them."""


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    routing.route_ops("layer_blocks")
    reset_op_counts()


@pytest.fixture(scope="module")
def block() -> Any:
    """7 sources, 6 destinations of which two have no in-edge, duplicate edges, edge ids not in the order of rows."""
    src = torch.tensor([0, 5, 5, 2, 6, 1, 5, 0, 3, 3, 2, 5])
    dst = torch.tensor([4, 0, 1, 1, 0, 4, 0, 1, 4, 2, 2, 4])
    return dgl.create_block((src, dst), num_src_nodes=7, num_dst_nodes=6)


def operand(target: str, features: tuple[int, ...], block: Any, seed: int) -> Tensor:
    """Small whole numbers, so that there are ties, never 0, which is divided by."""
    rows = {"u": block.num_src_nodes(), "v": block.num_dst_nodes(), "e": block.num_edges()}[target]
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(1, 4, (rows, *features), generator=generator) * 2 - 5
    return values.double().requires_grad_()


def outcome(call: Callable[..., Tensor], *operands: Tensor) -> list[Tensor]:
    """The result and the gradient of each operand; vertices that got infinity give none."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in operands]
    out = call(*leaves)
    weights = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
    (out.masked_fill(torch.isinf(out), 0.0) * weights).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def assert_same_with_dgl(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., Tensor], *operands: Tensor
) -> dict[str, int]:
    expected = outcome(call, *operands)
    with routed("all"), monkeypatch.context() as patch:
        forbid_dgls_kernels(patch)
        actual = outcome(call, *operands)
        counts = op_counts()
    assert len(actual) == len(expected)
    for role, ours, dgls in zip(("result", "first gradient", "second gradient"), actual, expected, strict=False):
        assert ours.dtype == dgls.dtype
        assert torch.equal(torch.isinf(ours), torch.isinf(dgls)), role
        assert_close(ours.nan_to_num(posinf=1.0, neginf=-1.0), dgls.nan_to_num(posinf=1.0, neginf=-1.0), role)
    return counts


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("features", SHAPES)
def test_products_reduced(block: Any, reduce: str, features: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = operand("u", features[0], block, 1), operand("e", features[1], block, 2)
    for op in ("mul", "div"):
        function = getattr(dgl.ops, f"u_{op}_e_{reduce}")
        counts = assert_same_with_dgl(monkeypatch, lambda a, b, f=function: f(block, a, b), x, w)
        assert counts == {f"spmm.u_{op}_e.{'sum' if reduce == 'mean' else reduce}/ours": 1}


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("features", [(), (3,), (2, 3), (0,)])
def test_copies_reduced(block: Any, reduce: str, features: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for target in ("u", "e"):
        x = operand(target, features, block, 3)
        function = getattr(dgl.ops, f"copy_{target}_{reduce}")
        if 0 in features:  # DGL refuses these
            with routed("all"):
                assert function(block, x).shape == (block.num_dst_nodes(), *features)
            continue
        counts = assert_same_with_dgl(monkeypatch, lambda a, f=function: f(block, a), x)
        assert counts == {f"spmm.copy_{target}.{'sum' if reduce == 'mean' else reduce}/ours": 1}


@pytest.mark.parametrize(("left", "right"), list(itertools.product("uve", "uve")))
def test_rows_of_edges(block: Any, left: str, right: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for op, features in itertools.product(("add", "sub", "mul", "div", "dot"), SHAPES):
        if op == "dot" and features[0][-1:] != features[1][-1:]:
            continue
        lhs, rhs = operand(left, features[0], block, 4), operand(right, features[1], block, 5)
        if left == right == "e" and op != "dot":
            continue  # DGL's backward has no such case
        counts = assert_same_with_dgl(
            monkeypatch, lambda a, b, op=op: dgl.ops.gsddmm(block, op, a, b, left, right), lhs, rhs
        )
        assert counts == {f"sddmm.{left}_{op}_{right}/ours": 1}


@pytest.mark.parametrize("features", [(), (3,), (2, 3)])
def test_copies_to_edges_and_softmax(block: Any, features: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for target, copy in (("u", dgl.ops.copy_u), ("v", dgl.ops.copy_v)):
        counts = assert_same_with_dgl(monkeypatch, lambda a, f=copy: f(block, a), operand(target, features, block, 6))
        assert counts == {f"sddmm.copy_{target}/ours": 1}
    for norm_by in ("dst", "src"):
        logits = operand("e", features, block, 7)
        counts = assert_same_with_dgl(
            monkeypatch, lambda a, by=norm_by: dgl.ops.edge_softmax(block, a, norm_by=by), logits
        )
        assert counts == {f"edge_softmax.{norm_by}/ours": 1}


def test_operands_in_any_strides(block: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = operand("u", (4, 3), block, 8).detach()
    w = operand("e", (3,), block, 9).detach()
    assert_same_with_dgl(
        monkeypatch, lambda a, b: dgl.ops.u_mul_e_max(block, a.transpose(1, 2)[:, :, ::2], b.flip(0)[:, :, None]), x, w
    )


@pytest.mark.parametrize("formats", ["coo", "csr", "csc"])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_graphs_in_any_format(formats: str, ids: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    src, dst = torch.randint(9, (2, 40), generator=generator).to(ids)
    graph = dgl.graph((src, dst), num_nodes=11)
    x, w = operand("u", (2,), graph, 1), operand("e", (2,), graph, 2)
    held = graph.formats(formats)
    # DGL's own needs other formats for its backward, so it gets the whole graph.
    expected = outcome(lambda a, b: dgl.ops.u_mul_e_sum(graph, a, b), x, w)
    with routed("all"), monkeypatch.context() as patch:
        forbid_dgls_kernels(patch)
        actual = outcome(lambda a, b: dgl.ops.u_mul_e_sum(held, a, b), x, w)
    for ours, dgls in zip(actual, expected, strict=True):
        assert_close(ours, dgls, "result or gradient")
    structure = sparse_graph_of(held._graph)
    assert structure is not None
    structure.validate()
    assert torch.equal(edge_neighbours(structure.in_edges), src.long())
    assert torch.equal(edge_rows(structure.in_edges), dst.long())
    assert structure.index_dtype == torch.int32


def test_graphs_without_edges() -> None:
    graph = dgl.create_block((torch.tensor([], dtype=torch.int64),) * 2, num_src_nodes=3, num_dst_nodes=2)
    x, w = torch.ones(3, 2, requires_grad=True), torch.ones(0, 1)
    with routed("all"):
        assert torch.equal(dgl.ops.copy_u_max(graph, x), torch.zeros(2, 2)), "as DGL, where there is no edge at all"
        result = dgl.ops.u_mul_e_sum(graph, x, w)
        result.sum().backward()
        assert dgl.ops.edge_softmax(graph, w).shape == (0, 1)
    assert torch.equal(result, torch.zeros(2, 2))
    assert torch.equal(x.grad, torch.zeros(3, 2))


def test_update_all_replaces_infinity_by_zero(block: Any) -> None:
    x = operand("u", (2,), block, 1)

    def aggregate(x: Tensor) -> Tensor:
        with block.local_scope():
            block.srcdata["h"] = x
            block.update_all(fn.copy_u("h", "m"), fn.max("m", "y"))
            return block.dstdata["y"]

    expected = outcome(aggregate, x)
    assert not bool(torch.isinf(expected[0]).any())
    with routed("all"):
        actual = outcome(aggregate, x)
        assert op_counts() == {"spmm.copy_u.max/ours": 1}
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


# ------------------------------------------------------------------------------------------------ left to DGL


@pytest.mark.parametrize("op", ["add", "sub"])
@pytest.mark.parametrize("reduce", ["sum", "max", "min", "mean"])
def test_operators_we_lack_are_dgls_and_counted(block: Any, op: str, reduce: str) -> None:
    x, w = operand("u", (2,), block, 1), operand("e", (2,), block, 2)
    function = getattr(dgl.ops, f"u_{op}_e_{reduce}")
    expected = outcome(lambda a, b: function(block, a, b), x, w)
    with routed("all"):
        actual = outcome(lambda a, b: function(block, a, b), x, w)
        assert op_counts() == {f"spmm.u_{op}_e.{'sum' if reduce == 'mean' else reduce}/dgl: operator": 1}
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_softmax_over_some_edges_is_dgls(block: Any) -> None:
    logits, edges = operand("e", (2,), block, 1)[:3], torch.tensor([1, 4, 6])
    expected = dgl.ops.edge_softmax(block, logits, edges)
    with routed("all"):
        assert torch.equal(dgl.ops.edge_softmax(block, logits, edges), expected)
        assert op_counts() == {"edge_softmax.dst/dgl: some edges only": 1}


@pytest.mark.parametrize(
    ("reason", "call"),
    [
        ("int64", lambda block, x, w: dgl.ops.copy_u_sum(block, x.long())),
        ("operands of two dtypes", lambda block, x, w: dgl.ops.u_mul_e_sum(block, x, w.float())),
        ("number of rows", lambda block, x, w: dgl.ops.copy_u_sum(block, x[1:])),
        ("shapes do not broadcast", lambda block, x, w: dgl.ops.u_mul_e_sum(block, x, w.repeat(1, 2))),
        ("shapes do not broadcast", lambda block, x, w: dgl.ops.u_dot_e(block, x, w[:, :2])),
        ("operands on two devices", lambda block, x, w: dgl.ops.u_mul_e_sum(block, x, w.to("meta"))),
        ("graph and operands on two devices", lambda block, x, w: dgl.ops.copy_u_sum(block, x.to("meta"))),
    ],
)
def test_complaints_are_dgls(block: Any, reason: str, call: Callable[..., Tensor]) -> None:
    """Whatever DGL refuses, it refuses in its own words."""
    x, w = operand("u", (3,), block, 1).detach(), operand("e", (3,), block, 2).detach()
    with pytest.raises(Exception) as dgls:  # noqa: PT011 - whatever it is
        call(block, x, w)
    with routed("all"):
        with pytest.raises(type(dgls.value)) as ours:
            call(block, x, w)
        assert [key.split("/", 1)[1] for key in op_counts()] == [f"dgl: {reason}"]
    assert str(ours.value).splitlines()[0].split("] ")[-1] == str(dgls.value).splitlines()[0].split("] ")[-1]


def test_several_edge_types_are_dgls_and_counted() -> None:
    graph = dgl.heterograph({("a", "near", "b"): ([0, 1, 1], [1, 0, 1]), ("a", "of", "b"): ([0, 1], [1, 1])})
    h = torch.tensor([[1.0], [3.0]])

    def aggregate() -> Tensor:
        with graph.local_scope():
            graph.nodes["a"].data["h"] = h
            graph.edata["w"] = {kind: torch.ones(graph.num_edges(kind), 1) for kind in graph.canonical_etypes}
            graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "y"))
            graph.apply_edges(fn.copy_u("h", "e"))
            dgl.ops.edge_softmax(graph, graph.edata["w"])
            return graph.nodes["b"].data["y"]

    expected = aggregate()
    with routed("all"):
        assert torch.equal(aggregate(), expected)
        assert op_counts() == {
            f"{name}.hetero/dgl: several edge types": 1 for name in ("edge_softmax", "sddmm", "spmm")
        }
    assert sparse_graph_of(graph._graph) is None


# ------------------------------------------------------------------------------------------------ what is served


FUNCTIONS = (
    ("dgl.ops.spmm", "gspmm_internal"),
    ("dgl.ops.sddmm", "gsddmm_internal"),
    ("dgl.ops.edge_softmax", "edge_softmax_internal"),
    ("dgl.ops.spmm", "gspmm_internal_hetero"),
    ("dgl.ops.sddmm", "gsddmm_internal_hetero"),
    ("dgl.ops.edge_softmax", "edge_softmax_hetero_internal"),
)


def touched() -> list[object]:
    functions = [vars(sys.modules[module])[name] for module, name in FUNCTIONS]
    methods = [vars(dgl.DGLGraph)["to"], vars(dgl.DGLGraph)["out_degrees"]]
    return [vars(HeteroGraphIndex)["get_relation_graph"], *functions, *methods]


@pytest.fixture
def originals() -> Iterator[list[object]]:
    """Without LayerBlocks of other tests, which need their hooks."""
    dispatch.remove()
    routing.route_ops("none")
    yield touched()
    dispatch.install()


def test_without_routing_every_function_is_the_original_object(originals: list[object]) -> None:
    assert not any(hasattr(function, "__wrapped__") for function in originals)
    for mode in ("all", "layer_blocks", "all", "none"):
        routing.route_ops(mode)  # type: ignore[arg-type]
        same = [now is before for now, before in zip(touched(), originals, strict=True)]
        assert same == [mode != "all"] * len(same)
    dispatch.install()
    same = [now is before for now, before in zip(touched(), originals, strict=True)]
    assert same == [False] * 4 + [True] * 5, "what LayerBlocks need"
    dispatch.remove()
    assert all(now is before for now, before in zip(touched(), originals, strict=True))


@pytest.mark.parametrize("name", ["gspmm_internal", "gspmm_internal_hetero"])
def test_an_unexpected_dgl_changes_nothing(name: str, originals: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["dgl.ops.spmm"]
    monkeypatch.setattr(module, name, lambda gidx, something_else: None)
    before = touched()
    with pytest.raises(CompatError, match=name):
        routing.route_ops("all")
    assert all(now is then for now, then in zip(touched(), before, strict=True))
    if name == "gspmm_internal":
        with pytest.raises(CompatError, match=name):
            dispatch.install()
        assert all(now is then for now, then in zip(touched(), before, strict=True))
        forward = vars(dgl.nn.pytorch.conv.SGConv)["forward"]
        assert not hasattr(forward, "__wrapped__")


def test_unknown_words_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one of layer_blocks, all, none \(got 'some'\)"):
        routing.route_ops("some")  # type: ignore[arg-type]


def test_plain_graphs_are_not_served_unless_asked_for(block: Any) -> None:
    dispatch.install()
    reset_op_counts()
    dgl.ops.copy_u_sum(block, operand("u", (2,), block, 1))
    assert op_counts() == {}
    routing.route_ops("all")
    dgl.ops.copy_u_sum(block, operand("u", (2,), block, 1))
    routing.route_ops("layer_blocks")
    dgl.ops.copy_u_sum(block, operand("u", (2,), block, 1))
    assert op_counts() == {"spmm.copy_u.sum/ours": 1}


def test_counts_are_added_up_and_reset() -> None:
    reset_op_counts()
    count("GATConv", "fused")
    count("GATConv", "fused")
    count("AGNNConv", "dgl: why")
    assert op_counts() == {"AGNNConv/dgl: why": 1, "GATConv/fused": 2}
    reset_op_counts()
    assert op_counts() == {}


def test_hooked_functions_keep_their_signatures() -> None:
    routing.route_ops("none")
    dispatch.remove()
    before = [inspect.signature(vars(sys.modules[module])[name]) for module, name in FUNCTIONS]
    routing.route_ops("all")
    assert [inspect.signature(vars(sys.modules[module])[name]) for module, name in FUNCTIONS] == before
    dispatch.install()


# ------------------------------------------------------------------------------------------------ the structure


def test_a_structure_is_made_once_and_goes_with_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    convert = dgl_index._convert
    monkeypatch.setattr(dgl_index, "_convert", lambda index: made.append(1) or convert(index))
    graph = dgl.graph((torch.tensor([0, 1, 2]), torch.tensor([1, 2, 2])))
    structure = sparse_graph_of(graph._graph)
    with graph.local_scope():
        assert sparse_graph_of(graph._graph) is structure
    assert sparse_graph_of(graph.local_var()._graph) is structure
    assert sparse_graph_of(graph._graph, "cpu") is structure
    assert made == [1]
    graph.add_edges(torch.tensor([0]), torch.tensor([0]))
    changed = sparse_graph_of(graph._graph)
    assert changed is not None
    assert changed.num_edges == 4
    assert edge_neighbours(changed.in_edges).tolist() == [0, 1, 2, 0]
    assert edge_rows(changed.in_edges).tolist() == [1, 2, 2, 0]
    with routed("all"):
        for _ in range(3):  # on the index of the edge type, which DGL makes in each call
            graph.ndata["h"] = torch.ones(3, 1)
            graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
    assert graph.ndata["h"].flatten().tolist() == [1.0, 1.0, 2.0]
    assert made == [1, 1]
    reference = weakref.ref(structure)
    del structure
    gc.collect()
    assert reference() is None, "the structure of the changed graph is still held"
    reference = weakref.ref(changed)
    del changed, graph
    gc.collect()
    assert reference() is None


def test_relations_of_a_heterograph_keep_their_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    convert = dgl_index._convert
    monkeypatch.setattr(dgl_index, "_convert", lambda index: made.append(1) or convert(index))
    graph = dgl.heterograph({("a", "near", "b"): ([0, 1, 1], [1, 0, 1]), ("a", "of", "b"): ([0, 1], [1, 1])})
    conv = dgl.nn.HeteroGraphConv({kind: dgl.nn.GraphConv(2, 3, allow_zero_in_degree=True) for kind in ("near", "of")})
    inputs = {"a": torch.rand(2, 2), "b": torch.rand(2, 2)}
    expected = conv(graph, inputs)["b"].detach()
    with routed("all"):
        for _ in range(3):
            torch.testing.assert_close(conv(graph, inputs)["b"].detach(), expected)
        assert op_counts() == {"spmm.copy_u.sum/ours": 6}
    assert made == [1, 1]


def test_edge_ids_that_count_up_are_left_out() -> None:
    indptr, indices = torch.tensor([0, 2, 2, 3]), torch.tensor([1, 0, 2])
    spelled_out = dgl.create_block(("csc", (indptr, indices, torch.arange(3))), num_src_nodes=3, num_dst_nodes=3)
    structure = sparse_graph_of(spelled_out._graph)
    assert structure is not None
    assert structure.in_edges.edge_ids is None
    mixed = dgl.create_block(("csc", (indptr, indices, torch.tensor([2, 0, 1]))), num_src_nodes=3, num_dst_nodes=3)
    structure = sparse_graph_of(mixed._graph)
    assert structure is not None
    assert structure.in_edges.edge_ids is not None
    assert structure.in_edges.edge_ids.tolist() == [2, 0, 1]
    assert structure.in_edges.indices.tolist() == [1, 0, 2]


UNSORTED_ROWS = torch.tensor([0, 3, 4, 6]), torch.tensor([3, 0, 2, 1, 4, 0])
"""In-edges of three destinations; sources do not ascend within a row."""


def unsorted_graph(edge_ids: list[int], ids: torch.dtype) -> Any:
    rows = (*(given.clone() for given in UNSORTED_ROWS), torch.tensor(edge_ids, dtype=torch.int64))  # DGL takes these
    block = dgl.create_block(("csc", rows), num_src_nodes=5, num_dst_nodes=3)
    return block.int() if ids == torch.int32 else block


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("edge_ids", [[], [0, 1, 2, 3, 4, 5], [5, 1, 4, 0, 3, 2]], ids=["none", "count up", "mixed"])
def test_dgl_may_sort_its_rows_after_ours_were_made(edge_ids: list[int], ids: torch.dtype) -> None:
    """Global negative sampling sorts the rows of the graph in place; ours, which shared them, took wrong edges then."""
    graph = unsorted_graph(edge_ids, ids)
    x, w = torch.rand(5, 2), torch.rand(6, 1)
    expected = dgl.ops.u_mul_e_sum(graph, x, w)
    with routed("all"):
        before = dgl.ops.u_mul_e_sum(graph, x, w)
        structure = sparse_graph_of(graph._graph)
        assert structure is not None
        ours = [tensor.clone() for tensor in structure.in_edges.tensors()]
        dgl.sampling.global_uniform_negative_sampling(graph, 2)
        after = dgl.ops.u_mul_e_sum(graph, x, w)
    torch.testing.assert_close(before, expected)
    torch.testing.assert_close(after, expected)
    assert all(torch.equal(now, then) for now, then in zip(structure.in_edges.tensors(), ours, strict=True))
    indices = graph._graph.adjacency_matrix_tensors(0, True, "csr")[3]
    assert indices.tolist() == [0, 2, 3, 1, 0, 4], "DGL sorts no rows in place: the test tells nothing"


def test_graphs_of_ours_share_their_rows_with_dgl() -> None:
    """Nobody samples from them, so a copy would be memory for nothing."""
    graph, of_user = (unsorted_graph([0, 1, 2, 3, 4, 5], torch.int32)._graph for _ in range(2))
    on_device = DeviceIndex.of(unsorted_graph([0, 1, 2, 3, 4, 5], torch.int32)._graph, torch.device("cpu"))
    for index in (graph, on_device):
        dgl_index.claim(index)
    assert [_shares_rows(index) for index in (graph, on_device.on_cpu, of_user)] == [True, True, False]


def _shares_rows(index: Any) -> bool:
    structure = sparse_graph_of(index)
    assert structure is not None
    indices: Tensor = index.adjacency_matrix_tensors(0, True, "csr")[3]
    return structure.in_edges.indices.data_ptr() == indices.data_ptr()
