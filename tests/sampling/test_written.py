# SPDX-License-Identifier: Apache-2.0
"""Which servers tell of writes is asked of those that run, in a way that all of them answer."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, cast

import dgl_hybrid

# isort: split
import pytest
import torch
from dgl.distributed import DistGraph, kvstore, role, rpc

from dgl_hybrid.errors import ExchangeError
from dgl_hybrid.sampling import plugin as plugin_module
from dgl_hybrid.sampling import switch, written
from dgl_hybrid.sampling.config import HaloConfig
from dgl_hybrid.sampling.halo_store import HaloStore
from dgl_hybrid.sampling.held_rows import HeldFields, HeldRows
from dgl_hybrid.sampling.written import WrittenFields, is_served, publish_table

PORTS = (61001, 61002)


class Servers:
    """The main servers of two machines, in this process; of some the plugin is off."""

    def __init__(
        self,
        with_plugin: tuple[bool, ...],
        monkeypatch: pytest.MonkeyPatch,
        names: Sequence[Collection[str]] = (("node~_N~feat",), ("node~_N~feat",)),
    ) -> None:
        self.names = names
        """Fields by machine."""
        self.namebook = {k: [k, f"10.0.0.{k}", port, 1] for k, port in enumerate(PORTS)}
        self.states = [self._start(k, is_on) for k, is_on in enumerate(with_plugin)]
        self.answers: list[Any] = []
        self.got: list[tuple[int, str]] = []
        monkeypatch.setattr(rpc, "get_num_server_per_machine", lambda: 1)
        monkeypatch.setattr(rpc, "send_request", self._send)
        monkeypatch.setattr(rpc, "recv_response", lambda timeout=0: self.answers.pop(0) if self.answers else None)

    def _start(self, number: int, is_on: bool) -> SimpleNamespace:
        server = SimpleNamespace(
            server_id=number, _server_namebook=self.namebook, data_store={}, orig_data=set(self.names[number])
        )
        if is_on:
            publish_table(server)
        return SimpleNamespace(kv_store=server)

    def _send(self, target: int, request: Any) -> None:
        state = self.states[target]
        self.got.append((target, type(request).__name__))
        if not hasattr(state.kv_store, written._PUBLISHED_ATTRIBUTE) and not isinstance(
            request, kvstore.DeleteDataRequest
        ):
            raise KeyError(f"server {target} knows no such service, and ends")
        self.answers.append(request.process_request(state))

    def client(self, machine: int) -> Any:
        client = object.__new__(kvstore.KVClient)
        client._machine_id, client._server_namebook, client._server_count = machine, self.namebook, len(self.states)
        client._pull_handlers = dict.fromkeys(self.names[machine], kvstore.default_pull_handler)
        client._data_store = {}
        return client


@pytest.fixture(autouse=True)
def plugin() -> Iterator[None]:
    dgl_hybrid.enable(strategy="depcomm")
    yield
    dgl_hybrid.disable()


def test_all_servers_tell_of_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Servers((True, True), monkeypatch)
    assert is_served(servers.client(0))
    first, second = WrittenFields(servers.client(0)), WrittenFields(servers.client(1))
    assert first.is_guarded
    assert first.unserved == ()
    assert first.may_hold("node~_N~feat")
    assert not first.may_hold("node~_N~other")
    second.announce("node~_N~feat")
    assert not first.may_hold("node~_N~feat")


def test_rows_that_are_not_read_the_ordinary_way_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's own pull handler may answer another thing each time."""
    client = Servers((True, True), monkeypatch).client(0)
    fields = WrittenFields(client)
    client._pull_handlers["node~_N~feat"] = lambda *args: None
    assert not fields.may_hold("node~_N~feat")
    del client._pull_handlers["node~_N~feat"]
    assert not fields.may_hold("node~_N~feat"), "a field that this client knows nothing of"
    client._pull_handlers["node~_N~feat"] = kvstore.default_pull_handler
    assert fields.may_hold("node~_N~feat")


def test_a_write_gives_up_no_other_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: 4096 flags were shared by all."""
    names = [f"node~_N~f{k}" for k in range(5000)]
    servers = Servers((True, True), monkeypatch, (names, names))
    first, second = WrittenFields(servers.client(0)), WrittenFields(servers.client(1))
    for name in names[::2]:
        second.announce(name)
    assert [first.may_hold(name) for name in names] == [False, True] * 2500


def test_machines_may_have_other_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each numbers its own, and is told of writes by name."""
    servers = Servers((True, True), monkeypatch, (("b", "d"), ("a", "b", "c")))
    first, second = WrittenFields(servers.client(0)), WrittenFields(servers.client(1))
    second.announce("c")
    assert [first.may_hold(name) for name in "bd"] == [True, True]
    assert [second.may_hold(name) for name in "abc"] == [True, True, False]
    second.announce("b")
    assert [first.may_hold(name) for name in "bd"] == [False, True]
    assert [second.may_hold(name) for name in "abc"] == [True, False, False]


