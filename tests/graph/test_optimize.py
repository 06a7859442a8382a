# SPDX-License-Identifier: Apache-2.0
"""Optimised attention layers give what DGL's own give, on every kind of graph, and stay the modules they were."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import dgl
import dgl.nn as dglnn
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from dgl_hybrid.graph import attention_terms
from dgl_hybrid.graph.layer_block import LayerBlock
from dgl_hybrid.graph.optimize import optimize, restore
from dgl_hybrid.graph.tiny_blocks import build_block_of
from dgl_hybrid.ops import EdgeDropout, plain_rows
from dgl_hybrid.ops.backend import load_backend
from dgl_hybrid.ops.op_counts import op_counts, reset_op_counts
from dgl_hybrid.ops.routing import graph_to_device
from tests.helpers.exactness import assert_close

NUM_SRC, NUM_DST, NUM_EDGES, IN, WIDTH, HEADS = 30, 20, 110, 5, 3, 2
LAYERS: dict[str, Callable[..., nn.Module]] = {"gat": dglnn.GATConv, "gatv2": dglnn.GATv2Conv}


@pytest.fixture(autouse=True)
def _counts() -> Iterator[None]:
    reset_op_counts()
    yield
    reset_op_counts()


def make(kind: str, in_feats: Any = IN, **options: Any) -> Any:
    torch.manual_seed(2)
    layer = LAYERS[kind](in_feats, WIDTH, HEADS, allow_zero_in_degree=True, **options)
    # Biases begin as zeros, which would hide one that is left out.
    for parameter in layer.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    return layer.double()


def edge_ends(num_src: int, num_dst: int) -> tuple[Tensor, Tensor]:
    """Some vertices have no in-edge, some edges are there twice, and destination 1 reads half of all."""
    generator = torch.Generator().manual_seed(3)
    src = torch.randint(num_src, (NUM_EDGES,), generator=generator)
    dst = torch.randint(num_dst - 3, (NUM_EDGES,), generator=generator)
    dst[::2] = 1
    return src, dst


def plain_graph() -> Any:
    return dgl.graph(edge_ends(NUM_SRC, NUM_SRC), num_nodes=NUM_SRC)


def bipartite() -> Any:
    counts = {"user": NUM_SRC, "item": NUM_DST}
    return dgl.heterograph({("user", "buys", "item"): edge_ends(NUM_SRC, NUM_DST)}, num_nodes_dict=counts)


def dgl_block() -> Any:
    return dgl.create_block(edge_ends(NUM_SRC, NUM_DST), num_src_nodes=NUM_SRC, num_dst_nodes=NUM_DST)


def layer_block() -> Any:
    src, dst = edge_ends(NUM_SRC, NUM_SRC)
    order = torch.argsort(dst, stable=True)
    indptr = torch.zeros(NUM_SRC + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(dst, minlength=NUM_SRC).cumsum(0)
    return build_block_of(indptr, src[order])


GRAPHS: dict[str, Callable[[], Any]] = {
    "graph": plain_graph,
    "graph of int32": lambda: plain_graph().int(),
    "graph without rows by source": lambda: plain_graph().formats(["coo", "csc"]),
    "graph without edges": lambda: dgl.graph(([], []), num_nodes=NUM_SRC),
    "bipartite": bipartite,
    "block": dgl_block,
    "LayerBlock": layer_block,
    "LayerBlock of int32": lambda: layer_block().int(),
}


def inputs_for(graph: Any, *, is_pair: bool = False, extra: tuple[int, ...] = (), width: int = IN) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    rows = [graph.num_src_nodes(), graph.num_dst_nodes()] if is_pair else [graph.num_src_nodes()]
    widths = [width, width + is_pair]
    return [
        torch.randn(n, *extra, w, dtype=torch.float64, generator=generator).requires_grad_()
        for n, w in zip(rows, widths, strict=False)
    ]


@dataclass
class Result:
    outputs: list[Tensor]
    grads: dict[str, Tensor] = field(default_factory=dict)


def run(layer: Any, graph: Any, inputs: list[Tensor], **options: Any) -> Result:
    feat: Any = tuple(inputs) if len(inputs) > 1 else inputs[0]
    layer.zero_grad()
    outputs = layer(graph, feat, **options)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    weights = [torch.cos(torch.arange(y.numel(), dtype=torch.float64)).view(y.shape).to(y) for y in outputs]
    loss = sum((y * w).sum() for y, w in zip(outputs, weights, strict=True))
    named = {name: parameter for name, parameter in layer.named_parameters() if parameter.requires_grad}
    wanted = [*named.values(), *inputs]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)  # type: ignore[arg-type]
    names = [*named, *(f"input {k}" for k in range(len(inputs)))]
    grads = {name: torch.zeros_like(x) if g is None else g for name, x, g in zip(names, wanted, found, strict=True)}
    return Result([y.detach() for y in outputs], grads)


def assert_same(actual: Result, expected: Result, tolerance: float = 1e-9) -> None:
    assert len(actual.outputs) == len(expected.outputs)
    for one, other in zip(actual.outputs, expected.outputs, strict=True):
        assert one.dtype == other.dtype
        assert_close(one, other, "output", tolerance)
    assert actual.grads.keys() == expected.grads.keys()
    for name, grad in expected.grads.items():
        assert_close(actual.grads[name], grad, f"gradient of {name}", tolerance)


def check(layer: Any, graph: Any, inputs: list[Tensor], route: str = "ours", **options: Any) -> None:
    """The layer as it is, and optimised; and which way the optimised one went."""
    expected = run(layer, graph, inputs, **options)
    reset_op_counts()
    actual = run(optimize(copy.deepcopy(layer)), graph, inputs, **options)
    kind = "gatv2" if isinstance(layer, dglnn.GATv2Conv) else "gat"
    assert op_counts().get(f"{kind}/{route}") == 1, op_counts()
    assert_same(actual, expected)


# ------------------------------------------------------------------------------------------ the same results


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("kind", LAYERS)
def test_on_every_kind_of_graph(kind: str, name: str) -> None:
    graph = GRAPHS[name]()
    is_pair = name == "bipartite"
    layer = make(kind, (IN, IN + 1) if is_pair else IN)
    check(layer, graph, inputs_for(graph, is_pair=is_pair))


OPTIONS: dict[str, dict[str, Any]] = {
    "as is": {},
    "slope": {"negative_slope": 0.01},
    "no bias": {"bias": False},
    "residual": {"residual": True},
    "activation": {"activation": torch.tanh},
    "activation module": {"activation": nn.Sequential(nn.ELU())},
    "elu": {"activation": F.elu},
    "elu, no bias": {"activation": nn.ELU(), "bias": False},
    "elu, residual": {"activation": nn.ELU(), "residual": True},
    "another elu": {"activation": nn.ELU(alpha=0.5)},
    "everything": {"residual": True, "activation": F.elu, "negative_slope": 0.5, "bias": False},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("graph", [dgl_block, layer_block])
@pytest.mark.parametrize("kind", LAYERS)
def test_every_option(kind: str, graph: Callable[[], Any], options: str) -> None:
    built = graph()
    check(make(kind, **OPTIONS[options]), built, inputs_for(built))


@pytest.mark.parametrize("graph", [plain_graph, dgl_block, layer_block])
@pytest.mark.parametrize("kind", LAYERS)
def test_identity_as_residual(kind: str, graph: Callable[[], Any]) -> None:
    built, width = graph(), WIDTH * HEADS
    check(make(kind, width, residual=True), built, inputs_for(built, width=width))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("graph", [plain_graph, dgl_block, layer_block])
def test_shared_weights(graph: Callable[[], Any], residual: bool) -> None:
    built = graph()
    check(make("gatv2", share_weights=True, residual=residual), built, inputs_for(built))


@pytest.mark.parametrize("graph", [bipartite, dgl_block, layer_block])
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_pairs_of_inputs(kind: str, is_wide: bool, graph: Callable[[], Any]) -> None:
    """With one width for both, `GATConv` has one product for both inputs, `GATv2Conv` one for each."""
    built = graph()
    inputs = inputs_for(built, is_pair=True)
    if not is_wide:
        inputs[1] = inputs[1].detach()[:, :IN].clone().requires_grad_()
    check(make(kind, (IN, IN + 1) if is_wide else IN, residual=True), built, inputs)


@pytest.mark.parametrize("activation", [torch.tanh, F.elu])
@pytest.mark.parametrize("extra", [(4,), (2, 3)])
@pytest.mark.parametrize("graph", [plain_graph, dgl_block, layer_block])
def test_dimensions_between_vertex_and_feature(
    graph: Callable[[], Any], extra: tuple[int, ...], activation: Callable[[Tensor], Tensor]
) -> None:
    built = graph()
    check(make("gat", residual=True, activation=activation), built, inputs_for(built, extra=extra))


@pytest.mark.parametrize("kind", LAYERS)
def test_float32(kind: str) -> None:
    graph = plain_graph()
    layer, inputs = make(kind).float(), [x.detach().float().requires_grad_() for x in inputs_for(graph)]
    expected, actual = run(layer, graph, inputs), run(optimize(copy.deepcopy(layer)), graph, inputs)
    assert_same(actual, expected, tolerance=1e-4)


@pytest.mark.cuda
@pytest.mark.parametrize("drop", [0.0, 0.5])
@pytest.mark.parametrize("graph", [plain_graph, dgl_block, layer_block])
@pytest.mark.parametrize("kind", LAYERS)
def test_on_cuda(kind: str, graph: Callable[[], Any], drop: float) -> None:
    """As on the CPU, with the same masks: their keys come from the generator of the CPU."""
    built = graph()
    moved = built.to("cuda") if isinstance(built, LayerBlock) else graph_to_device(built, "cuda")
    layer = optimize(make(kind, residual=True, attn_drop=drop).float())
    inputs = [x.detach().float().requires_grad_() for x in inputs_for(built)]
    torch.manual_seed(17)
    expected = run(layer, built, inputs)
    torch.manual_seed(17)
    actual = run(layer.to("cuda"), moved, [x.detach().cuda().requires_grad_() for x in inputs])
    assert op_counts()[f"{kind}/ours"] == 2
    on_cpu = Result([y.cpu() for y in actual.outputs], {name: grad.cpu() for name, grad in actual.grads.items()})
    assert_same(on_cpu, expected, tolerance=1e-4)


@pytest.mark.parametrize("kind", LAYERS)
def test_frozen_parameters_and_inputs_that_need_no_gradient(kind: str) -> None:
    graph = plain_graph()
    layer = make(kind)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_("attn" in name)
    inputs = [x.detach() for x in inputs_for(graph)]
    feat = inputs[0]
    grads = []
    for module in (layer, optimize(copy.deepcopy(layer))):
        wanted = [parameter for parameter in module.parameters() if parameter.requires_grad]
        grads.append(torch.autograd.grad(module(graph, feat).square().sum(), wanted))
        with torch.no_grad():
            assert not module(graph, feat).requires_grad
        with torch.inference_mode():
            assert_close(module(graph, feat), layer(graph, feat), "inference")
    for actual, expected in zip(*reversed(grads), strict=True):
        assert_close(actual, expected, "gradient")


@pytest.mark.parametrize("graph", [plain_graph, dgl_block, layer_block])
@pytest.mark.parametrize("kind", LAYERS)
def test_nothing_of_the_size_of_the_edges_is_kept_for_the_backward(kind: str, graph: Callable[[], Any]) -> None:
    built = graph()
    kept: list[tuple[int, ...]] = []

    def pack(x: Tensor) -> Tensor:
        if x.is_floating_point():
            kept.append(tuple(x.shape))
        return x

    layer, (x,) = make(kind), inputs_for(built)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        layer(built, x)
    assert any(shape[0] == NUM_EDGES for shape in kept), "DGL's own forward was expected to keep rows of edges"
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        optimize(layer)(built, x)
    assert kept
    assert not any(shape[0] == NUM_EDGES for shape in kept)


@pytest.mark.parametrize("function", [optimize, restore])
def test_what_is_no_model_is_refused(function: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"a model must be a torch\.nn\.Module \(got str\)"):
        function("model")


def test_fields_of_the_graph_stay_as_they_were() -> None:
    for build in (plain_graph, dgl_block, layer_block):
        graph = build()
        graph.srcdata["ft"] = torch.ones(graph.num_src_nodes(), 1)
        before = set(graph.srcdata), set(graph.dstdata), set(graph.edata)
        optimize(make("gat"))(graph, inputs_for(graph)[0])
        assert (set(graph.srcdata), set(graph.dstdata), set(graph.edata)) == before
        assert torch.equal(graph.srcdata["ft"], torch.ones(graph.num_src_nodes(), 1))


# ------------------------------------------------------------------------------------------ what goes to DGL


@pytest.mark.parametrize("graph", [plain_graph, dgl_block, layer_block])
def test_edge_weights_go_to_dgl(graph: Callable[[], Any]) -> None:
    built = graph()
    weight = torch.rand(NUM_EDGES, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    check(make("gat"), built, inputs_for(built), route="dgl: edge_weight", edge_weight=weight)


@pytest.mark.parametrize("graph", [plain_graph, dgl_block, layer_block])
@pytest.mark.parametrize("kind", LAYERS)
def test_attention_as_a_result_goes_to_dgl(kind: str, graph: Callable[[], Any]) -> None:
    built = graph()
    check(make(kind), built, inputs_for(built), route="dgl: get_attention", get_attention=True)


@pytest.mark.parametrize("kind", LAYERS)
def test_replaced_and_hooked_parts_still_run(kind: str) -> None:
    graph = plain_graph()
    replaced = make(kind)
    replaced.leaky_relu = nn.ReLU()
    check(replaced, graph, inputs_for(graph), route="dgl: LeakyReLU replaced or hooked")
    seen = []
    hooked = optimize(make(kind))
    handle = hooked.attn_drop.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    hooked(graph, inputs_for(graph)[0])
    assert seen == [(NUM_EDGES, HEADS, 1)]
    assert op_counts()[f"{kind}/dgl: Dropout replaced or hooked"] == 1
    handle.remove()
    hooked(graph, inputs_for(graph)[0])
    assert op_counts()[f"{kind}/ours"] == 1
    seen.clear()
    handle = register_module_forward_hook(lambda module, args, output: seen.append(type(module)))
    hooked(graph, inputs_for(graph)[0])
    handle.remove()
    assert nn.Dropout in seen, "hooks of all modules are those of each"
    hooked(graph, inputs_for(graph)[0])
    assert op_counts()[f"{kind}/ours"] == 2


def error_of(call: Callable[[], Any]) -> tuple[type, str]:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whichever it is, it shall be the same
        call()
    return caught.type, str(caught.value)


def assert_same_error(layer: Any, graph: Any, feat: Any) -> None:
    expected = error_of(lambda: layer(graph, feat))
    assert error_of(lambda: optimize(copy.deepcopy(layer))(graph, feat)) == expected


@pytest.mark.parametrize("kind", LAYERS)
def test_mistakes_raise_the_same_errors(kind: str) -> None:
    layer = make(kind)
    for build in (plain_graph, dgl_block, layer_block):
        graph = build()
        (x,) = inputs_for(graph)
        assert_same_error(layer, graph, x[:-1])
        assert_same_error(layer, graph, x[:, :-1])
        assert_same_error(layer, graph, x.long())
    (x,) = inputs_for(plain_graph())
    several = dgl.heterograph({("a", "r", "a"): ([0], [1]), ("a", "s", "a"): ([1], [0])})
    assert_same_error(layer, several, x[:2])
    if kind == "gatv2":
        assert_same_error(layer, plain_graph(), torch.stack([x, x], 1))


@pytest.mark.parametrize("graph", [plain_graph, dgl_block, layer_block])
@pytest.mark.parametrize("kind", LAYERS)
def test_vertices_without_in_edges(kind: str, graph: Callable[[], Any]) -> None:
    built = graph()
    (x,) = inputs_for(built)
    layer = make(kind, bias=False)
    layer.set_allow_zero_in_degree(False)
    assert_same_error(layer, built, x)
    assert "There are 0-in-degree nodes" in error_of(lambda: layer(built, x))[1]
    layer.set_allow_zero_in_degree(True)
    out = optimize(layer)(built, x)
    is_alone = built.in_degrees() == 0
    assert 3 <= int(is_alone.sum()) < len(out)
    assert bool((out[is_alone] == 0).all())
    looped = dgl.add_self_loop(plain_graph())
    layer.set_allow_zero_in_degree(False)
    check(restore(layer), looped, inputs_for(looped))


def test_a_second_derivative_is_refused() -> None:
    graph = plain_graph()
    (x,) = inputs_for(graph)
    layer = optimize(make("gat"))
    for of in (x, layer.attn_l, layer.attn_r):
        (again,) = torch.autograd.grad(layer(graph, x).square().sum(), of, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            again.sum().backward()


# ------------------------------------------------------------------------------------------ still the same module


class _Renamed(dglnn.GATConv):
    """A user's subclass with DGL's forward."""


class _Own(dglnn.GATConv):
    """A user's subclass with a forward of its own."""

    def forward(self, graph: Any, feat: Tensor) -> Tensor:
        return super().forward(graph, feat) * 2.0


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([make("gat"), make("gatv2", WIDTH * HEADS)])
        self.other = nn.Linear(2, 2)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(graph, x).flatten(1)
        return x


