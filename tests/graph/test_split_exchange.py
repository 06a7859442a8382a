# SPDX-License-Identifier: Apache-2.0
"""One layer split by source, on hand-made structures: what runs while a message travels, and exactness at the corners.

Kernels and messages are watched where they are: methods of the backend, and the two halves of a transport's operation.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dgl_hybrid.exchange import buffers
from dgl_hybrid.exchange.closure import LayerStructure
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.connect import RankTransport, create_communicator
from dgl_hybrid.exchange.parts import ring_messages, whole_message
from dgl_hybrid.exchange.row_codecs import make_codec
from dgl_hybrid.graph import split_exchange
from dgl_hybrid.graph.products_beside import ProductsBeside
from dgl_hybrid.graph.split_block import SplitBlock
from dgl_hybrid.graph.split_exchange import Scale
from dgl_hybrid.ops.backend import choose_backend
from dgl_hybrid.planner.memory import CHUNK_COPIES
from tests.exchange.test_partial_sums import World, make_world, random_world
from tests.helpers.thinning import pairwise
from tests.helpers.world import run_ranks

HEADS, WIDTH, SLOPE = 2, 3, 0.2
SCALED = ("scaled sources", "scaled sums", "partial sums of scaled sources", "scaled partial sums")
"""Factors of the rows that are summed, or of the sums."""
SUMS = ("sum", "weighted sum", "partial sums", *SCALED)
ATTENTION = ("gat", "gatv2")
OWN = ("own and sum", "own and partial sum", "own and product of sum", "own and ReLU of product of sum")
BESIDE = (*OWN, "product of sum", "ReLU of product of sum", "product of scaled partial sum")
"""Layers that are one function with the exchange: with products of own rows, and with sources and sums that are scaled.
"""
OPS = (*SUMS, *ATTENTION, *BESIDE)
PRODUCTS = ("row_products", "row_products_backward")
KERNELS = ("add_sums", "spmm", "scaled_sums", "gat", "gat_backward", "gatv2", "gatv2_backward")


def crossing(world_size: int, *, reads: Callable[[int, int], bool], seed: int = 5) -> World:
    """Ten nodes a rank, no replicas; edges, at random, from rank p to rank q only where `reads(q, p)`."""
    num_nodes = 10 * world_size
    owner = torch.arange(num_nodes) // 10
    ends = torch.randint(num_nodes, (2, 30 * num_nodes), generator=torch.Generator().manual_seed(seed))
    kept = [reads(int(owner[v]), int(owner[u])) for u, v in zip(*ends.tolist(), strict=True)]
    edges = ends[:, torch.tensor(kept)][:, : 6 * num_nodes]
    return make_world(world_size, num_nodes, edges, owner=owner, replica_chance=0.0, seed=seed)


WORLDS: dict[str, Callable[[int], World]] = {
    "replicas": lambda ranks: random_world(ranks, 11),
    "rows without edges": lambda ranks: random_world(ranks, 12, num_nodes=60, num_edges=70),
    "rank 0 receives nothing": lambda ranks: crossing(ranks, reads=lambda q, p: q != 0 or p == 0),
    "only the last rank receives": lambda ranks: crossing(ranks, reads=lambda q, p: q == p or q == ranks - 1),
    "rank 0 reads none of its rows": lambda ranks: crossing(ranks, reads=lambda q, p: q != 0 or p != 0),
    "the last rank holds nothing": lambda ranks: random_world(ranks, 13, owner=torch.arange(40) % (ranks - 1)),
}


# -------------------------------------------------------------------- operands, and what they give on one process


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Of all ranks, one after the other."""

    x: Tensor
    """(held rows, H, D)."""
    el: Tensor
    """(held rows, H)."""
    er: Tensor
    """(destinations, H), or (destinations, H, D) for gatv2."""
    attention: Tensor
    """(1, H, D)."""
    weights: Tensor
    """(destinations, held rows): of an edge between the two."""
    source_factors: Tensor
    """(held rows,)."""
    row_factors: Tensor
    """(destinations,)."""
    y: Tensor
    """(destinations, H, D): what comes in from behind."""
    w_sum: Tensor
    w_own: Tensor
    """(D, H * D)."""
    bias: Tensor
    """(D,)."""


