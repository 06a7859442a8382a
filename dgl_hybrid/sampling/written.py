# SPDX-License-Identifier: Apache-2.0
"""Who wrote into the graph's own data: a table of flags that every machine's server shares with its clients.

Rows that a partition was loaded with may be held by other machines, as long as nobody writes into them. A client that
is about to push into such a field first tells the main server of every machine, and waits for all answers; each server
sets the field's flag in memory that its clients look at before every read. From then on the field is read from its
owners, everywhere, until the job ends. So whoever learns of a write by any means reads what was written.

A process whose plugin is switched off will announce nothing, and says so: nobody holds rows until it is on again. Where
a machine's server runs without the plugin, its clients are taken to do so, too, and nobody holds rows at all.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dgl import backend as dgl_backend
from dgl.distributed import kvstore, rpc
from dgl.ndarray import empty_shared_mem, exist_shared_mem_array
from torch import Tensor

from dgl_hybrid.errors import ExchangeError
from dgl_hybrid.graph.tensor_versions import sample_of, version_of

STATIC_NAMES_SERVICE = 0x48590001
WRITTEN_SERVICE = 0x48590002
SILENCE_SERVICE = 0x48590003

_NUM_SILENT, _NUM_SILENCES, _FIRST_FLAG = 0, 1, 2
"""Entries before the flags: processes whose plugin is off at the moment, and how often one was switched off."""
_ANSWER_MS = 300_000
_QUESTION = "dgl_hybrid: which table, of a flag for each field?"
"""No field has this name, so that a server without the plugin has nothing to delete, and says that it did. To be
changed with the table: a server that has another one counts as without the plugin, too."""


@dataclass(frozen=True)
class _Published:
    """What a main server keeps for this module."""

    name: str
    """Of the table, in shared memory."""
    table: Tensor
    """(`_FIRST_FLAG` + number of fields,) int64."""
    flag_of: dict[str, int]
    """The fields that the partition was loaded with, in the order of their entries in the table."""


class _OneValue:
    """What a request or an answer is of which nothing but one value is sent."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getstate__(self) -> Any:
        return self.value

    def __setstate__(self, state: Any) -> None:
        self.value = state


class StaticNamesRequest(_OneValue, rpc.Request):
    """Asks a server which fields its partition was loaded with; the value says nothing."""

    def process_request(self, server_state: Any) -> Any:
        published = _published_by(server_state.kv_store)
        return StaticNamesResponse([] if published is None else list(published.flag_of))


class StaticNamesResponse(_OneValue, rpc.Response):
    """Names as the KVStore has them, in the order of their flags."""


class WrittenRequest(_OneValue, rpc.Request):
    """Tells a server that a field is about to be written, by its name; answered once its flag is set."""

    def process_request(self, server_state: Any) -> Any:
        published = _published_by(server_state.kv_store)
        # By name, as machines number their fields for themselves. What was not loaded here is held by nobody here.
        if published is not None and self.value in published.flag_of:
            published.table[published.flag_of[self.value]] = 1
        return WrittenResponse(self.value)


class WrittenResponse(_OneValue, rpc.Response):
    """The flag is set."""


class SilenceRequest(_OneValue, rpc.Request):
    """Tells a server that a process will write without telling (1), or that it tells again (-1)."""

    def process_request(self, server_state: Any) -> Any:
        published = _published_by(server_state.kv_store)
        if published is not None:
            published.table[_NUM_SILENT] += self.value
            published.table[_NUM_SILENCES] += int(self.value > 0)
        return SilenceResponse(self.value)


class SilenceResponse(_OneValue, rpc.Response):
    """The table says so."""


_PUBLISHED_ATTRIBUTE = "_dgl_hybrid_written"


def _published_by(server: Any) -> _Published | None:
    """Returns what that server published; None of a backup server, or where the plugin was off when it started."""
    published: _Published | None = getattr(server, _PUBLISHED_ATTRIBUTE, None)
    return published


def register_services() -> None:
    """Makes the requests known to DGL, in servers and clients alike."""
    rpc.register_service(STATIC_NAMES_SERVICE, StaticNamesRequest, StaticNamesResponse)
    rpc.register_service(WRITTEN_SERVICE, WrittenRequest, WrittenResponse)
    rpc.register_service(SILENCE_SERVICE, SilenceRequest, SilenceResponse)