def test_the_model_stays_what_it_was() -> None:
    model, untouched = _Model(), _Model()
    types, parameters = [type(m) for m in model.modules()], dict(model.named_parameters())
    assert optimize(model) is model
    assert repr(model) == repr(untouched)
    assert list(model.state_dict()) == list(untouched.state_dict())
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert isinstance(model.layers[0], dglnn.GATConv)
    assert type(model.layers[0]).__qualname__ == "GATConv"
    changed = [type(m) for m in model.modules()]
    assert [a is b for a, b in zip(types, changed, strict=True)] == [
        not isinstance(m, (dglnn.GATConv, dglnn.GATv2Conv)) for m in model.modules()
    ]
    assert [type(m) for m in optimize(model).modules()] == changed, "a second call changes nothing"
    untouched.load_state_dict(model.state_dict())
    model.load_state_dict(untouched.state_dict())
    assert [type(m) for m in restore(model).modules()] == types
    assert restore(model) is model


def copies_of(model: nn.Module) -> dict[str, nn.Module]:
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    return {
        "copied": copy.copy(model),
        "deeply copied": copy.deepcopy(model),
        "pickled": pickle.loads(pickle.dumps(model)),
        "pickled by protocol 0": pickle.loads(pickle.dumps(model, protocol=0)),
        "saved": torch.load(saved, weights_only=False),
    }


