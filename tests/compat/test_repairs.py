# SPDX-License-Identifier: Apache-2.0
"""What the switchable fixes mend, on running servers; and that it is broken while they are off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dgl
import pytest
import torch

from dgl_hybrid.compat import repairs
from dgl_hybrid.launch.cluster import ClusterFailure, ClusterJob, run_cluster

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("repairs_script.py")
Found = list[dict[str, Any]]


def partition(folder: Path, num_parts: int) -> Path:
    """Edge i + half is the reverse of edge i; node 7 is a hub; a third of the weights are 0."""
    torch.manual_seed(0)
    src, dst = torch.randint(240, (2, 900))
    dst[:150] = 7
    graph = dgl.graph((torch.cat([src, dst]), torch.cat([dst, src])), num_nodes=240)
    graph.edata["weight"] = torch.tensor([0.0, 1.0, 3.0])[torch.randint(3, (graph.num_edges(),))]
    graph.edata["original"] = torch.arange(graph.num_edges())
    dgl.distributed.partition_graph(graph, "repairs", num_parts, str(folder), part_method="random")
    return folder / "repairs.json"


def partition_typed(folder: Path) -> Path:
    """`bought-by` has the edges of `buys`, reversed, under the same ids."""
    torch.manual_seed(0)
    buys = torch.randint(100, (500,)), torch.randint(60, (500,))
    follows = torch.randint(100, (2, 600))
    graph = dgl.heterograph(
        {
            ("user", "follows", "user"): (follows[0], follows[1]),
            ("user", "buys", "item"): buys,
            ("item", "bought-by", "user"): buys[::-1],
        },
        {"user": 100, "item": 60},
    )
    dgl.distributed.partition_graph(graph, "repairs", 2, str(folder), part_method="random")
    return folder / "repairs.json"


def run(part_config: Path, out: Path, *checks: str, switch: str = "on", **options: Any) -> Found:
    """Runs the script; returns what each trainer found."""
    out.mkdir(exist_ok=True)
    job = ClusterJob(
        part_config=part_config,
        command=(str(SCRIPT), str(out), switch, *checks),
        timeout_s=900,
        **options,
    )
    lines: list[str] = []
    try:
        run_cluster(job, on_line=lambda line: lines.append(f"[{line.part.name}] {line.text}"), verbose=True)
    except ClusterFailure as failure:
        if switch != "off":
            pytest.fail(f"{failure}\n{failure.details}\n" + "\n".join(lines[-60:]))
        raise
    return [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]


@pytest.fixture(scope="module")
def two_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return partition(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def mended(two_parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run(two_parts, tmp_path_factory.mktemp("on"), "fence", "in_subgraph", "exclude", "edge_loader", "split")


@pytest.fixture(scope="module")
def with_backups(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Three partitions, two servers each: pushes and requests go to main servers and backups."""
    folder = tmp_path_factory.mktemp("three")
    return run(partition(folder, 3), folder / "out", "fence", "in_subgraph", "exclude", num_servers=2)