def operands_of(world: World, op: str) -> Operands:
    num_dst, num_held = world.matrix.shape
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    return Operands(
        x=draw(num_held, HEADS, WIDTH),
        el=draw(num_held, HEADS),
        er=draw(num_dst, HEADS, WIDTH) if op == "gatv2" else draw(num_dst, HEADS),
        attention=draw(1, HEADS, WIDTH),
        weights=draw(num_dst, num_held),
        source_factors=draw(num_held),
        row_factors=draw(num_dst),
        y=draw(num_dst, WIDTH) if op in BESIDE else draw(num_dst, HEADS, WIDTH),
        w_sum=draw(WIDTH, HEADS * WIDTH),
        w_own=draw(WIDTH, HEADS * WIDTH),
        bias=draw(WIDTH),
    )


def inputs_of(op: str, given: Operands, x: Tensor, el: Tensor, er: Tensor) -> list[Tensor]:
    """Args:
    given: Of all ranks.
    x, el, er: Of one rank, or of all.
    """
    chosen = {"gat": [x, el, er], "gatv2": [x, er, given.attention]}.get(op, [x])
    if op in BESIDE:
        chosen = [x.flatten(1), given.w_sum, given.bias, *([given.w_own] if op in OWN else [])]
    return [tensor.clone().requires_grad_() for tensor in chosen]


def dense_layer(world: World, op: str) -> tuple[Tensor, list[Tensor]]:
    """Result and gradients by matrices over all rows: (destinations, sources) entries count multiple edges."""
    given = operands_of(world, op)
    inputs = inputs_of(op, given, given.x, given.el, given.er)
    x = inputs[0]
    if op in ATTENTION:
        if op == "gat":
            logits = torch.nn.functional.leaky_relu(inputs[1][None] + inputs[2][:, None], SLOPE)
        else:
            pairs = torch.nn.functional.leaky_relu(x[None] + inputs[1][:, None], SLOPE)
            logits = (inputs[2][:, None] * pairs).sum(-1)
        terms = world.matrix.unsqueeze(-1) * logits.exp()
        total = terms.sum(1, keepdim=True)
        out = torch.einsum("vuh,uhd->vhd", terms / torch.where(total > 0, total, 1.0), x)
    elif op in BESIDE:
        _, w_sum, bias, *own_weight = inputs
        matrix = world.matrix * given.row_factors[:, None]
        matrix = matrix * given.source_factors if "scaled" in op else matrix
        out = matrix @ x @ w_sum.t() + bias
        if op in OWN:
            own = torch.cat([columns_of(world, rank)[: s.num_dst] for rank, s in enumerate(world.structures)])
            out = out + x[own] @ own_weight[0].t()
        out = out.relu() if "ReLU" in op else out
    else:
        matrix = world.matrix * given.weights if op == "weighted sum" else world.matrix
        if op in SCALED:
            matrix = matrix * (given.source_factors[None] if "sources" in op else given.row_factors[:, None])
        out = torch.einsum("vu,uhd->vhd", matrix, x)
    return out.detach(), list(torch.autograd.grad(out, inputs, given.y))


def columns_of(world: World, rank: int) -> Tensor:
    """(held rows of the rank + received ones,) where each of its sources stands among the held rows of all ranks."""
    structures = world.structures
    begins = [0, *torch.tensor([structure.num_held for structure in structures]).cumsum(0).tolist()]
    held = torch.arange(begins[rank], begins[rank + 1])
    received = [
        begins[owner] + structure.exchange.send_index.split(structure.exchange.send_counts)[rank]
        for owner, structure in enumerate(structures)
    ]
    return torch.cat([held, *received])


def edge_weights(world: World, rank: int, weights: Tensor) -> Tensor:
    """(edges of the rank, 1, 1)."""
    structure = world.structures[rank]
    first = sum(other.num_dst for other in world.structures[:rank])
    dst = first + torch.repeat_interleave(torch.arange(structure.num_dst), structure.indptr.diff())
    return weights[dst, columns_of(world, rank)[structure.indices]].view(-1, 1, 1)


# -------------------------------------------------------------------- one rank


@dataclass
class Watched:
    """What a rank did."""

    result: Tensor = field(default_factory=lambda: torch.empty(0))
    gradients: list[Tensor] = field(default_factory=list)
    held: list[tuple[str, bool]] = field(default_factory=list)
    """Kernels on edges from held rows: of which direction, and whether a message was under way all the while."""
    used: list[tuple[str, bool]] = field(default_factory=list)
    """Likewise those that aggregate received rows, in the forward."""
    products: list[tuple[str, bool]] = field(default_factory=list)
    """Likewise products of rows and weights."""
    messages: list[tuple[str, int, int]] = field(default_factory=list)
    """Direction, rows sent and rows received."""