def test_copies_are_optimised_and_can_be_restored() -> None:
    graph, (x,) = plain_graph(), inputs_for(plain_graph())
    model = optimize(_Model())
    expected = model(graph, x).detach()
    for how, copied in copies_of(model).items():
        assert [type(m) for m in copied.modules()] == [type(m) for m in model.modules()], how
        reset_op_counts()
        assert torch.equal(copied(graph, x), expected), how
        assert op_counts() == {"gat/ours": 1, "gatv2/ours": 1}, how
    own = copies_of(_Model())["pickled"]
    assert [type(m) for m in own.modules()] == [type(m) for m in restore(copies_of(model)["pickled"]).modules()]


def test_a_class_that_a_layer_has_got_since_stays_with_its_copies() -> None:
    """They were of the class that `optimize` had made: a forward of the script's own was lost without a word."""
    graph, (x,) = plain_graph(), inputs_for(plain_graph())
    layer = optimize(make("gat"))

    class Twice(type(layer)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return 2.0 * super().forward(*args, **kwargs)

    once = layer(graph, x).detach()
    before, layer.__class__ = type(layer), Twice
    for copied in (layer, copy.copy(layer), copy.deepcopy(layer)):
        assert type(copied) is Twice
        assert torch.equal(copied(graph, x), 2.0 * once)
    with pytest.raises(ValueError, match=r"a GATConv got the class .*Twice after it was optimized"):
        restore(layer)
    assert type(layer) is Twice
    layer.__class__ = before
    assert type(restore(layer)) is dglnn.GATConv


def test_a_pickle_names_no_class_of_ours_but_the_maker() -> None:
    """It can be read where the classes have not been made yet."""
    data = pickle.dumps(optimize(make("gat")))
    assert b"_new_optimized" in data
    assert b"dgl.nn.pytorch.conv.gatconv" in data
    assert b"_Optimized" not in data


def test_the_layer_itself_subclasses_and_containers() -> None:
    graph = plain_graph()
    (x,) = inputs_for(graph)
    renamed, own = _Renamed(IN, WIDTH, HEADS).double(), _Own(IN, WIDTH, HEADS).double()
    for layer in (renamed, own):
        layer.set_allow_zero_in_degree(True)
    check(renamed, graph, [x])
    assert type(copy.deepcopy(optimize(renamed))) is type(renamed)
    assert isinstance(renamed, _Renamed)
    assert type(optimize(own)) is _Own
    container = dglnn.HeteroGraphConv({"buys": make("gatv2", (IN, IN))})
    items = bipartite()
    x_src, x_dst = inputs_for(items, is_pair=True)
    features = {"user": x_src}, {"item": x_dst[:, :IN]}
    expected = container(items, features)["item"].detach()
    reset_op_counts()
    assert_close(optimize(container)(items, features)["item"], expected, "HeteroGraphConv")
    assert op_counts()["gatv2/ours"] == 1


def test_a_forward_set_on_the_object_is_respected() -> None:
    layer = make("gat")
    layer.forward = lambda graph, feat: feat
    assert type(optimize(layer)) is dglnn.GATConv
    assert layer(None, 3) == 3


def test_hooks_of_the_layer_run() -> None:
    graph = plain_graph()
    (x,) = inputs_for(graph)
    layer, seen = make("gat"), []
    layer.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    optimize(layer)(graph, x)
    assert seen == [(NUM_SRC, HEADS, WIDTH)]
    assert op_counts()["gat/ours"] == 1


# ------------------------------------------------------------------------------------------ dropout


@pytest.mark.parametrize("graph", [plain_graph, dgl_block, layer_block])
@pytest.mark.parametrize("kind", LAYERS)
def test_the_mask_follows_the_seed(kind: str, graph: Callable[[], Any]) -> None:
    built = graph()
    (x,) = inputs_for(built)
    layer = optimize(make(kind, attn_drop=0.5))
    results = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        results.append(run(layer, built, [x]))
    assert torch.equal(results[0].outputs[0], results[1].outputs[0])
    assert all(torch.equal(results[0].grads[name], results[1].grads[name]) for name in results[0].grads)
    assert not torch.equal(results[0].outputs[0], results[2].outputs[0])
    torch.manual_seed(7)
    first, second = layer(built, x), layer(built, x)
    assert not torch.equal(first, second), "two calls must not share a mask"
    layer.eval()
    assert torch.equal(layer(built, x), layer(built, x))
    assert_close(layer(built, x), restore(layer)(built, x).detach(), "evaluation")
    assert op_counts()[f"{kind}/ours"] >= 8


@pytest.mark.parametrize("kind", LAYERS)
def test_the_mask_is_dropout_of_the_weights(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """DGL's own forward with the mask that the fused layer drew, written out."""
    graph = plain_graph()
    (x,) = inputs_for(graph)
    layer = make(kind, attn_drop=0.4, feat_drop=0.3)
    torch.manual_seed(11)
    actual = run(optimize(copy.deepcopy(layer)), graph, [x])
    torch.manual_seed(11)
    own_dropout, seen = F.dropout, []

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if len(input) != NUM_EDGES:
            return own_dropout(input, p, training, inplace)
        seen.append(p)
        first, second = torch.randint(2**63 - 1, (2,)).tolist()
        factors = EdgeDropout(p, (first, second)).factors(NUM_EDGES, HEADS, input.dtype, input.device)
        return input * factors[..., None]

    monkeypatch.setattr(F, "dropout", dropout)
    expected = run(layer, graph, [x])
    assert seen == [0.4]
    assert_same(actual, expected)


@pytest.mark.parametrize("kind", LAYERS)
def test_dropping_nothing_and_everything(kind: str) -> None:
    graph = plain_graph()
    inputs = inputs_for(graph)
    check(make(kind, attn_drop=0.0), graph, inputs)
    check(make(kind, attn_drop=1.0, residual=True), graph, inputs)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_checkpointing_draws_the_mask_again(kind: str, use_reentrant: bool) -> None:
    graph = plain_graph()
    (x,) = inputs_for(graph)
    layer = optimize(make(kind, attn_drop=0.5, feat_drop=0.2))

    def grads(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(13)
        layer.zero_grad()
        x.grad = None
        (call(x).square().sum() + layer(graph, x).sum()).backward()
        return [x.grad, *(parameter.grad for parameter in layer.parameters())]  # type: ignore[list-item]

    plain = grads(lambda x: layer(graph, x))
    repeated = grads(lambda x: checkpoint(layer, graph, x, use_reentrant=use_reentrant))
    for actual, expected in zip(repeated, plain, strict=True):
        assert_close(actual, expected, "gradient")


# ------------------------------------------------------------------------------------------ attention terms


@pytest.mark.parametrize("piece", [1, 7 * HEADS * WIDTH, 1 << 20, None])
@pytest.mark.parametrize("shape", [(NUM_SRC, HEADS, WIDTH), (NUM_SRC, 4, HEADS, WIDTH), (0, HEADS, WIDTH)])
def test_terms(shape: tuple[int, ...], piece: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, in plain PyTorch, and (None) by kernels as far as there are some."""
    if piece is not None:
        monkeypatch.setattr(attention_terms, "choose_backend", lambda x: load_backend("naive"))
        monkeypatch.setattr(plain_rows, "_PIECE_ELEMENTS", piece)
    generator = torch.Generator().manual_seed(6)

    def rows(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    num_dst = min(len(torch.empty(shape)), NUM_DST)
    x, attn_l, attn_r, upstream = rows(*shape), rows(1, HEADS, WIDTH), rows(1, HEADS, WIDTH), rows(*shape).detach()
    same, el, er = attention_terms.attention_terms(x * 1.0, attn_l, attn_r, num_dst=num_dst)
    expected = (x * attn_l).sum(-1, keepdim=True), (x[:num_dst] * attn_r).sum(-1, keepdim=True)
    assert torch.equal(same, x)
    losses = []
    for terms in ((el, er), expected):
        left, right = (term * torch.sin(torch.arange(term.numel()).double()).view_as(term) for term in terms)
        losses.append(left.sum() + right.sum() + (x * upstream if terms is expected else same * upstream).sum())
        for term, other in zip(terms, expected, strict=True):
            assert_close(term.detach(), other.detach(), "term")
    wanted = [x, attn_l, attn_r]
    for actual, grad in zip(*(torch.autograd.grad(loss, wanted) for loss in losses), strict=True):
        assert_close(actual, grad, "gradient")


def test_terms_of_frozen_parts() -> None:
    x = torch.randn(4, HEADS, WIDTH)
    attn_l, attn_r = torch.randn(2, 1, HEADS, WIDTH).unbind(0)
    _, el, _ = attention_terms.attention_terms(x, attn_l.requires_grad_(), attn_r, num_dst=2)
    (grad,) = torch.autograd.grad(el.sum(), attn_l)
    torch.testing.assert_close(grad, x.sum(0, keepdim=True))
    x.requires_grad_()
    _, el, er = attention_terms.attention_terms(x * 1.0, attn_l.detach(), attn_r, num_dst=2)
    (dx,) = torch.autograd.grad(el.sum() + er.sum(), x)
    expected = attn_l.detach().expand_as(x) + torch.cat([attn_r.expand(2, -1, -1), torch.zeros(2, HEADS, WIDTH)])
    torch.testing.assert_close(dx, expected)


# ------------------------------------------------------------------------------------------ scripts that go on in place

IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu_,
    "dropout that drops nothing": lambda h: F.dropout(h, 0.0, inplace=True).mul_(0.5),
    "skip connection": lambda h: h.add_(1.0),
}


def changed_in_place(layer: Any, graph: Any, change: Callable[[Tensor], Tensor]) -> Result:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, graph: Any, feat: Any) -> Tensor:
            return change(self.layer(graph, feat))

    return run(Changing(), graph, inputs_for(graph))


@pytest.mark.parametrize("change", IN_PLACE)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("graph", [plain_graph, layer_block], ids=["graph", "LayerBlock"])
def test_the_result_may_be_changed_in_place(kind: str, graph: Callable[[], Any], change: str) -> None:
    """The backward of attention reads its result, which the layer without bias returned as it was."""
    layer = make(kind, **({"bias": False} if kind == "gat" else {}))
    expected = changed_in_place(copy.deepcopy(layer), graph(), IN_PLACE[change])
    assert_same(changed_in_place(optimize(layer), graph(), IN_PLACE[change]), expected)


@pytest.mark.parametrize(
    "activation",
    [
        *(nn.ReLU(inplace=True), nn.ELU(inplace=True), nn.Sequential(nn.ReLU(inplace=True))),
        *(torch.relu_, functools.partial(F.leaky_relu, inplace=True), lambda h: F.relu(h, inplace=True)),
    ],
)
@pytest.mark.parametrize("kind", LAYERS)
def test_activations_may_work_in_place(kind: str, activation: nn.Module) -> None:
    layer = make(kind, activation=activation, **({"bias": False} if kind == "gat" else {}))
    check(layer, plain_graph(), inputs_for(plain_graph()))


@pytest.mark.parametrize("kind", LAYERS)
def test_activations_may_return_what_they_are_given(kind: str) -> None:
    """As `nn.Identity` does: scripts may go on in place."""
    layer = make(kind, activation=nn.Identity(), **({"bias": False} if kind == "gat" else {}))
    expected = changed_in_place(copy.deepcopy(layer), plain_graph(), IN_PLACE["skip connection"])
    assert_same(changed_in_place(optimize(layer), plain_graph(), IN_PLACE["skip connection"]), expected)


def test_what_an_elu_needs_for_its_gradient_is_named() -> None:
    layer = optimize(make("gat", activation=F.elu))
    graph = plain_graph()
    (x,) = inputs_for(graph)
    with pytest.raises(RuntimeError, match=r"activation ELU was changed in place.*write `h = h \+ other`"):
        layer(graph, x).add_(1.0).sum().backward()


# ------------------------------------------------------------------------------------------ parametrizations


class _Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2.0 * weight


class _Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.num_calls += 1
        return 2.0 * weight


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("graph", [plain_graph, dgl_block, layer_block])
def test_a_parametrization_is_evaluated_once(graph: Callable[[], Any], weighted: bool) -> None:
    """Of a layer that was optimized before. Spectral norm goes a step further each time, and others draw anew."""
    layer = optimize(dglnn.GraphConv(IN, WIDTH, allow_zero_in_degree=True).double())
    counted = _Counted()
    parametrize.register_parametrization(layer, "weight", counted)
    counted.num_calls = 0
    g = graph()
    learned = torch.ones(g.num_edges(), dtype=torch.float64, requires_grad=True) if weighted else None
    layer(g, torch.ones(g.num_src_nodes(), IN, dtype=torch.float64), edge_weight=learned)
    assert counted.num_calls == 1


def test_parametrized_layers_stay_as_they_are() -> None:
    """Both change the class of a layer: taking the parametrization away again failed half-way."""
    layer = dglnn.GraphConv(IN, WIDTH, allow_zero_in_degree=True).double()
    weight = layer.weight.detach().clone()
    parametrize.register_parametrization(layer, "weight", _Doubled())
    before = type(layer)
    assert type(optimize(layer)) is before
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is dglnn.GraphConv
    assert torch.equal(layer.weight, 2.0 * weight)
    assert type(optimize(layer)) is not dglnn.GraphConv
    parametrize.register_parametrization(layer, "weight", _Doubled())
    with pytest.raises(ValueError, match="GraphConv was parametrized after it was optimized"):
        restore(layer)
    parametrize.remove_parametrizations(layer, "weight")
    assert type(restore(layer)) is dglnn.GraphConv


@pytest.mark.parametrize("aggregator", ["mean", "gcn"])
@pytest.mark.parametrize("width", [1, 2 * WIDTH - 1, 2 * WIDTH, 5 * WIDTH + 1])
def test_linears_that_a_script_has_replaced(aggregator: str, width: int) -> None:
    """A layer keeps the width that it was made with: by pruning, or with a new head, its weights have another one."""
    graph, wide = layer_block(), 4 * WIDTH
    layer = dglnn.SAGEConv(wide, WIDTH, aggregator)
    layer.fc_neigh = nn.Linear(wide, width, bias=False)
    if aggregator == "mean":
        layer.fc_self = nn.Linear(wide, width)
    else:
        layer.bias = nn.Parameter(torch.randn(width))
    layer.double()
    x = torch.randn(graph.num_src_nodes(), wide, dtype=torch.float64, requires_grad=True)
    expected, actual = run(layer, graph, [x]), run(optimize(copy.deepcopy(layer)), graph, [x])
    assert_same(actual, expected)
