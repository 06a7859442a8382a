# SPDX-License-Identifier: Apache-2.0
"""Full-graph training fed by DistDGL's servers equals single-process training with plain DGL, element by element.

Each job of servers and trainers does many things (`distdgl_full_graph`); the tests look at what it wrote.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dgl
import pytest
import torch
import torch.nn.functional as F

import dgl_hybrid
from dgl_hybrid.launch.cluster import ClusterJob, run_cluster
from tests.helpers.exactness import LAYERS, Case, assert_close, assert_same_step, reference_step, run_step
from tests.helpers.graphs import power_law
from tests.helpers.world import run_ranks
from tests.training.distdgl_full_graph import Job

CHECKOUT = Path(__file__).resolve().parents[2]
BOTH = ("collective", "kvstore")
FEW = [
    Case(kind="gcn_both", plan="depcomm", epochs=3),
    Case(kind="sage_pool", plan="random:1:0.5", num_layers=3),
    Case(kind="gat", plan="planned:hybrid", residual=True),
    Case(kind="edge_weight_norm", plan="depcache"),
    Case(kind="gin_max", plan="random:2:0.3", batch_norm=True),
]
DROPOUT = Case(kind="sage_mean", plan="random:3:0.5", dropout=0.4, epochs=3)
"""Its masks are keyed by original ids; compared with one rank on a folder."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A job of its own."""

    parts: int
    trainers: int = 1
    servers: int = 1
    samplers: int = 0
    transports: tuple[str, ...] = BOTH
    is_enabled: bool = True
    has_group: bool = True
    is_plain: bool = False
    """The folder was written by DGL alone."""
    hops: int = 2
    cases: tuple[Case, ...] = tuple(FEW)
    checks: tuple[str, ...] = (
        *("memory", "share", "reads", "inference", "messages", "embedding", "embedding inside", "planned", "disabled"),
    )

    @property
    def num_ranks(self) -> int:
        return self.parts * self.trainers


SETTINGS = {
    "two machines": Setting(parts=2, cases=(FEW[1], FEW[3], DROPOUT)),
    "two trainers on each of two": Setting(parts=2, trainers=2, servers=2, cases=(*FEW, DROPOUT), hops=1),
    "three machines": Setting(parts=3),
    "no process group": Setting(
        parts=2, has_group=False, transports=("kvstore",), checks=("reads", "inference", "messages", "planned")
    ),
    "plain folder": Setting(
        parts=3, is_plain=True, is_enabled=False, transports=("collective",),
        checks=("errors", "memory", "share", "reads", "inference", "embedding"),
    ),
    "one machine": Setting(
        parts=1, trainers=2, samplers=1, transports=("collective",), checks=("share", "planned", "sampled")
    ),
    "one trainer": Setting(parts=1, checks=("share", "reads", "planned")),
    "all layers": Setting(
        parts=2, cases=tuple(Case(kind=kind, plan="random:5:0.5") for kind in LAYERS), checks=()
    ),
}  # fmt: skip
QUICK = ("two machines",)


@functools.cache
def whole_graph() -> dgl.DGLGraph:
    graph = power_law()
    graph.ndata["id"] = torch.arange(graph.num_nodes())
    return graph


@functools.cache
def reference_of(case: Case) -> Any:
    return reference_step(whole_graph(), case)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    setting: Setting
    ranks: list[dict[str, Any]]

    def check(self, transport: str, name: str) -> list[Any]:
        """What every rank saw, in the order of the transport's ranks where it has any."""
        return [rank[transport][name] for rank in self.ranks]