def publish_table(server: Any) -> None:
    """Makes the table of this machine; called in its main server, which keeps it for as long as it lives."""
    flag_of = _number(sorted(server.orig_data))
    # Drawn: containers that share memory may have the same ports, and a killed server leaves its table behind.
    name = f"/dgl_hybrid_written_{secrets.token_hex(8)}"
    table = _map_table(name, len(flag_of), create=True)
    table.zero_()
    setattr(server, _PUBLISHED_ATTRIBUTE, _Published(name, table, flag_of))


def _number(names: Sequence[str]) -> dict[str, int]:
    return {name: _FIRST_FLAG + number for number, name in enumerate(names)}


def _map_table(table_name: str, num_flags: int, *, create: bool = False) -> Tensor:
    shared = empty_shared_mem(table_name, create, (_FIRST_FLAG + num_flags,), "int64")
    table: Tensor = dgl_backend.zerocopy_from_dlpack(shared.to_dlpack())
    return table


def answer_deletion(original: Callable[..., Any], request: Any, server_state: Any) -> Any:
    """Put around what servers do with `DeleteDataRequest`: tells the name of the table to a client that asks for it.

    A request of ours would end a server that does not know it. One of DGL's, to delete what is not there, is answered
    by every server.
    """
    published = _published_by(server_state.kv_store)
    if request.name != _QUESTION or published is None:
        return original(request, server_state)
    return kvstore.DeleteDataResponse(published.name)


def is_served(client: Any) -> bool:
    """Whether the main servers of all machines run with the plugin; asks them, of which anybody may be the first."""
    return isinstance(client, kvstore.KVClient) and not _unserved(client, _ask_for_tables(client))


def _ask_for_tables(client: Any) -> list[str | None]:
    """Returns the name of every machine's table; None where the main server runs without the plugin."""
    names: list[str | None] = []
    for server in _main_servers(client):
        # One after the other: stock answers do not say whose they are.
        rpc.send_request(server, kvstore.DeleteDataRequest(_QUESTION))
        answer = rpc.recv_response().msg
        names.append(None if answer == kvstore.DELETE_MSG else answer)
    own = names[client.machine_id]
    if own is not None and not exist_shared_mem_array(own):
        names[client.machine_id] = None  # another user's, or in another container's memory
    return names


def _unserved(client: Any, tables: Sequence[str | None]) -> tuple[str, ...]:
    return tuple(
        f"{machine} ({client._server_namebook[server][1]})"
        for machine, (server, table) in enumerate(zip(_main_servers(client), tables, strict=True))
        if table is None
    )


def _main_servers(client: Any) -> range:
    return range(0, client.num_servers, rpc.get_num_server_per_machine())