def test_parts_of_inference_mode_are_taken_for_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch counts no writes into them: the first read of a graph that was opened in it failed, in every script."""
    client = Servers((True, True), monkeypatch).client(0)
    with torch.inference_mode():
        client._data_store = {"node~_N~feat": torch.ones(3), "node~_N~of_the_script": torch.ones(3)}
    fields = WrittenFields(client)
    fields.fall_silent()
    fields.speak()
    assert fields.may_hold("node~_N~feat")
    fields.announce_direct_writes()
    assert not fields.may_hold("node~_N~feat")


def test_writes_that_pytorch_does_not_count_are_found_by_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a collective of `torch.distributed` receives into a part was read old by all other machines."""
    names = ("node~_N~feat", "node~_N~of_zeros", "node~_N~other")
    servers = Servers((True, True), monkeypatch, (names, names))
    client = servers.client(0)
    client._data_store = {name: torch.randn(500, 40) for name in names} | {names[1]: torch.zeros(0, 3)}
    fields, other = WrittenFields(client), WrittenFields(servers.client(1))
    fields.announce_direct_writes()
    assert [other.may_hold(name) for name in names] == [True, True, True]
    client._data_store[names[0]].numpy()[:] = 7.0
    assert client._data_store[names[0]]._version == 0
    fields.announce_direct_writes()
    assert [other.may_hold(name) for name in names] == [False, True, True]
    fields.fall_silent()
    client._data_store[names[2]].numpy()[:] = 7.0
    fields.speak()
    fields.announce_direct_writes()
    assert [other.may_hold(name) for name in names] == [False, True, True], "nobody holds what was written in silence"


def test_a_graph_has_countable_parts_wherever_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    class Opened:  # of which there may be weak references
        graph_name, part = "of this test", torch.empty(0)

    opened = Opened()

    def make(g: Any, *args: Any) -> None:
        g.part = torch.ones(3)

    halo_plugin = plugin_module.HaloPlugin(HaloConfig())
    with torch.inference_mode():
        halo_plugin._make_graph(make, opened)
        assert torch.is_inference_mode_enabled()
        assert not opened.part.is_inference()
        halo_plugin._set_state(make, opened, ("a name",))
        assert not opened.part.is_inference()