@pytest.fixture(
    scope="module",
    params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS],
)
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    setting = SETTINGS[request.param]
    folder = tmp_path_factory.mktemp("job")
    graph = whole_graph()
    if setting.is_plain:
        graph = graph.clone()
        graph.ndata["train_mask"] = graph.ndata["train_mask"].to(torch.uint8)
    write = dgl.distributed.partition_graph if setting.is_plain else dgl_hybrid.partition_graph
    write(graph, "whole", setting.parts, str(folder / "parts"), num_hops=setting.hops, part_method="random")
    job = Job(
        graph_name="whole",
        cases=list(setting.cases),
        transports=setting.transports,
        is_enabled=setting.is_enabled,
        has_group=setting.has_group,
        checks=setting.checks,
    )
    torch.save(job, folder / "job.pt")
    run_cluster(
        ClusterJob(
            part_config=folder / "parts" / "whole.json",
            command=("-m", "tests.training.distdgl_full_graph", str(folder)),
            workspace=CHECKOUT,
            num_servers=setting.servers,
            num_trainers=setting.trainers,
            num_samplers=setting.samplers,
            threads=1,
            timeout_s=900,
        )
    )
    ranks = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(setting.num_ranks)]
    return Outcome(setting=setting, ranks=ranks)


def each(outcome: Outcome, name: str) -> list[tuple[str, list[Any]]]:
    if name not in outcome.setting.checks:
        pytest.skip(f"this job does not look at {name}")
    return [(transport, outcome.check(transport, name)) for transport in outcome.setting.transports]


def test_steps_equal_a_single_process(outcome: Outcome) -> None:
    for transport in outcome.setting.transports:
        steps = outcome.check(transport, "steps")
        for index, case in enumerate(outcome.setting.cases):
            if case.dropout == 0.0:
                assert_same_step([of_rank[index] for of_rank in steps], reference_of(case))


def test_dropout_is_that_of_one_rank(outcome: Outcome, tmp_path: Path) -> None:
    if DROPOUT not in outcome.setting.cases:
        pytest.skip("this job trains without dropout")
    dgl_hybrid.partition_graph(whole_graph(), "whole", 1, str(tmp_path), part_method="random")
    (expected,) = run_ranks(1, run_step, str(tmp_path / "whole.json"), DROPOUT)
    order = torch.argsort(expected.input_ids)
    expected.input_ids, expected.input_grad = expected.input_ids[order], expected.input_grad[order]
    grad = torch.zeros(whole_graph().num_nodes(), expected.input_grad.shape[1], dtype=torch.float64)
    expected.input_grad = grad.index_add_(0, expected.input_ids, expected.input_grad)
    for transport in outcome.setting.transports:
        steps = outcome.check(transport, "steps")
        assert_same_step([of_rank[outcome.setting.cases.index(DROPOUT)] for of_rank in steps], expected)


def test_nothing_is_copied(outcome: Outcome) -> None:
    for transport, seen in each(outcome, "memory"):
        for rank, facts in enumerate(seen):
            assert all(facts.values()), (transport, rank, facts)


def test_ranks_share_the_graph(outcome: Outcome) -> None:
    graph = whole_graph()
    for _, seen in each(outcome, "share"):
        seen.sort(key=lambda facts: facts["nodes"])
        for kind, total in (("nodes", graph.num_nodes()), ("edges", graph.num_edges())):
            bounds = [facts[kind] for facts in seen]
            assert bounds[0][0] == 0
            assert bounds[-1][1] == total
            assert all(before[1] == after[0] for before, after in itertools.pairwise(bounds))
        assert torch.equal(torch.cat([facts["id"] for facts in seen]).sort().values, torch.arange(graph.num_nodes()))
        for facts in seen:
            assert facts["is_ascending"]
            assert facts["knows_original_ids"] != outcome.setting.is_plain
            assert torch.equal(facts["out_degrees"], graph.out_degrees(facts["id"]))
            lists = zip(facts["id"].tolist(), facts["src"].split(facts["counts"].tolist()),
                        facts["weight"].split(facts["counts"].tolist()), strict=True)  # fmt: skip
            for node, src, weight in lists:
                expected_src, _, eid = graph.in_edges(node, form="all")
                order = torch.argsort(eid)
                got = list(zip(src.tolist(), weight.tolist(), strict=True))
                expected = list(zip(expected_src[order].tolist(), graph.edata["w"][eid[order]].tolist(), strict=True))
                # DGL's own partitioning numbers the in-edges of a vertex in any order.
                assert (sorted(got), sorted(expected)) == (sorted(expected), sorted(got))
                assert outcome.setting.is_plain or got == expected


