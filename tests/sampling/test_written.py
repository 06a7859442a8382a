# SPDX-License-Identifier: Apache-2.0
"""Which servers tell of writes is asked of those that run, in a way that all of them answer."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import dgl_hybrid

# isort: split
import pytest
from dgl.distributed import kvstore, rpc
from dgl.ndarray import empty_shared_mem

from dgl_hybrid.errors import ExchangeError
from dgl_hybrid.sampling import written
from dgl_hybrid.sampling.written import WrittenFields, is_served, publish_table

PORTS = (61001, 61002)


class Servers:
    """The main servers of two machines, in this process; of some the plugin is off."""

    def __init__(self, with_plugin: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        self.namebook = {k: [k, f"10.0.0.{k}", port, 1] for k, port in enumerate(PORTS)}
        self.states = [self._start(k, is_on) for k, is_on in enumerate(with_plugin)]
        self.answers: list[Any] = []
        self.got: list[tuple[int, str]] = []
        monkeypatch.setattr(rpc, "get_num_server_per_machine", lambda: 1)
        monkeypatch.setattr(rpc, "send_request", self._send)
        monkeypatch.setattr(rpc, "recv_response", lambda timeout=0: self.answers.pop(0) if self.answers else None)

    def _start(self, number: int, is_on: bool) -> SimpleNamespace:
        server = SimpleNamespace(
            server_id=number, _server_namebook=self.namebook, data_store={}, orig_data={"node~_N~feat"}
        )
        if is_on:
            publish_table(server)
        return SimpleNamespace(kv_store=server)

    def _send(self, target: int, request: Any) -> None:
        state = self.states[target]
        self.got.append((target, type(request).__name__))
        if not hasattr(state.kv_store, written._TABLE_ATTRIBUTE) and not isinstance(request, kvstore.DeleteDataRequest):
            raise KeyError(f"server {target} knows no such service, and ends")
        self.answers.append(request.process_request(state))

    def client(self, machine: int) -> Any:
        client = object.__new__(kvstore.KVClient)
        client._machine_id, client._server_namebook, client._server_count = machine, self.namebook, len(self.states)
        client._pull_handlers = {"node~_N~feat": kvstore.default_pull_handler}
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


def test_a_table_that_a_killed_server_left_behind_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Servers((False, False), monkeypatch)
    left_behind = empty_shared_mem(written._table_name(servers.namebook[0]), True, (written.NUM_FLAGS,), "int64")
    client = servers.client(0)
    assert not is_served(client)
    assert not WrittenFields(client).is_guarded
    del left_behind


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
