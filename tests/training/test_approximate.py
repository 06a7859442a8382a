# SPDX-License-Identifier: Apache-2.0
"""Approximate exchanges: what is approximated and how much, what stays exact, and that ranks agree about it."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from typing import Any

import dgl
import dgl.nn as dglnn
import pytest
import torch
import torch.distributed as dist
from dgl import function as fn
from torch import Tensor

import dgl_hybrid
from dgl_hybrid import FullGraphLoader, PartitionedGraph
from dgl_hybrid.cli.tables import print_training
from dgl_hybrid.datasets.powerlaw import PowerLawConfig, generate_powerlaw
from dgl_hybrid.errors import BlockError
from dgl_hybrid.exchange.approximate import APPROXIMATIONS, MAX_KEPT, ApproximateRows, Approximation
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.connect import RankTransport, create_communicator
from dgl_hybrid.exchange.row_codecs import CODECS
from dgl_hybrid.exchange.rows import extend_rows
from dgl_hybrid.training.config import ModelConfig, StrategyConfig, TrainConfig, TrainJob
from dgl_hybrid.training.report import TrainReport
from dgl_hybrid.training.row_mode import RowMode
from dgl_hybrid.training.step import Step
from dgl_hybrid.training.trainer import train
from tests.exchange.test_rows import NUM_ROWS, make_plans
from tests.helpers.exactness import Case
from tests.helpers.graphs import hand_drawn, power_law
from tests.helpers.partitions import PartitionStore
from tests.helpers.rates import assumed_rates
from tests.helpers.world import run_ranks, run_ranks_expect_errors

# -------------------------------------------------------------------- the exchange alone


def epochs_of(
    rank: int,
    world_size: int,
    name: str,
    widths: list[list[int]],
    dtype: torch.dtype,
    transport: RankTransport = "auto",
) -> list[list[tuple[Tensor, Tensor, Tensor, Tensor]]]:
    """Runs epochs of one exchange; returns what went in and came out, forward and backward, by epoch and field."""
    communicator, plan = create_communicator(transport=transport), make_plans(world_size)[rank]
    rows = ApproximateRows(Approximation.of(name))
    generator = torch.Generator().manual_seed(rank)
    results = []
    for fields in widths:
        rows.begin_epoch()
        xs = [torch.randn(NUM_ROWS, w, generator=generator, dtype=dtype).requires_grad_() for w in fields]
        outs = extend_rows(list(xs), plan, communicator, approximation=rows)
        ys = [torch.randn(out.shape, generator=generator, dtype=dtype) for out in outs]
        grads = torch.autograd.grad(outs, xs, ys)
        # Rows that are used in the next epoch only are still on their way; anything else waits for them.
        under_way = communicator._left is not None
        assert under_way == ("stale" in name and fields in widths[: len(results)])
        results.append([(x.detach(), out.detach(), y, g) for x, out, y, g in zip(xs, outs, ys, grads, strict=True)])
    communicator.barrier()
    assert communicator._left is None
    assert len(communicator.clock.drain()) == 2 * len(widths)
    return results


def received_exactly(world_size: int, rank: int, by_rank: list[Tensor]) -> Tensor:
    """(R, F): the rows of others that a rank receives, straight from their tensors."""
    plans = make_plans(world_size)
    return torch.cat(
        [by_rank[peer][plans[peer].send_index.split(plans[peer].send_counts)[rank]] for peer in range(world_size)]
    )


def come_home_exactly(world_size: int, rank: int, by_rank: list[Tensor]) -> Tensor:
    """(C, F): the gradients that others have for the rows of a rank, added up."""
    plans = make_plans(world_size)
    total = torch.zeros(NUM_ROWS, by_rank[0].shape[1], dtype=by_rank[0].dtype)
    for peer in range(world_size):
        tail = by_rank[peer][NUM_ROWS:].split(plans[peer].recv_counts)[rank]
        total.index_add_(0, plans[rank].send_index.split(plans[rank].send_counts)[peer], tail)
    return total


@pytest.mark.parametrize(
    ("world_size", "transport"), [(1, "auto"), (2, "collective"), (3, "collective"), (2, "shared_memory"), (3, "auto")]
)
def test_stale_rows_and_gradients_are_those_of_the_epoch_before(world_size: int, transport: RankTransport) -> None:
    """Exactly; the first epoch is synchronous, and so is the first one with rows of another shape."""
    ranks = range(world_size)
    results = run_ranks(world_size, epochs_of, "stale", [[5], [5], [5], [3], [3]], torch.float64, transport)
    for epoch, used in enumerate((0, 0, 1, 3, 3)):
        for rank in range(world_size):
            ((x, out, y, grad),) = results[rank][epoch]
            assert torch.equal(out[:NUM_ROWS], x)
            received = received_exactly(world_size, rank, [results[peer][used][0][0] for peer in ranks])
            assert torch.equal(out[NUM_ROWS:], received)
            home = come_home_exactly(world_size, rank, [results[peer][used][0][2] for peer in ranks])
            torch.testing.assert_close(grad, y[:NUM_ROWS] + home, rtol=1e-14, atol=1e-14)


def epochs_of_two_losses(rank: int, world_size: int) -> tuple[list[list[tuple[Tensor, Tensor]]], set[int]]:
    """Returns of each epoch what both losses give and get, and whose gradients are kept after one with one loss."""
    communicator, plan = create_communicator(), make_plans(world_size)[rank]
    rows, generator = ApproximateRows(Approximation.of("stale")), torch.Generator().manual_seed(rank)
    x = torch.randn(NUM_ROWS, 4, generator=generator, dtype=torch.float64).requires_grad_()
    results = []
    for _ in range(3):
        rows.begin_epoch()
        (out,) = extend_rows([x], plan, communicator, approximation=rows)
        epoch = []
        for _ in range(2):
            y = torch.randn(out.shape, generator=generator, dtype=torch.float64)
            (grad,) = torch.autograd.grad(out, x, y, retain_graph=True)
            epoch.append((y, grad))
        results.append(epoch)
    rows.begin_epoch()
    (out,) = extend_rows([x], plan, communicator, approximation=rows)
    torch.autograd.grad(out, x, torch.ones_like(out))
    rows.begin_epoch()
    communicator.barrier()
    return results, {nth for _, nth in rows._received}


def test_each_of_two_losses_gets_its_own_stale_gradients() -> None:
    world_size = 3
    found = run_ranks(world_size, epochs_of_two_losses)
    assert [kept for _, kept in found] == [{0, 1}] * world_size
    results = [epochs for epochs, _ in found]
    for epoch, used in enumerate((0, 0, 1)):
        for loss in range(2):
            for rank in range(world_size):
                y, grad = results[rank][epoch][loss]
                home = come_home_exactly(world_size, rank, [results[peer][used][loss][0] for peer in range(world_size)])
                torch.testing.assert_close(grad, y[:NUM_ROWS] + home, rtol=1e-14, atol=1e-14)


def exchange_often(
    rank: int, world_size: int, num_backwards: int
) -> tuple[list[tuple[Tensor, Tensor, Tensor]], int, list[str]]:
    """Returns what goes in and comes out of two epochs of many exchanges, how many are kept, and what was said."""
    communicator, plan = create_communicator(), make_plans(world_size)[rank]
    layers = [ApproximateRows(Approximation.of("stale")) for _ in range(2)]
    generator, results = torch.Generator().manual_seed(rank), []
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(ApproximateRows.__module__)
    logger.addHandler(handler)
    try:
        for _ in range(2):
            for rows in layers:
                rows.begin_epoch()
            for _ in range(100 // num_backwards):
                for rows in layers:
                    x = torch.randn(NUM_ROWS, 4, generator=generator, dtype=torch.float64).requires_grad_()
                    (out,) = extend_rows([x], plan, communicator, approximation=rows)
                    for _ in range(num_backwards):
                        (grad,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
                results.append((x.detach(), out.detach(), grad))
        communicator.barrier()
    finally:
        logger.removeHandler(handler)
    return results, max(len(rows._received) + len(rows._num_backwards) for rows in layers), said


@pytest.mark.parametrize("num_backwards", [1, 50])
def test_an_epoch_that_goes_on_for_ever_keeps_few_rows(num_backwards: int) -> None:
    """Of a batch that a script keeps and trains on: each exchange kept its rows for an epoch that never came."""
    world_size = 3
    found = run_ranks(world_size, exchange_often, num_backwards)
    results, num_kept, said = zip(*found, strict=True)
    assert max(num_kept) <= 2 * MAX_KEPT
    assert len(said[0]) == 1
    assert f"keeps {MAX_KEPT} exchanges of an epoch" in said[0][0]
    assert "iterate the loader in every epoch" in said[0][0]
    assert not any(said[1:])
    num_uses = len(results[0]) // 2
    for use in range(2 * num_uses):
        is_kept = use % num_uses < MAX_KEPT // (1 + num_backwards) + (num_backwards > 1)
        used = use - num_uses if use >= num_uses and is_kept else use
        for rank in range(world_size):
            expected = received_exactly(world_size, rank, [of_rank[used][0] for of_rank in results])
            assert torch.equal(results[rank][use][1][NUM_ROWS:], expected), (use, rank)


@pytest.mark.parametrize("name", ["bf16", "int8", "stale+bf16", "stale+int8"])
def test_narrower_rows_are_near_and_narrow_fields_exact(name: str) -> None:
    world_size, stale = 3, name.startswith("stale")
    ranks = range(world_size)
    results = run_ranks(world_size, epochs_of, name, [[2, 8, 5]] * 3, torch.float32)
    share = 2.0**-8 if name.endswith("bf16") else 1 / 100  # of the row's range of at most 8 normal deviates
    for epoch in range(3):
        used = max(0, epoch - 1) if stale else epoch
        for rank in range(world_size):
            for field, (x, out, y, grad) in enumerate(results[rank][epoch]):
                received = received_exactly(world_size, rank, [results[peer][used][field][0] for peer in ranks])
                home = come_home_exactly(world_size, rank, [results[peer][used][field][2] for peer in ranks])
                assert torch.equal(out[:NUM_ROWS], x)
                if field:
                    assert 0 < float((out[NUM_ROWS:] - received).abs().max()) < 8 * share
                    assert 0 < float((grad - y[:NUM_ROWS] - home).abs().max()) < 2 * 8 * share
                else:
                    assert torch.equal(out[NUM_ROWS:], received)
                    torch.testing.assert_close(grad, y[:NUM_ROWS] + home)


def without_gradients(rank: int, world_size: int, name: str) -> bool:
    """Exact in every bit, and what is kept for the next epoch stays as it was."""
    communicator, plan = create_communicator(), make_plans(world_size)[rank]
    rows, generator = ApproximateRows(Approximation.of(name)), torch.Generator().manual_seed(rank)
    x, ids = torch.randn(NUM_ROWS, 8, generator=generator).requires_grad_(), torch.arange(NUM_ROWS) + 10**6 * rank
    first = extend_rows([x], plan, communicator, approximation=rows)[0].detach()
    kept = dict(rows._received)
    with torch.no_grad():
        evaluated = extend_rows([2 * x, ids, x], plan, communicator, approximation=rows)
    constant = extend_rows([ids + 1], plan, communicator, approximation=rows)
    same = kept.keys() == rows._received.keys() and all(kept[key] is rows._received[key] for key in kept)
    rows.begin_epoch()
    again = extend_rows([5 * x], plan, communicator, approximation=rows)[0].detach()
    expected = [extend_rows([field], plan, communicator)[0] for field in (2 * x, ids, x, ids + 1)]
    if "stale" in name:
        same &= torch.equal(again[NUM_ROWS:], first[NUM_ROWS:]) and len(kept) == 1
    return same and all(torch.equal(a, b) for a, b in zip([*evaluated, *constant], expected, strict=True))


@pytest.mark.parametrize("name", ["int8", "stale", "stale+bf16"])
def test_what_needs_no_gradient_is_exact_and_disturbs_nothing(name: str) -> None:
    assert all(run_ranks(3, without_gradients, name))


def differentiate_twice(rank: int, world_size: int) -> None:
    communicator, plan = create_communicator(), make_plans(world_size)[rank]
    x = torch.ones(NUM_ROWS, 8).requires_grad_()
    out = extend_rows([x], plan, communicator, approximation=ApproximateRows(Approximation.of("int8")))[0]
    (grad,) = torch.autograd.grad((out**2).sum(), x, create_graph=True)
    grad.sum().backward()


def test_approximate_derivatives_are_not_differentiated_again() -> None:
    for error in run_ranks_expect_errors(2, differentiate_twice):
        assert "once_differentiable" in error.message


# -------------------------------------------------------------------- a linear model, by hand


LEARNING_RATE = 1e-4


def train_linear(rank: int, world_size: int, part_config: str, name: str | None) -> dict[str, Any]:
    """y = A x W by `GraphConv`, loss = mean of y²: xW travels, and a gradient that changes comes home."""
    g = PartitionedGraph.open(part_config)
    loader = FullGraphLoader(g, g.owned_nodes(), 1, plan=[torch.empty(0, dtype=torch.int64)], approximate=name)
    layer = dglnn.GraphConv(2, 1, norm="none", bias=False, allow_zero_in_degree=True).double()
    torch.nn.init.ones_(layer.weight)
    weights, evaluated = [layer.weight.detach().clone()], []
    for epoch in range(5):
        for input_nodes, _, (block,) in loader:
            layer.zero_grad()
            (layer(block, g.ndata["feat"][input_nodes]) ** 2).mean().backward()
            assert layer.weight.grad is not None
            gradient = layer.weight.grad / world_size
            dist.all_reduce(gradient)
            with torch.no_grad():
                layer.weight -= LEARNING_RATE * gradient
        weights.append(layer.weight.detach().clone())
        if epoch % 2:
            with torch.no_grad():
                for input_nodes, _, (block,) in loader:
                    evaluated.append(layer(block, g.ndata["feat"][input_nodes]))
    seeds = g.partition.orig_node_ids[loader.seeds - g.nodes.start]
    return {"weights": weights, "evaluated": evaluated, "seeds": seeds, "nodes": g.partition.orig_node_ids}


def linear_by_hand(parts: list[Tensor], *, is_stale: bool) -> list[Tensor]:
    """The same on dense matrices: weights after every epoch."""
    graph = hand_drawn()
    n, x = graph.num_nodes(), graph.ndata["feat"]
    a_held, a_received = torch.zeros(n, n, dtype=torch.float64), torch.zeros(n, n, dtype=torch.float64)
    part = {int(node): number for number, nodes in enumerate(parts) for node in nodes}
    for u, v in zip(*(ends.tolist() for ends in graph.edges()), strict=True):
        (a_held if part[u] == part[v] else a_received)[v, u] += 1
    weight = torch.ones(2, 1, dtype=torch.float64)
    weights, sent, returned = [weight], None, None
    for _ in range(5):
        h = x @ weight
        used = h if sent is None or not is_stale else sent
        y = a_held @ h + a_received @ used
        dy = 2 * y / n
        home = a_received.T @ dy
        dh = a_held.T @ dy + (home if returned is None or not is_stale else returned)
        sent, returned = h, home
        weight = weight - LEARNING_RATE * (x.T @ dh)
        weights.append(weight)
    return weights


@pytest.mark.parametrize("name", [None, "stale"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_linear_model_trains_as_on_paper(world_size: int, name: str | None, partitions: PartitionStore) -> None:
    """Weights of every epoch, with exact evaluations in between that change nothing."""
    graph = hand_drawn()
    results = run_ranks(world_size, train_linear, partitions.get("hand_drawn", graph, world_size), name)
    parts = [result["nodes"] for result in results]
    expected = linear_by_hand(parts, is_stale=name == "stale")
    for result in results:
        torch.testing.assert_close(result["weights"], expected, rtol=1e-12, atol=1e-12)
        for position, epoch in enumerate((1, 3)):
            sums = torch.zeros(graph.num_nodes(), 1, dtype=torch.float64)
            src, dst = graph.edges()
            sums.index_add_(0, dst, (graph.ndata["feat"] @ expected[epoch + 1])[src])
            torch.testing.assert_close(result["evaluated"][position], sums[result["seeds"]], rtol=1e-12, atol=1e-12)
    if world_size > 1:
        exact = linear_by_hand(parts, is_stale=False)
        assert float((exact[-1] - linear_by_hand(parts, is_stale=True)[-1]).abs().max()) > 1e-6


def sums_by_adjacency(parts: list[Tensor], held: Tensor, received: Tensor) -> Tensor:
    """Sums over in-edges, of one field where the source is held and of another where it is received."""
    graph = power_law()
    src, dst = graph.edges()
    part = torch.empty(graph.num_nodes(), dtype=torch.int64)
    for number, nodes in enumerate(parts):
        part[nodes] = number
    crosses = (part[src] != part[dst])[:, None]
    return torch.zeros_like(held).index_add_(0, dst, torch.where(crosses, received[src], held[src]))


def sum_two_fields(rank: int, world_size: int, part_config: str) -> dict[str, Any]:
    """A prefetched field is summed, then another one of its shape that is new in every epoch."""
    g = PartitionedGraph.open(part_config)
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(1, prefetch_node_feats=["feat"])
    nothing = [torch.empty(0, dtype=torch.int64)]
    loader = FullGraphLoader(g, g.owned_nodes(), sampler, plan=nothing, approximate="stale", keep_static=False)
    sums = []
    for epoch in range(4):
        for _, _, (block,) in loader:
            x = block.srcdata["feat"]
            block.update_all(fn.copy_u("feat", "m"), fn.sum("m", "of_feat"))
            with block.local_scope():
                block.srcdata["h"] = torch.sin(x + epoch).requires_grad_()
                block.update_all(fn.copy_u("h", "m"), fn.sum("m", "of_h"))
                sums.append((block.dstdata["of_feat"], block.dstdata["of_h"].detach()))
    nodes = g.partition.orig_node_ids
    return {"sums": sums, "seeds": nodes[loader.seeds - g.nodes.start], "nodes": nodes}


@pytest.mark.parametrize("world_size", [2, 3])
def test_no_field_gets_the_rows_of_another(world_size: int, partitions: PartitionStore) -> None:
    """Rows are kept by their place among a layer's exchanges. Those of a field that lay in the block stayed, so that
    from the second epoch on it did not travel, and the next field took its place and its rows."""
    x = power_law().ndata["feat"]
    results = run_ranks(world_size, sum_two_fields, partitions.get("power_law", power_law(), world_size))
    parts = [result["nodes"] for result in results]
    for epoch in range(4):
        of_feat = sums_by_adjacency(parts, x, x)
        of_h = sums_by_adjacency(parts, torch.sin(x + epoch), torch.sin(x + max(0, epoch - 1)))
        for result in results:
            found = result["sums"][epoch]
            torch.testing.assert_close(found[0], of_feat[result["seeds"]], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(found[1], of_h[result["seeds"]], rtol=1e-12, atol=1e-12)


# -------------------------------------------------------------------- training


NUM_EPOCHS = 15


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    graph = generate_powerlaw(PowerLawConfig(nodes=300, degree=6.0, features=12, classes=4)).graph
    root = tmp_path_factory.mktemp("approximate")
    for num_parts in (1, 2, 3):
        dgl_hybrid.partition_graph(graph, "g", num_parts, root / str(num_parts))
    return {num_parts: str(root / str(num_parts) / "g.json") for num_parts in (1, 2, 3)}


def make_job(part_config: str, name: str | None, **options: Any) -> TrainJob:
    return TrainJob(
        part_config=part_config,
        dataset="g",
        num_classes=4,
        model=ModelConfig(model=options.pop("model", "gcn"), num_layers=2, hidden=16, heads=2, dropout=0.0),
        strategy=StrategyConfig(strategy=options.pop("strategy", "depcomm")),
        training=TrainConfig(epochs=NUM_EPOCHS, eval_every=options.pop("eval_every", 0), approximate=name),
    )


def run_jobs(rank: int, world_size: int, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    with assumed_rates(world_size):
        return [train(TrainJob.from_json(job)).to_json() for job in jobs]


def reports_of(world_size: int, jobs: list[TrainJob]) -> list[TrainReport]:
    records = run_ranks(world_size, run_jobs, [job.to_json() for job in jobs])
    for other in records[1:]:
        assert [r["epochs"] for r in other] == [r["epochs"] for r in records[0]]
    return [TrainReport.from_json(record) for record in records[0]]


@pytest.mark.parametrize(
    ("world_size", "model", "names"),
    [
        pytest.param(2, "gat", ["int8", "stale+bf16"], marks=pytest.mark.slow),
        (3, "gcn", list(APPROXIMATIONS)),
    ],
)
def test_training_converges_with_fewer_bytes(
    world_size: int, model: str, names: list[str], folders: dict[int, str]
) -> None:
    exact, *others = reports_of(
        world_size, [make_job(folders[world_size], name, model=model) for name in (None, *names)]
    )
    fallen = exact.epochs[0].loss - exact.epochs[-1].loss
    for name, report in zip(names, others, strict=True):
        assert report.approximate == name
        # Stale rows take some epochs longer; that they learn as well is for benchmarks/approximate to show.
        share = 0.02 if "stale" not in name else 0.2 if model == "gcn" else 0.7
        assert 1e-7 < abs(report.epochs[-1].loss - exact.epochs[-1].loss) < share * fallen
        assert (report.epochs[-1].bytes_sent < exact.epochs[-1].bytes_sent) == (name != "stale")
    if model == "gcn":
        # The last layer maps 16 to 4 before it sums: 4 floats travel, as 8 bytes with either codec.
        full = 16 * exact.layers[1].communicated
        sent = [report.layers[1].forward_bytes for report in (exact, *others)]
        assert sent == [full, full // 2, full // 2, full, full // 2, full // 2]


def test_caching_exchanges_nothing_and_so_is_exact(folders: dict[int, str]) -> None:
    """But for the order of sums, which overlap changes."""
    for world_size, strategy in ((1, "depcomm"), (2, "depcache")):
        jobs = [make_job(folders[world_size], name, strategy=strategy) for name in (None, "int8", "stale")]
        exact, *others = reports_of(world_size, jobs)
        for report in others:
            assert report.epochs[-1].bytes_sent == 0
            assert [epoch.loss for epoch in report.epochs] == pytest.approx(
                [epoch.loss for epoch in exact.epochs], rel=1e-6
            )


def test_evaluations_in_between_change_nothing(folders: dict[int, str]) -> None:
    quiet, busy = reports_of(3, [make_job(folders[3], "stale+bf16", eval_every=every) for every in (0, 2)])
    assert [epoch.loss for epoch in busy.epochs] == [epoch.loss for epoch in quiet.epochs]
    assert busy.final == quiet.final


def test_results_say_that_they_are_approximate(folders: dict[int, str], capsys: pytest.CaptureFixture[str]) -> None:
    exact, int8, stale = reports_of(2, [make_job(folders[2], name) for name in (None, "int8", "stale+bf16")])
    assert (exact.to_json()["approximate"], exact.to_json()["exactness"]) == (None, "exact")
    assert (int8.to_json()["approximate"], int8.to_json()["exactness"]) == ("int8", "approximate (int8 rows)")
    assert stale.exactness == "approximate (bf16 rows, rows one epoch old)"
    assert TrainReport.from_json(int8.to_json()) == int8
    print_training(exact)
    assert "approximate" not in capsys.readouterr().out
    print_training(replace(int8, dataset="data"))
    assert "training is approximate (int8 rows), evaluation exact" in " ".join(capsys.readouterr().out.split())


# -------------------------------------------------------------------- names


def make_loader(rank: int, world_size: int, part_config: str, names: list[Any], **options: Any) -> str:
    g = PartitionedGraph.open(part_config)
    return repr(FullGraphLoader(g, g.owned_nodes("train_mask"), 2, approximate=names[rank], **options))


def test_a_loader_says_what_it_is(partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 2)
    for name, expected in ((None, "exact"), ("int8", "approximate (int8 rows)")):
        for rank, text in enumerate(run_ranks(2, make_loader, folder, [name, name])):
            assert text.startswith("FullGraphLoader(2 layers, ")
            assert text.endswith(f" seeds on rank {rank} of 2, {expected})")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["int4", "int4"], "unknown approximation (got 'int4'); choose one of bf16, int8, stale, stale+bf16, stale"),
        (["int8", None], "approximate must be the same on every rank (got 'int8' on rank 0 and None on rank 1)"),
        (["stale", "bf16"], "approximate must be the same on every rank (got 'stale' on rank 0 and 'bf16' on rank 1)"),
        ([True, True], "unknown approximation (got 'True')"),
    ],
)
def test_wrong_names_and_disagreement_raise_on_all_ranks(
    names: list[Any], message: str, partitions: PartitionStore
) -> None:
    for error in run_ranks_expect_errors(2, make_loader, partitions.get("power_law", power_law(), 2), names):
        assert error.type_name == "ValueError"
        assert message in error.message


def test_not_with_rows_in_chunks(partitions: PartitionStore) -> None:
    folder = partitions.get("power_law", power_law(), 2)
    for error in run_ranks_expect_errors(2, make_loader, folder, ["bf16", "bf16"], chunk_rows=4):
        assert "chunk_rows=4 is not possible with approximate='bf16'" in error.message


def test_the_config_knows_the_names() -> None:
    assert TrainConfig(approximate="stale+int8").approximate == "stale+int8"
    with pytest.raises(ValueError, match=r"unknown approximation \(got 'fp4'\); choose one of bf16, int8, stale"):
        TrainConfig(approximate="fp4")


def attend_to_all(rank: int, world_size: int, part_config: str) -> bool:
    """One step of attention where so many numbers are drawn for rounding as a level has vertices."""
    g = PartitionedGraph.open(part_config)
    case = Case(kind="gat", num_layers=3)
    model = case.build(g.ndata["feat"].shape[1])
    nothing = [torch.empty(0, dtype=torch.int64)] * 3
    loader = FullGraphLoader(g, g.owned_nodes("train_mask"), 3, plan=nothing, approximate="int8", seed=7)
    for input_nodes, _, blocks in loader:
        logits = model(blocks, g.ndata["feat"][input_nodes].clone().requires_grad_())
    return bool(torch.isfinite(logits).all())


def test_rounding_is_no_draw_of_the_models(partitions: PartitionStore) -> None:
    """It was refused as one, by as many ranks as draw a number of rows by chance."""
    assert all(run_ranks(2, attend_to_all, partitions.get("power_law", power_law(), 2)))


class AnyNumber(Step):
    """Takes every number for one of rows."""

    def __init__(self) -> None:
        self.communicator = Communicator(None)
        self.communicator.world_size = 2

    def has_rows(self, count: int) -> bool:
        return True


def test_rounding_is_never_taken_for_a_draw_of_the_models() -> None:
    rows = torch.randn(8, 4)
    with RowMode(
        AnyNumber(), given_blocks=True, outside=contextlib.nullcontext, weigh=lambda: None, is_in_call=lambda: True
    ):
        inside = CODECS["int8"].encode(rows, key=(1,))
        with pytest.raises(BlockError, match="draws from each rank's own generator"):
            rows.random_()
    assert torch.equal(inside, CODECS["int8"].encode(rows, key=(1,)))