def test_lists_of_siblings_and_complete_halos_need_no_message(outcome: Outcome) -> None:
    graph, setting = whole_graph(), outcome.setting
    for _, seen in each(outcome, "share"):
        seen.sort(key=lambda facts: facts["nodes"])
        for rank, facts in enumerate(seen):
            first = rank // setting.trainers * setting.trainers
            machine = torch.cat([other["id"] for other in seen[first : first + setting.trainers]])
            siblings = machine[~torch.isin(machine, facts["id"])]
            # Steps may have fetched further lists; those that the part held were there before.
            reached = graph.in_edges(machine)[0].unique() if setting.hops > 1 else siblings
            has_edges = reached[graph.in_degrees(reached) > 0]
            expected = torch.cat([siblings, has_edges[~torch.isin(has_edges, machine)]])
            assert bool(torch.isin(expected, facts["halo"]).all())


def test_reads_are_stable_until_a_write(outcome: Outcome) -> None:
    for transport, seen in each(outcome, "reads"):
        for rank, facts in enumerate(seen):
            assert all(facts.values()), (transport, rank, [name for name, good in facts.items() if not good])


def test_inference(outcome: Outcome) -> None:
    graph = whole_graph()
    model = Case(kind="gat").build(graph.ndata["feat"].shape[1])
    model.eval()
    with torch.no_grad():
        expected = model([graph] * 2, graph.ndata["feat"])
    for _, seen in each(outcome, "inference"):
        ids = torch.cat([ids for ids, _ in seen])
        order = torch.argsort(ids)
        assert torch.equal(ids[order], torch.arange(graph.num_nodes()))
        assert_close(torch.cat([logits for _, logits in seen])[order], expected, "logits")


def test_embeddings_learn_from_the_whole_graph(outcome: Outcome) -> None:
    graph = whole_graph()
    train = graph.ndata["train_mask"].bool()
    for transport, seen in each(outcome, "embedding"):
        model = Case(kind="sage_mean", dtype=torch.float32).build(5)
        for epoch in range(3):  # the last with a batch of a loader that is gone
            # Rows as the ranks read them: initial ones by partitioned id, then those that the optimizer wrote.
            x = torch.full((graph.num_nodes(), 5), float("nan"))
            for facts in seen:
                x[facts[epoch]["ids"]] = facts[epoch]["x"]
            known = ~x.isnan().any(1)
            x = x.nan_to_num().requires_grad_()
            F.cross_entropy(model([graph] * 2, x)[train], graph.ndata["label"][train]).backward()
            num_replicas = 0
            for facts in seen:
                facts = facts[epoch]
                assert_close(facts["x"], x.detach()[facts["ids"]], f"{transport}: rows", 0.0)
                assert_close(facts["grad"], x.grad[facts["ids"]], f"{transport}: gradients", 1e-5)
                num_replicas += int((~facts["own"]).sum())
            assert num_replicas > 0 or outcome.setting.num_ranks == 1
            assert not bool(x.grad[~known].any())
        before, after = (torch.cat([facts[epoch]["x"][facts[epoch]["own"]] for facts in seen]) for epoch in range(2))
        grad = torch.cat([facts[0]["grad"][facts[0]["own"]] for facts in seen])
        assert_close(after, before - 0.1 * grad / (grad.abs() + 1e-10), "Adagrad's first step", 1e-5)


