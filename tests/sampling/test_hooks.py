# SPDX-License-Identifier: Apache-2.0
"""What the plugin hooks leaves no trace when it is off; reads of the KVStore have several answerers."""

from __future__ import annotations

import functools
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch

import dgl_hybrid

# isort: split
import dgl
from dgl.distributed import dist_dataloader, dist_graph, graph_services, kvstore
from dgl.distributed import partition as dgl_partition

from dgl_hybrid.errors import CompatError
from dgl_hybrid.partition import verify_partition
from dgl_hybrid.partition.manifest import MANIFEST_NAME, SIDECAR_NAME, read_manifest
from dgl_hybrid.sampling.config import ENABLE_VARIABLE
from dgl_hybrid.sampling.hooks import answer_pulls, unhooked_pull, withdraw


def test_answers_of_pulls_come_and_go_without_the_plugin() -> None:
    original = kvstore.KVClient.__dict__["pull"]
    calls: list[str] = []

    def first(client: Any, name: str, ids: Any) -> Any:
        calls.append("first")
        return None if name == "other" else "answered"

    def second(client: Any, name: str, ids: Any) -> Any:
        calls.append("second")
        return "by the second"

    answer_pulls(second, last=True)
    answer_pulls(first)
    client = object.__new__(kvstore.KVClient)
    assert client.pull("feat", None) == "answered"
    assert client.pull(name="other", id_tensor=None) == "by the second"
    assert calls == ["first", "first", "second"]
    withdraw(first)
    assert kvstore.KVClient.__dict__["pull"] is not original
    withdraw(second)
    withdraw(second)
    assert kvstore.KVClient.__dict__["pull"] is original


def test_the_unhooked_pull_is_dgls_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Recording(kvstore.KVClient):
        def __init__(self) -> None:
            self.calls: list[str] = []

        def pull(self, name: str, id_tensor: Any) -> Any:
            self.calls.append(name)
            return id_tensor

    client = Recording()
    assert unhooked_pull(client, "feat", 5) == 5  # type: ignore[arg-type, comparison-overlap]
    assert client.calls == ["feat"]


def test_the_unhooked_pull_goes_below_what_others_put_around_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler around `KVClient.pull` made a read that needs DGL come back to the hook, without end."""
    monkeypatch.setattr(kvstore.KVClient, "pull", dgls_own := (lambda self, name, id_tensor: f"{name} of DGL"))

    def answer(client: Any, name: str, ids: Any) -> Any:
        return f"ours, by {unhooked_pull(client, name, ids)}"

    answer_pulls(answer)
    try:
        for wraps in (functools.wraps, lambda function: lambda around: around):
            hooked = kvstore.KVClient.pull

            @wraps(hooked)
            def timed(*args: Any, hooked: Any = hooked) -> Any:
                return hooked(*args)

            monkeypatch.setattr(kvstore.KVClient, "pull", timed)
            assert object.__new__(kvstore.KVClient).pull("feat", None) == "ours, by feat of DGL"
            monkeypatch.setattr(kvstore.KVClient, "pull", hooked)
    finally:
        withdraw(answer)
    assert kvstore.KVClient.__dict__["pull"] is dgls_own


def test_a_profiler_that_outlives_the_hook_does_not_bring_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our hook below it came back to life with the next answerer, and the first read went round without end."""
    monkeypatch.setattr(kvstore.KVClient, "pull", lambda self, name, id_tensor: f"{name} of DGL")

    def answer(client: Any, name: str, ids: Any) -> Any:
        return f"ours, by {unhooked_pull(client, name, ids)}"

    answer_pulls(answer)
    hooked = kvstore.KVClient.pull

    @functools.wraps(hooked)
    def timed(*args: Any) -> Any:
        return hooked(*args)

    monkeypatch.setattr(kvstore.KVClient, "pull", timed)
    withdraw(answer)
    answer_pulls(answer)
    try:
        assert object.__new__(kvstore.KVClient).pull("feat", None) == "ours, by feat of DGL"
    finally:
        withdraw(answer)
    assert kvstore.KVClient.__dict__["pull"] is timed