@pytest.fixture(scope="module")
def with_two_trainers(two_parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run(two_parts, tmp_path_factory.mktemp("trainers"), "fence", "exclude", "split", num_trainers=2)


@pytest.fixture(scope="module")
def with_plugin(two_parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Its halo store answers sampling, a sampler process loads the edges."""
    checks = ("fence", "exclude", "edge_loader")
    return run(two_parts, tmp_path_factory.mktemp("plugin"), *checks, switch="plugin", num_samplers=1)


@pytest.fixture(scope="module")
def as_released(two_parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run(two_parts, tmp_path_factory.mktemp("off"), "fence", "exclude", "edge_loader", "split", switch="off")


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Found]:
    folder = tmp_path_factory.mktemp("typed")
    part_config = partition_typed(folder)
    checks = ("exclude_typed", "typed_edge_loader")
    return {on: run(part_config, folder / str(on), *checks, switch="on" if on else "off") for on in (True, False)}


def test_pushed_rows_are_seen_after_the_barrier(
    mended: Found, with_backups: Found, with_two_trainers: Found, with_plugin: Found, as_released: Found
) -> None:
    """100 of 100 trials; an idle barrier sends its own request alone, a fence one to each machine pushed to."""
    for found, num_others in ((mended, 1), (with_backups, 2), (with_two_trainers, 1), (with_plugin, 1)):
        assert [trainer["fence"]["stale"] for trainer in found] == [0] * len(found)
        assert {tuple(trainer["fence"]["requests"]) for trainer in found} == {(1, 1 + num_others, 1)}
    assert sum(trainer["fence"]["stale"] for trainer in as_released) > 0


def test_remote_in_subgraph(mended: Found, with_backups: Found) -> None:
    for trainer in mended + with_backups:
        assert trainer["in_subgraph"]["same"]
        assert trainer["in_subgraph"]["edges"] > 0


def test_remote_in_subgraph_kills_a_stock_server(two_parts: Path, tmp_path: Path) -> None:
    with pytest.raises(ClusterFailure, match=r"server [01] on machine") as caught:
        run(two_parts, tmp_path, "in_subgraph", switch="off")
    assert "too many values to unpack" in caught.value.details


def test_excluded_edges_are_no_candidates(
    mended: Found, with_backups: Found, with_two_trainers: Found, with_plugin: Found, as_released: Found
) -> None:
    """None is sampled, nodes have their full fanout of what is left, and what is left is sampled evenly."""
    for trainer in mended + with_backups + with_two_trainers + with_plugin:
        found = trainer["exclude"]
        assert abs(found.pop("spread")) < 5
        assert abs(found.pop("weighted_spread")) < 5
        assert found == {
            "full": True,
            "by_type": True,
            "leaks": 0,
            "wrong": 0,
            "replace": True,
            "weighted": True,
            "twice": True,
            "untouched": True,
            "out": True,
        }
    for trainer in as_released:
        assert trainer["exclude"]["leaks"] > 0
        assert trainer["exclude"]["spread"] > 100
        assert not trainer["exclude"]["out"]


def test_edge_loader_hides_what_is_to_be_predicted(mended: Found, with_plugin: Found, as_released: Found) -> None:
    assert [trainer["edge_loader"]["leaks"] for trainer in mended + with_plugin] == [0] * 4
    assert all(trainer["edge_loader"]["leaks"] > 0 for trainer in as_released)


def test_excluded_edges_of_heterographs(typed: dict[bool, Found]) -> None:
    for trainer in typed[True]:
        found = trainer["exclude_typed"]
        assert (found["leaks"], found["wrong"]) == (0, 0)
        assert all(abs(spread) < 5 for spread in found["spreads"].values()), found
        assert "Must specify etype" in found["message"]
        assert trainer["typed_edge_loader"]["leaks"] == 0
        assert trainer["typed_edge_loader"]["mixed"] > 0
    for trainer in typed[False]:
        assert trainer["exclude_typed"]["leaks"] > 0
        assert trainer["typed_edge_loader"]["leaks"] > 0


def test_all_ids_are_split(mended: Found, with_two_trainers: Found, as_released: Found) -> None:
    """Each node once, node 0 among them; who gets none gets no IDs, rather than no mask."""
    for found in (mended, with_two_trainers):
        assert sorted(node for trainer in found for node in trainer["split"]["nodes"]) == list(range(240))
        assert sum(trainer["split"]["edges"] for trainer in found) == 1800
        assert sorted(trainer["split"]["rare"] for trainer in found) == [[]] * (len(found) - 1) + [[0]]
        assert {trainer["split"]["dtype"] for trainer in found} == {"torch.int64"}
    assert 0 not in [node for trainer in as_released for node in trainer["split"]["nodes"]]
    assert {trainer["split"]["dtype"] for trainer in as_released} == {"torch.float32"}


def partition_lacking(folder: Path) -> Path:
    """Two groups of users and one item, which is in one partition only."""
    torch.manual_seed(0)
    src, dst = torch.randint(25, (2, 200))
    graph = dgl.heterograph(
        {
            ("user", "follows", "user"): (torch.cat([src, src + 25]), torch.cat([dst, dst + 25])),
            ("item", "bought-by", "user"): ([0], [0]),
            ("user", "buys", "item"): ([0], [0]),
        },
        {"user": 50, "item": 1},
    )
    graph.nodes["item"].data["label"] = torch.tensor([7])
    dgl.distributed.partition_graph(graph, "repairs", 2, str(folder), part_method="metis")
    return folder / "repairs.json"


def test_a_partition_may_lack_a_type(tmp_path: Path) -> None:
    with pytest.raises(IndexError):
        partition_lacking(tmp_path)
    repairs.switch_on()
    try:
        part_config = partition_lacking(tmp_path)
    finally:
        repairs.switch_off()
    found = run(part_config, tmp_path / "out", "lacking")
    assert 0 in [trainer["lacking"].pop("own") for trainer in found]
    assert sum(trainer["lacking"].pop("share") for trainer in found) == 1
    for trainer in found:
        expected = {"follows": 400, "bought-by": 1, "buys": 1}
        assert trainer["lacking"] == {"edges": expected, "labels": [7], "written": 2.0}


def partition_buyers(folder: Path, parts: list[int]) -> Path:
    """Ten users buy two items; `parts` says for each item, then for each user, where it goes."""
    buys = torch.arange(10), torch.arange(10) % 2
    graph = dgl.heterograph({("user", "buys", "item"): buys, ("user", "follows", "user"): ([], [])})
    graph.nodes["item"].data["label"] = torch.tensor([7, 8])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dgl.distributed.partition, "metis_partition_assignment", lambda *_, **__: torch.tensor(parts))
        dgl.distributed.partition_graph(graph, "repairs", max(parts) + 1, str(folder))
    return folder / "repairs.json"


def test_a_partition_may_lack_every_edge(tmp_path: Path) -> None:
    """Its IDs begin where those of the partition before end; they began at 0, and then nobody could load the parts."""
    cases = {"none": [0] * 12, "last": [0, 0] + [0] * 5 + [1] * 5, "first": [1, 2] + [0] * 4 + [1] * 3 + [2] * 3}
    with pytest.raises(IndexError):
        partition_buyers(tmp_path, cases["none"])  # no edge of a type in the only part
    repairs.switch_on()
    try:
        found = {name: partition_buyers(tmp_path / name, parts) for name, parts in cases.items()}
    finally:
        repairs.switch_off()
    ranges = {name: json.loads(part_config.read_text())["edge_map"] for name, part_config in found.items()}
    assert [edges["user:buys:item"] for edges in ranges.values()] == [
        [[0, 10]],
        [[0, 10], [10, 10]],
        [[0, 0], [0, 5], [5, 10]],
    ]
    assert [edges["user:follows:user"] for edges in ranges.values()] == [
        [[10, 10]],
        [[10, 10], [10, 10]],
        [[0, 0], [5, 5], [10, 10]],
    ]
    for name, parts in cases.items():
        for part_id in range(max(parts) + 1):
            dgl.distributed.load_partition(str(found[name]), part_id)
    for trainer in run(found["last"], tmp_path / "out", "lacking"):
        assert trainer["lacking"]["edges"] == {"buys": 10}
        assert trainer["lacking"]["labels"] == [7, 8]