class WrittenFields:
    """A client's view: which fields may be held, and telling everybody before one is written.

    Args:
        client: The KVStore's client of this process.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._told: set[str] = set()
        self._versions: dict[str, int] = {}
        """Of the shared-memory parts, when this process spoke again."""
        self._samples: dict[str, Tensor] = {}
        """Of the static ones among them, when this process was last known to have written nothing."""
        self._sampled_at = 0
        """The number of silences then."""
        self._sampled_in_silence = False
        self._table: Tensor | None = None
        self._flag_of: dict[str, int] = {}
        """Entries of the table."""
        self.static_names: frozenset[str] = frozenset()
        """Fields that the partition was loaded with; empty where not all servers run with the plugin."""
        tables = _ask_for_tables(client) if isinstance(client, kvstore.KVClient) else []
        self.unserved = _unserved(client, tables) if tables else ()
        """The machines whose main server runs without the plugin, by number and address."""
        own = tables[client.machine_id] if tables and not self.unserved else None
        if own is not None:
            rpc.send_request(client.machine_id * rpc.get_num_server_per_machine(), StaticNamesRequest("static names"))
            self._flag_of = _number(rpc.recv_response().value)
            self._table = _map_table(own, len(self._flag_of))
            self.static_names = frozenset(self._flag_of)
            self._take_samples()

    def is_of(self, client: Any) -> bool:
        """Whether this is the view of that client."""
        return self._client is client

    @property
    def is_guarded(self) -> bool:
        """Whether the servers of all machines run with the plugin; without that no row can be held."""
        return self._table is not None

    def may_hold(self, name: str) -> bool:
        """Whether this field's rows are still those of the partition, and served the ordinary way."""
        return (
            self._table is not None
            and name in self.static_names
            and int(self._table[self._flag_of[name]]) == 0
            and int(self._table[_NUM_SILENT]) == 0
            and self._client._pull_handlers.get(name) is kvstore.default_pull_handler
        )

    def announce(self, name: str) -> None:
        """Tells every machine that this field will be written, before it is; returns when all of them know."""
        if self._table is None or name not in self.static_names or name in self._told:
            return
        self._tell(WrittenRequest(name))
        self._told.add(name)

    @property
    def num_silences(self) -> int:
        """How often a process of the job switched its plugin off; rows that were read at another number may be old."""
        return 0 if self._table is None else int(self._table[_NUM_SILENCES])

    def fall_silent(self) -> None:
        """Tells every machine that this process will announce no more writes; until it speaks, nobody holds rows."""
        if self._table is not None:
            self._tell(SilenceRequest(1))

    def speak(self) -> None:
        """Takes `fall_silent` back. What others hold from now on they read after this process's writes.

        A push is not answered, and goes to any server of a machine: each of them answers a question first, which it
        does after all that this process has sent it.
        """
        if self._table is None:
            return
        self._versions = {name: version_of(part) for name, part in self._client._data_store.items()}
        self._take_samples()
        self._ask(range(self._client.num_servers), kvstore.DeleteDataRequest(_QUESTION))
        self._tell(SilenceRequest(-1))

    def _tell(self, request: rpc.Request) -> None:
        self._ask(_main_servers(self._client), request)

    @staticmethod
    def _ask(servers: range, request: rpc.Request) -> None:
        """Sends a request to servers, and waits for the answers of all.

        Raises:
            ExchangeError: One does not answer.
        """
        for server in servers:
            rpc.send_request(server, request)
        for _ in servers:
            if rpc.recv_response(timeout=_ANSWER_MS) is None:
                raise ExchangeError(
                    f"a server of this job did not answer {type(request).__name__} within {_ANSWER_MS // 1000} s: it "
                    f"has ended, or is busy for longer than that"
                )

    def announce_direct_write(self, name: str) -> None:
        """Announces a field if PyTorch counted a write of this process into its shared-memory part (`local_partition`),
        without a push.
        """
        if self._may_be_told(name) and self._has_counted_write(name):
            self.announce(name)

    def _take_samples(self) -> None:
        parts = self._client._data_store
        self._samples = {name: sample_of(parts[name]) for name in self.static_names & set(parts)}
        self._sampled_at = self.num_silences
        self._sampled_in_silence = self._table is not None and int(self._table[_NUM_SILENT]) > 0

    def announce_direct_writes(self) -> None:
        """Announces all such fields, and those whose samples tell of a write that PyTorch did not count; looks at every
        field, so it is for what happens seldom.
        """
        if self._table is None:
            return
        for name in self.static_names - self._told:
            if self._may_be_told(name) and self._has_counted_write(name):
                self.announce(name)
        if self._sampled_at != self.num_silences or self._sampled_in_silence:
            # Those who were silent may have pushed into any part. Whatever was held then is read anew.
            self._take_samples()
            return
        for name in self.static_names - self._told:
            is_unwritten = int(self._table[self._flag_of[name]]) == 0
            if is_unwritten and self._may_be_told(name) and self._is_sampled_otherwise(name):
                self.announce(name)

    def _may_be_told(self, name: str) -> bool:
        is_static = self._table is not None and name in self.static_names and name not in self._told
        return is_static and self._client._data_store.get(name) is not None

    def _has_counted_write(self, name: str) -> bool:
        part = self._client._data_store[name]
        # Of what was made in inference mode no writes are counted, and any may have been.
        return bool(part.is_inference() or part._version > self._versions.get(name, 0))

    def _is_sampled_otherwise(self, name: str) -> bool:
        sample = sample_of(self._client._data_store[name])
        return not torch.equal(sample, self._samples.setdefault(name, sample))