def touched() -> dict[str, object]:
    """Every function of DGL that the plugin puts something around, and the code of those that it repairs."""
    functions = {
        "partition_graph": dgl_partition.partition_graph,
        "dgl.distributed.partition_graph": dgl.distributed.partition_graph,
        "_distributed_access": graph_services._distributed_access,
        "pull": kvstore.KVClient.__dict__["pull"],
        "push": kvstore.KVClient.__dict__["push"],
        "barrier": kvstore.KVClient.__dict__["barrier"],
        "__setstate__": dist_graph.DistGraph.__dict__["__setstate__"],
        "server": dist_graph.DistGraphServer.__dict__["__init__"],
        "loader": dist_dataloader.DistDataLoader.__dict__["__init__"],
    }
    codes = {f"code of {name}": function.__code__ for name, function in functions.items()}
    return {**functions, **codes, "what processes get": ForkingPickler._extra_reducers.get(dist_graph.DistGraph)}


def test_disable_gives_dgl_every_function_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    before = touched()
    dgl_hybrid.enable(budget="10%")
    during = touched()
    assert all(during[name] is not value for name, value in before.items() if not name.startswith("code"))
    assert ENABLE_VARIABLE in os.environ
    dgl_hybrid.enable(strategy="depcomm")  # another configuration begins anew
    dgl_hybrid.disable()
    dgl_hybrid.disable()
    assert touched() == before
    assert all(touched()[name] is value for name, value in before.items())
    assert ENABLE_VARIABLE not in os.environ


@pytest.mark.parametrize("name", ["push", "pull"])
def test_a_failed_enable_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = touched()
    monkeypatch.setattr(kvstore.KVClient, name, lambda self, name: None)
    with pytest.raises(CompatError, match=rf"KVClient\.{name}"):
        dgl_hybrid.enable()
    monkeypatch.undo()
    assert touched() == before


def test_partitioning_is_ours_while_the_plugin_is_on(tmp_path: Any) -> None:
    g = dgl.graph((torch.tensor([0, 1, 2, 3]), torch.tensor([1, 2, 3, 0])))
    hetero = dgl.heterograph({("a", "to", "b"): (torch.tensor([0, 1]), torch.tensor([1, 0]))})
    dgl_hybrid.enable()
    try:
        dgl.distributed.partition_graph(g, "homogeneous", 2, str(tmp_path / "ours"), part_method="random")
        dgl.distributed.partition_graph(hetero, "hetero", 1, str(tmp_path / "hetero"), part_method="random")
    finally:
        dgl_hybrid.disable()
    dgl.seed(0)  # DGL fails (KeyError) where it draws one part for all four nodes
    dgl.distributed.partition_graph(g, "stock", 2, str(tmp_path / "stock"), part_method="random")
    assert list((tmp_path / "ours").rglob(SIDECAR_NAME)), "our sidecar lies beside DGL's files"
    assert not list((tmp_path / "stock").rglob(SIDECAR_NAME))
    assert (tmp_path / "hetero" / "hetero.json").is_file()


def test_the_seed_for_a_heterograph_counts_while_the_plugin_is_on(tmp_path: Path) -> None:
    """What lets DGL write it called the hooked name, which began again with seed 0 and a manifest of its own."""
    ring = torch.arange(40)
    graph = dgl.heterograph({("a", "x", "b"): (ring, ring), ("b", "y", "a"): (ring, ring.roll(1))})

    def draw(seed: int, folder: str) -> list[int]:
        ids = dgl_hybrid.partition_graph(
            graph, "h", 2, tmp_path / folder, part_method="random", return_mapping=True, seed=seed
        )
        return ids[0]["a"].tolist()  # type: ignore[index, call-overload, no-any-return]

    off = [draw(seed, f"off{seed}") for seed in (0, 5)]
    dgl_hybrid.enable()
    try:
        on = [draw(seed, f"on{seed}") for seed in (0, 5)]
    finally:
        dgl_hybrid.disable()
    assert on == off
    assert on[0] != on[1]
    manifest = read_manifest(tmp_path / "on5")
    assert manifest is not None
    assert manifest.seed == 5
    assert MANIFEST_NAME not in manifest.files
    verify_partition(tmp_path / "on5" / "h.json")