@pytest.mark.parametrize("num_samplers", [0, 1])
def test_what_is_held_goes_to_samplers_alone(num_samplers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deep copy of a model that has the graph, or a file of it, held all of it, and stock DGL could not read it."""
    monkeypatch.setenv("DGL_NUM_SAMPLER", str(num_samplers))
    set_states = list[Any]()
    monkeypatch.setattr(DistGraph, "__getstate__", lambda self: ("g", "book", False))
    monkeypatch.setattr(DistGraph, "__setstate__", lambda self, state: set_states.append(state))
    graph = DistGraph.__new__(DistGraph)
    graph.graph_name = "g"
    dgl_hybrid.enable()
    try:
        halo_plugin = switch._plugin
        assert halo_plugin is not None
        halo_plugin._stores = {"g": cast(Any, SimpleNamespace(shared=lambda: "all that is held"))}
        to_a_process = ForkingPickler.dumps(graph)
        pickle.loads(pickle.dumps(graph))
        copy.deepcopy(graph)
    finally:
        dgl_hybrid.disable()
    pickle.loads(to_a_process)
    own = ("g", "book", False)
    assert set_states == [own, own, (*own, *["all that is held"] * num_samplers)]
    pickle.loads(ForkingPickler.dumps(graph))
    assert set_states[3] == own


def test_rows_come_to_the_cpu_whatever_is_the_default_device() -> None:
    """As DGL's do; ids on the CPU and a default elsewhere had our reads raise."""
    halo_plugin = plugin_module.HaloPlugin(HaloConfig())
    store = SimpleNamespace(has_field=lambda client, name: True, pull=lambda name, ids: torch.ones(len(ids)))
    halo_plugin._stores = {"g": cast(Any, store)}
    ids = torch.arange(3)
    with torch.device("meta"):
        rows = halo_plugin._answer_pull(None, "feat", ids)
        assert torch.empty(1).device.type == "meta"
    assert rows is not None
    assert rows.device.type == "cpu"


@pytest.mark.parametrize("can_plan", [False, True])
def test_loaders_are_read_where_anything_may_be_held(can_plan: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends of all edges were asked of their owners for nothing, by `depcomm`."""
    read, planned, made = list[Any](), list[Any](), list[Any]()
    store = SimpleNamespace(can_plan=can_plan, plan_for=planned.append, edge_loaders=set(), planning=nullcontext)
    halo_plugin = plugin_module.HaloPlugin(HaloConfig())
    monkeypatch.setattr(halo_plugin, "_store_of", lambda g, share: store)
    monkeypatch.setattr(plugin_module, "graph_of_loader", lambda collate: "a graph")
    monkeypatch.setattr(plugin_module, "read_loader", lambda *what, seen: read.append(what) or "reads")
    halo_plugin._make_loader(lambda *what: made.append(what), "loader", [1], 2)
    assert (len(read), planned, len(made)) == (int(can_plan), ["reads"] * int(can_plan), 1)


class CountedParts(dict[str, torch.Tensor]):
    """The shared-memory parts of a client, and how often one is looked at."""

    num_looks = 0

    def get(self, *args: Any) -> Any:
        self.num_looks += 1
        return super().get(*args)


def test_a_read_looks_at_its_own_field_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read looked at all fields of the graph for direct writes, of which barriers tell."""
    names = [f"node~_N~f{k}" for k in range(100)]
    servers = Servers((True, True), monkeypatch, (names, names))
    client, other = servers.client(0), WrittenFields(servers.client(1))
    parts = client._data_store = CountedParts({name: torch.zeros(4) for name in names})
    policy = SimpleNamespace(get_size=lambda: 8, to_partid=torch.zeros_like)
    client._part_policy = dict.fromkeys(names, policy)
    store = object.__new__(HaloStore)
    fields = store._written = WrittenFields(client)
    store._client, store._book, store._is_holding, store._rows = client, SimpleNamespace(partid=0), False, HeldFields()
    store._num_silences, store._pull_unheld = 0, lambda client, name, ids: parts[name][ids]
    parts[names[3]][0] = parts[names[5]][0] = 1.0
    parts.num_looks = 0
    for name in names[:4]:
        store.pull(name, torch.arange(4))
    assert parts.num_looks <= 4
    assert [name for name in names if not other.may_hold(name)] == [names[3]]
    fields.announce_direct_writes()
    assert [name for name in names if not other.may_hold(name)] == [names[3], names[5]]


@pytest.mark.parametrize("machine", [0, 1])
def test_one_server_without_the_plugin_is_enough_to_hold_no_rows(machine: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trainers may write and tell nobody; and what we tell would end it."""
    servers = Servers((True, False), monkeypatch)
    client = servers.client(machine)
    assert not is_served(client)
    fields = WrittenFields(client)
    assert not fields.is_guarded
    assert fields.unserved == ("1 (10.0.0.1)",)
    assert not fields.may_hold("node~_N~feat")
    fields.announce("node~_N~feat")
    fields.fall_silent()
    assert {name for _, name in servers.got} == {"DeleteDataRequest"}


def test_jobs_of_one_host_have_tables_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on the same port: in two containers that share memory, or after a server that was killed."""
    names = ("node~_N~feat", "node~_N~other")
    first = Servers((True, True), monkeypatch, (names, names))
    of_first = WrittenFields(first.client(0))
    of_first.announce("node~_N~feat")
    second = Servers((True, True), monkeypatch)
    of_second = WrittenFields(second.client(0))
    assert of_second.may_hold("node~_N~feat")
    assert [of_first.may_hold(name) for name in names] == [False, True]


def test_nobody_holds_rows_while_somebody_writes_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Servers((True, True), monkeypatch)
    first, second, third = (WrittenFields(servers.client(machine)) for machine in (0, 1, 1))
    before = first.num_silences
    second.fall_silent()
    third.fall_silent()
    assert not first.may_hold("node~_N~feat")
    assert first.num_silences == before + 2, "what was held before may be old"
    second.speak()
    assert not first.may_hold("node~_N~feat")
    third.speak()
    assert first.may_hold("node~_N~feat")
    assert first.num_silences == before + 2


def test_rows_read_before_a_silence_are_not_taken_from_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it shared may wait in a queue while somebody is silent, and has written by the time that it is taken."""
    servers, name = Servers((True, True), monkeypatch), "node~_N~feat"
    client, other = servers.client(0), WrittenFields(servers.client(1))
    client._data_store = {name: torch.zeros(4, 2)}
    client._part_policy = {name: SimpleNamespace(get_size=lambda: 8)}
    trainer, sampler = (object.__new__(HaloStore) for _ in range(2))
    for store in (trainer, sampler):
        store._client, store._written, store._rows = client, WrittenFields(client), HeldFields()
        store._num_silences, store._share, store.halo_graph = store._written.num_silences, True, None
        store._budget_bytes = float("inf")

    def read() -> None:
        held = trainer._make_rows(name)
        held.fetch(torch.tensor([5, 7]), lambda ids: torch.ones(len(ids), 2), float("inf"))
        trainer._rows.put(name, held)

    read()
    before = trainer.shared()
    sampler.adopt(before)
    assert sampler._rows.by_name[name].holds(torch.tensor([5, 6, 7])).tolist() == [True, False, True]
    other.fall_silent()
    other.speak()
    assert trainer.shared().rows == {}, "it has not read since, so it knows of no silence"
    sampler.adopt(before)
    assert sampler._rows.by_name == {}
    trainer._drop_what_may_be_old()
    read()
    sampler.adopt(trainer.shared())
    assert list(sampler._rows.by_name) == [name]


def test_a_silence_amid_a_look_at_what_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue looks in a thread of its own: rows of before went out as rows that were read after it."""
    store = object.__new__(HaloStore)
    written = SimpleNamespace(num_silences=0)
    store._written, store._rows, store._num_silences = cast(WrittenFields, written), HeldFields(), 0
    held = HeldRows(torch.zeros(3, 1), 10, share=True)
    held.fetch(torch.tensor([5]), lambda ids: torch.ones(len(ids), 1), float("inf"))
    store._rows.put("feat", held)

    def hear_of_a_silence(store: HaloStore) -> None:
        """What the store looks at in the midst: the main thread hears of a silence, and reads."""
        written.num_silences = 1
        store._drop_what_may_be_old()

    monkeypatch.setattr(HaloStore, "halo_graph", property(hear_of_a_silence), raising=False)
    shared = store.shared()
    assert (list(shared.rows), shared.num_silences) == (["feat"], 0)


def test_who_speaks_again_waits_for_its_own_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be on their way to any server, and the first that hears of it lets rows be held again."""
    servers = Servers((True, True), monkeypatch)
    fields = WrittenFields(servers.client(0))
    fields.fall_silent()
    servers.got.clear()
    fields.speak()
    asked, told = servers.got[:2], servers.got[2:]
    assert asked == [(0, "DeleteDataRequest"), (1, "DeleteDataRequest")]
    assert told == [(0, "SilenceRequest"), (1, "SilenceRequest")]


def test_a_server_that_does_not_answer_is_no_reason_to_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Servers((True, True), monkeypatch)
    fields = WrittenFields(servers.client(0))
    monkeypatch.setattr(rpc, "send_request", lambda *args: None)
    with pytest.raises(ExchangeError, match="did not answer SilenceRequest within 300 s"):
        fields.fall_silent()


@pytest.mark.parametrize(("num_parts", "is_told"), [(2, True), (1, False)])
def test_who_has_read_nothing_announces_what_it_wrote(
    num_parts: int, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer whose sampler processes read everything may still write into its part."""
    client = object()
    book = SimpleNamespace(num_partitions=lambda: num_parts)
    graph = SimpleNamespace(_client=client, get_partition_book=lambda: book)
    monkeypatch.setattr(plugin_module, "_graphs", {"g": graph})
    done: list[str] = []
    fields = SimpleNamespace(announce_direct_writes=lambda: done.append("announced"))
    plugin = plugin_module.HaloPlugin(HaloConfig())
    monkeypatch.setattr(plugin, "written_fields", lambda of: fields if of is client else None)
    plugin._barrier(lambda of: done.append("barrier"), client)
    assert done == ["announced", "barrier"][not is_told :]
    plugin._barrier(lambda of: done.append("of another"), object())
    assert done[-1] == "of another"
    assert "announced" not in done[1:]


@pytest.mark.parametrize(("name", "expected"), [("default", True), ("sampler", False)])
def test_sampler_processes_share_with_nobody(name: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGL_NUM_SAMPLER", "2")
    monkeypatch.setattr(role, "CUR_ROLE", name)
    assert plugin_module._has_samplers() is expected