class Watch:
    """Notes kernels and messages of one layer while it is entered."""

    def __init__(self, communicator: Communicator, split: SplitBlock, *, delay_s: float = 0.0) -> None:
        self.seen, self.direction, self._delay_s = Watched(), "forward", delay_s
        self._communicator, self._num_under_way = communicator, 0
        layer = split.plain_sums.layer
        self._held = {layer.held.in_edges.indptr.data_ptr(), layer.held.out_edges.indptr.data_ptr()}
        self._parts = {part.edges.in_edges.indptr.data_ptr() for part in split.trained_sums.layer.parts}
        self._parts |= {part.edges.in_edges.indptr.data_ptr() for part in layer.parts}

    @contextlib.contextmanager
    def on(self) -> Iterator[Watched]:
        backend, transport = type(choose_backend(torch.empty(0, dtype=torch.float64))), self._communicator.transport
        kernels = {name: getattr(backend, name) for name in KERNELS}
        products = {name: getattr(backend, name) for name in PRODUCTS}
        starts = {name: getattr(transport, name) for name in ("start_all_to_all", "start_borrowing")}
        try:
            for name, kernel in kernels.items():
                setattr(backend, name, self._kernel(kernel, place_of_rows=2 if name == "add_sums" else 0))
            for name, kernel in products.items():
                setattr(backend, name, self._product(kernel))
            for name, start in starts.items():
                setattr(transport, name, self._message(start, has_place=name == "start_all_to_all"))
            yield self.seen
        finally:
            for name, kernel in (kernels | products).items():
                setattr(backend, name, kernel)
            for name in starts:
                transport.__dict__.pop(name)

    def _kernel(self, kernel: Callable[..., Any], *, place_of_rows: int) -> Callable[..., Any]:
        def noted(backend: Any, *args: Any, **kwargs: Any) -> Any:
            rows = args[place_of_rows]
            before = self._num_under_way
            if rows.indptr.data_ptr() in self._parts:
                time.sleep(self._delay_s)
            result = kernel(backend, *args, **kwargs)
            entry = self.direction, before == self._num_under_way == 1
            if rows.indptr.data_ptr() in self._held:
                self.seen.held.append(entry)
            elif rows.indptr.data_ptr() in self._parts and self.direction == "forward":
                self.seen.used.append(entry)
            return result

        return noted

    def _product(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def noted(backend: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen.products.append((self.direction, self._num_under_way == 1))
            return kernel(backend, *args, **kwargs)

        return noted

    def _message(self, start: Callable[..., Any], *, has_place: bool) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Callable[[], Any]:
            recv_counts, send_counts = args[2:4] if has_place else args[1:3]
            self.seen.messages.append((self.direction, sum(send_counts), sum(recv_counts)))
            finish = start(*args, **kwargs)
            self._num_under_way += 1

            def finish_noted() -> Any:
                self._num_under_way -= 1
                return finish()

            return finish_noted

        return noted


def run_layer(
    rank: int,
    world_size: int,
    name: str,
    op: str,
    transport: RankTransport,
    chunk_rows: int | None,
    delay_s: float = 0.0,
) -> Watched:
    world = WORLDS[name](world_size)
    structure = world.structures[rank]
    communicator = create_communicator(transport=transport)
    plan = structure.exchange
    messages = [whole_message(plan)] if chunk_rows is None else ring_messages(plan, communicator, chunk_rows)
    split = SplitBlock(structure, communicator, messages, device=torch.device("cpu"), partial_sums="partial" in op)
    given = operands_of(world, op)
    x, el = (rows.split([s.num_held for s in world.structures])[rank] for rows in (given.x, given.el))
    er, y = (rows.split([s.num_dst for s in world.structures])[rank] for rows in (given.er, given.y))
    of_sums = Scale(given.row_factors.split([s.num_dst for s in world.structures])[rank], of_sources=False)
    of_sources = Scale(given.source_factors.split([s.num_held for s in world.structures])[rank], of_sources=True)
    scale = of_sources if "sources" in op else of_sums
    inputs = inputs_of(op, given, x, el, er)
    weights = edge_weights(world, rank, given.weights)
    of_sum, of_own = nn.Linear(1, 1, bias=False), nn.Linear(1, 1)
    if op in OWN:
        of_sum.weight, of_own.bias, of_own.weight = parameters = [nn.Parameter(tensor) for tensor in inputs[1:]]
        inputs[1:] = parameters

    def forward() -> Tensor:
        if op == "gat":
            return split.attention.gat(*inputs, negative_slope=SLOPE, dropout=None)
        if op == "gatv2":
            return split.attention.gatv2(*inputs, negative_slope=SLOPE, dropout=None)
        sums, num_own = split.sums(is_trained=True), structure.num_dst
        if op in BESIDE and op not in OWN:
            scaled, (rows, weight, bias) = of_sources if "scaled" in op else None, inputs
            factors, relu = of_sums.factors.unsqueeze(1), "ReLU" in op
            return ProductsBeside(sums, scaled).product(rows, weight.t(), bias, factors=factors, relu=relu)
        if op in BESIDE:
            if "product" not in op:
                return ProductsBeside(sums, scale).own_and_sum(inputs[0], of_sum, of_own, num_own)
            layer, relu = ProductsBeside(sums, scale), "ReLU" in op
            return layer.own_and_product(inputs[0], of_sum, of_own, num_own, relu=relu)
        if op == "weighted sum":
            return split.plain_sums(inputs[0], weights)
        return split.sum(inputs[0], scale if op in SCALED else None)

    watch = Watch(communicator, split, delay_s=delay_s if rank == 0 else 0.0)
    with watch.on() as seen:
        out = forward()
        watch.direction = "backward"
        seen.gradients = list(torch.autograd.grad(out, inputs, y))
    seen.result = out.detach()
    return seen


def check_exact(world: World, op: str, seen: list[Watched]) -> None:
    result, gradients = dense_layer(world, op)
    torch.testing.assert_close(torch.cat([one.result for one in seen]), result, rtol=0, atol=1e-11)
    for position, expected in enumerate(gradients):
        parts = [one.gradients[position] for one in seen]
        is_shared = (op == "gatv2" and position == 2) or (op in BESIDE and position > 0)
        torch.testing.assert_close(sum(parts) if is_shared else torch.cat(parts), expected, rtol=0, atol=1e-11)


# -------------------------------------------------------------------- the tests


@pairwise(op=list(OPS), transport=["collective", "shared_memory"], chunk_rows=[None, 3], world_size=[2, 3, 4])
def test_held_rows_are_worked_on_while_a_message_travels(
    op: str, transport: RankTransport, chunk_rows: int | None, world_size: int
) -> None:
    world = WORLDS["replicas"](world_size)
    seen = run_ranks(world_size, run_layer, "replicas", op, transport, chunk_rows)
    check_exact(world, op, seen)
    for one in seen:
        assert one.held == [("forward", True), ("backward", True)]
        # A message's rows are used while the next one travels; after the last there is none.
        num_messages = sum(direction == "forward" for direction, *_ in one.messages)
        assert one.used == [("forward", True)] * (num_messages - 1) + [("forward", False)]
        assert (num_messages == 1) == (chunk_rows is None)
        if op not in BESIDE:
            continue
        # Own rows need nobody, nor do gradients of what was summed: beside the first message.
        assert one.products == (
            [("forward", False), ("forward", True), ("backward", True), ("backward", False)]
            if "product" not in op
            else [("forward", True), ("forward", False), ("backward", False), *[("backward", True)] * 2]
            if op in OWN
            else [("forward", False), ("backward", False), ("backward", True)]
        )


@pairwise(
    op=list(OPS),
    name=[name for name in WORLDS if name != "replicas"],
    chunk_rows=[None, 4],
    world_size=[3, 4],
)
def test_corners_are_exact(op: str, name: str, chunk_rows: int | None, world_size: int) -> None:
    seen = run_ranks(world_size, run_layer, name, op, "auto", chunk_rows)
    check_exact(WORLDS[name](world_size), op, seen)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["rank 0 receives nothing", "rank 0 reads none of its rows"])
def test_corners_of_two_ranks_are_exact(op: str, name: str) -> None:
    """Rows of one other rank are read where they lie."""
    check_exact(WORLDS[name](2), op, run_ranks(2, run_layer, name, op, "shared_memory", None))


def test_the_corners_are_what_they_are_called() -> None:
    for world_size in (3, 4):
        worlds = {name: make(world_size).structures for name, make in WORLDS.items()}
        received = {name: [s.exchange.num_received for s in structures] for name, structures in worlds.items()}
        assert received["rank 0 receives nothing"][0] == 0 < min(received["rank 0 receives nothing"][1:])
        assert max(received["only the last rank receives"][:-1]) == 0 < received["only the last rank receives"][-1]
        first = worlds["rank 0 reads none of its rows"][0]
        assert bool((first.indices >= first.num_held).all())
        assert first.num_held > 0 < len(first.indices)
        assert (worlds["the last rank holds nothing"][-1].num_held, received["the last rank holds nothing"][-1]) == (
            0,
            0,
        )
        assert any(bool((s.indptr.diff() == 0).any()) for s in worlds["rows without edges"])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("chunk_rows", [1, 6])
def test_no_message_is_longer_than_a_chunk(op: str, chunk_rows: int) -> None:
    world = WORLDS["replicas"](3)
    for rank, one in enumerate(run_ranks(3, run_layer, "replicas", op, "auto", chunk_rows)):
        plan = world.structures[rank].exchange
        for direction, num_sent, num_received in one.messages:
            assert max(num_sent, num_received) <= chunk_rows, direction
        times = {"forward": 1, "backward": 2 if op in ATTENTION else 1}
        for direction, often in times.items():
            sent, received = zip(*((s, r) for way, s, r in one.messages if way == direction), strict=True)
            both = plan.num_sent + plan.num_received
            assert sum(sent) + sum(received) == often * both, direction


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("chunk_rows", [None, 5])
def test_rows_stay_until_a_slow_rank_has_used_them(op: str, chunk_rows: int | None) -> None:
    """Rank 0 takes its time over what it received; the other one is then further on, and packs its next messages."""
    seen = run_ranks(2, run_layer, "replicas", op, "shared_memory", chunk_rows, delay_s=0.02)
    check_exact(WORLDS["replicas"](2), op, seen)


def run_narrowed(rank: int, world_size: int, codec: str, dtype: torch.dtype, sums: bool) -> list[Tensor]:
    """Result and gradient of a sum whose rows and gradients travel narrower; the same exactly."""
    structure = random_world(world_size, 11).structures[rank]
    messages = [whole_message(structure.exchange)]
    communicator, generator = create_communicator(), torch.Generator().manual_seed(rank)
    # Positive, so that no error cancels another's bound: it is a share of each element.
    x = torch.rand(structure.num_held, 8, dtype=dtype, generator=generator) + 1
    y = torch.rand(structure.num_dst, 8, dtype=dtype, generator=generator) + 1
    results = []
    for chosen in (make_codec(codec), None):
        split = SplitBlock(
            structure, communicator, messages, device=torch.device("cpu"), partial_sums=sums, codec=chosen
        )
        rows = x.clone().requires_grad_()
        out = split.sum(rows)
        (gradient,) = torch.autograd.grad(out, rows, y)
        with torch.no_grad():
            evaluated = split.sum(rows)
        results += [out.detach(), gradient, evaluated]
    return results


@pairwise(codec=["bf16", "int8"], dtype=[torch.float32, torch.float64], sums=[False, True])
def test_narrower_rows_change_sums_a_little_and_evaluations_not(codec: str, dtype: torch.dtype, sums: bool) -> None:
    # A sum of k rows has elements between k and 2 k: no step of int8 is larger than 1.02 / 250 of any of them.
    share = 2.0**-8 if codec == "bf16" else 1 / 240
    for out, gradient, evaluated, *exact in run_ranks(3, run_narrowed, codec, dtype, sums):
        for found, expected in zip((out, gradient), exact[:2], strict=True):
            assert found.dtype == dtype
            assert float((found - expected).abs().max()) > 0
            assert bool(((found - expected).abs() <= share * expected).all())
        torch.testing.assert_close(evaluated, exact[2])


# -------------------------------------------------------------------- memory


NUM_READERS, NUM_SOURCES, WIDE = 2, 100, 64


class LiveBytes(TorchDispatchMode):
    """Adds up the tensors that operators returned and that somebody still holds."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, storage: int, num_bytes: int) -> None:
        self._known.discard(storage)
        self.live -= num_bytes


def star(world_size: int) -> World:
    """Rank 0's two nodes read all of the others' 100 each; those read each other and rank 0's."""
    others = NUM_READERS + torch.arange((world_size - 1) * NUM_SOURCES)
    readers = torch.arange(NUM_READERS)
    src = torch.cat([others.repeat(NUM_READERS), others.roll(1), readers])
    dst = torch.cat([readers.repeat_interleave(len(others)), others, others[:NUM_READERS]])
    owner = torch.cat([torch.zeros_like(readers), 1 + torch.arange(len(others)) // NUM_SOURCES])
    return make_world(world_size, len(owner), torch.stack([src, dst]), owner=owner, replica_chance=0.0, dst_share=1.0)


def peaks_of(rank: int, world_size: int, op: str, chunk_rows: int) -> list[dict[str, float]]:
    return [peak_rows(star(world_size).structures[rank], op, rows) for rows in (chunk_rows, None)]


def peak_rows(structure: LayerStructure, op: str, chunk_rows: int | None) -> dict[str, float]:
    """Rows' worth of memory that is in use at once: training, and evaluating."""
    communicator, plan = create_communicator(transport="collective"), structure.exchange
    messages = [whole_message(plan)] if chunk_rows is None else ring_messages(plan, communicator, chunk_rows)
    split = SplitBlock(structure, communicator, messages, device=torch.device("cpu"))

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.float64)

    x = ones(structure.num_held, 1, WIDE).requires_grad_()
    el, er = ones(structure.num_held, 1), ones(structure.num_dst, 1)
    attention, weights = ones(1, 1, WIDE), ones(len(structure.indices), 1, 1)
    run: dict[str, Callable[[], Tensor]] = {
        "sum": lambda: split.sum(x),
        "weighted sum": lambda: split.plain_sums(x, weights),
        "gat": lambda: split.attention.gat(x, el, er, negative_slope=SLOPE, dropout=None),
        "gatv2": lambda: split.attention.gatv2(
            x, x[: structure.num_dst], attention, negative_slope=SLOPE, dropout=None
        ),
    }
    found = {}
    # A pool's own memory comes past the dispatcher; the system's is seen.
    before, buffers.SMALLEST_BYTES = buffers.SMALLEST_BYTES, 1 << 60
    try:
        for mode in ("structure", "training", "evaluating"):
            with torch.set_grad_enabled(mode != "evaluating"), LiveBytes() as memory:
                out = run[op]()
                if mode != "evaluating":
                    out.backward(torch.ones_like(out))
                x.grad = None
            found[mode] = memory.peak / (x.element_size() * WIDE)
    finally:
        buffers.SMALLEST_BYTES = before
    return found


@pairwise(op=["sum", "weighted sum", "gat", "gatv2"], chunk_rows=[2, 6], world_size=[2, 3])
def test_no_more_than_a_few_chunks_are_held(op: str, chunk_rows: int, world_size: int) -> None:
    """What the planner reckons with for a chunk, and some copies of the two rows that are this rank's own."""
    bound = CHUNK_COPIES * chunk_rows + 16 * NUM_READERS
    num_received = NUM_SOURCES * (world_size - 1)
    assert bound < num_received, "this test shows nothing: all that is received would do"
    chunked, whole = run_ranks(world_size, peaks_of, op, chunk_rows)[0]
    for mode in ("training", "evaluating"):
        assert chunked[mode] < bound
        assert whole[mode] > num_received, "what is received was not seen"


def test_no_call_adds_several_gradients_to_one_row() -> None:
    """A GPU adds those in no fixed order, so that two runs would differ in their last bits."""
    send_index, send_counts = torch.tensor([0, 2, 0, 1, 2]), (2, 0, 3)
    part = SimpleNamespace(send_index=send_index, send_counts=send_counts)
    backend, added = choose_backend(torch.empty(0, dtype=torch.float64)), list[list[int]]()

    def add_rows(out: Tensor, targets: Tensor, *rest: Any) -> None:
        added.append(targets.tolist())
        backend.add_rows(out, targets, *rest)

    grads, total = torch.rand(5, 3, dtype=torch.float64), torch.rand(3, 3, dtype=torch.float64)
    expected = total.index_add(0, send_index, grads)
    with mock.patch.object(split_exchange, "choose_backend", return_value=SimpleNamespace(add_rows=add_rows)):
        exchange: Any = SimpleNamespace(layer=SimpleNamespace(parts=(part,)))
        split_exchange.SplitExchange._add_returned(exchange, 0, grads.split(send_counts), (total,))
    assert torch.equal(total, expected)
    assert added == [[0, 2], [0, 1, 2]]