def test_planning_leaves_learned_rows_inside_the_model(outcome: Outcome) -> None:
    for transport, seen in each(outcome, "embedding inside"):
        for facts in seen:
            assert facts["is_planned"], transport
            assert facts["is_there"], transport
            assert facts["num_traced"] == [1, 1, 1], transport
        for epoch in zip(*(facts["losses"] for facts in seen), strict=True):
            assert sum(epoch) == pytest.approx(sum(facts["losses"][0] for facts in seen), rel=1e-5), transport


def test_plans_made_over_the_transport(outcome: Outcome) -> None:
    graph = whole_graph()
    torch.manual_seed(0)
    model = Case(kind="sage_mean").build(graph.ndata["feat"].shape[1])
    train = graph.ndata["train_mask"].bool()
    with torch.no_grad():
        loss = float(F.cross_entropy(model([graph] * 2, graph.ndata["feat"])[train], graph.ndata["label"][train]))
    for transport, seen in each(outcome, "planned"):
        for epoch in zip(*seen, strict=True):
            assert sum(epoch) == pytest.approx(loss, rel=1e-9), transport


def test_sampled_loaders_beside_it(outcome: Outcome) -> None:
    for _, seen in each(outcome, "sampled"):
        assert all(all(facts.values()) for facts in seen), seen


def test_messages(outcome: Outcome) -> None:
    size = outcome.setting.num_ranks
    for transport, seen in each(outcome, "messages"):
        by_rank = sorted(seen, key=lambda facts: facts["sum of ints"][0])
        for dtype in (name for name in by_rank[0] if name.startswith("torch.")):
            for rank, facts in enumerate(by_rank):
                _, _, received, recv_counts = facts[dtype]
                assert received.dtype == facts[dtype][0].dtype
                for peer, part in enumerate(received.split(recv_counts)):
                    sent, send_counts, _, _ = by_rank[peer][dtype]
                    assert torch.equal(part, sent.split(send_counts)[rank]), (transport, dtype, peer, rank)
        for name in (name for name in by_rank[0] if name.startswith("sum")):
            total = sum(facts[name][0] for facts in by_rank)
            assert all(torch.equal(facts[name][1], total) for facts in by_rank), name
        for rank, facts in enumerate(by_rank):
            assert facts["nothing"]
            assert facts["large"]
            assert facts["json"] == [{"rank": q, "text": "é" * 3000 * q} for q in range(size)]
            assert facts["rows"].tolist() == [[float(q)] * 2 for q in range(size) for _ in range(q)]
            assert facts["ints"] == [[q, -q] for q in range(size)]
            where = "" if rank == size - 1 else f"rank {size - 1} of {size}: "
            assert facts["agreed"] == f"ValueError: {where}no such thing"
        if transport == "kvstore":
            late = ", ".join(str(q) for q in range(1, size))
            assert f"on rank 0 of {size}: rank {late} did not take part" in by_rank[0]["late"]
            assert all(facts["rows after it"] for facts in by_rank)


def test_errors_before_torch_distributed(outcome: Outcome) -> None:
    if "errors" not in outcome.setting.checks:
        pytest.skip("this job makes no mistakes")
    for rank in outcome.ranks:
        errors = rank["errors"]
        assert "torch.distributed, which is not initialised on trainer" in errors["collective"]
        assert "init_process_group('gloo') after dgl.distributed.initialize" in errors["collective"]
        assert "run without dgl_hybrid. Call dgl_hybrid.enable() before" in errors["kvstore"]
        names = "'auto', 'collective', 'shared_memory', 'kvstore'"
        assert errors["carrier pigeon"].startswith(f"ValueError: transport must be one of {names}")


def test_disabled_means_that_dgls_functions_are_its_own(outcome: Outcome) -> None:
    """What a view hooks stayed after `dgl_hybrid.disable()`: reads, pushes, barriers and embeddings went through it."""
    if "disabled" not in outcome.setting.checks:
        pytest.skip("this job ends with the plugin on")
    for rank, found in enumerate(outcome.ranks):
        for facts in found["disabled"]:
            assert all(facts.values()), (rank, facts)
