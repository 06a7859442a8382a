# SPDX-License-Identifier: Apache-2.0
"""Who wrote into the graph's own data: a table of flags that every machine's server shares with its clients.

Rows that a partition was loaded with may be held by other machines, as long as nobody writes into them. A client that
is about to push into such a field first tells the main server of every machine, and waits for all answers; each server
sets the field's flag in memory that its clients look at before every read. From then on the field is read from its
owners, everywhere, until the job ends. So whoever learns of a write by any means reads what was written.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from typing import Any

from dgl import backend as dgl_backend
from dgl.distributed import kvstore, rpc
from dgl.ndarray import empty_shared_mem, exist_shared_mem_array
from torch import Tensor

NUM_FLAGS = 4096
STATIC_NAMES_SERVICE = 0x48590001
WRITTEN_SERVICE = 0x48590002


class StaticNamesRequest(rpc.Request):
    """Asks a server which fields its partition was loaded with."""

    def __init__(self) -> None:
        self.question = "static names"

    def __getstate__(self) -> Any:
        return self.question

    def __setstate__(self, state: Any) -> None:
        self.question = state

    def process_request(self, server_state: Any) -> Any:
        return StaticNamesResponse(sorted(server_state.kv_store.orig_data))


class StaticNamesResponse(rpc.Response):
    """Names as the KVStore has them."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __getstate__(self) -> Any:
        return self.names

    def __setstate__(self, state: Any) -> None:
        self.names = state


class WrittenRequest(rpc.Request):
    """Tells a server that a field is about to be written; answered once its flag is set."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getstate__(self) -> Any:
        return self.name

    def __setstate__(self, state: Any) -> None:
        self.name = state

    def process_request(self, server_state: Any) -> Any:
        table = getattr(server_state.kv_store, _TABLE_ATTRIBUTE, None)
        if table is not None:
            table[_flag_of(self.name)] = 1
        return WrittenResponse(self.name)


class WrittenResponse(rpc.Response):
    """The flag is set."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getstate__(self) -> Any:
        return self.name

    def __setstate__(self, state: Any) -> None:
        self.name = state


_TABLE_ATTRIBUTE = "_dgl_hybrid_written"


def register_services() -> None:
    """Makes the requests known to DGL, in servers and clients alike."""
    rpc.register_service(STATIC_NAMES_SERVICE, StaticNamesRequest, StaticNamesResponse)
    rpc.register_service(WRITTEN_SERVICE, WrittenRequest, WrittenResponse)


def publish_table(server: Any) -> None:
    """Makes the table of this machine; called in its main server, which keeps it for as long as it lives."""
    shared = empty_shared_mem(_table_name(server._server_namebook[server.server_id]), True, (NUM_FLAGS,), "int64")
    table = dgl_backend.zerocopy_from_dlpack(shared.to_dlpack())
    table.zero_()
    setattr(server, _TABLE_ATTRIBUTE, table)


def _table_name(main_server: Sequence[Any]) -> str:
    """One host may serve several jobs, and users: the port tells them apart, or who it is that left one behind."""
    return f"/dgl_hybrid_written_{os.getuid()}_{main_server[2]}"


def _flag_of(name: str) -> int:
    # Two fields that share a flag are given up together, which costs reads and nothing else.
    return zlib.crc32(name.encode()) % NUM_FLAGS


def is_served(client: Any) -> bool:
    """Whether the main server of this client's machine runs with the plugin."""
    return isinstance(client, kvstore.KVClient) and exist_shared_mem_array(_table_name(_main_server_of(client)))


def _main_server_of(client: Any) -> Sequence[Any]:
    entry: Sequence[Any] = client._server_namebook[client.machine_id * rpc.get_num_server_per_machine()]
    return entry


class WrittenFields:
    """A client's view: which fields may be held, and telling everybody before one is written.

    Args:
        client: The KVStore's client of this process.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._told: set[str] = set()
        self._table: Tensor | None = None
        self.static_names: frozenset[str] = frozenset()
        """Fields that the partition was loaded with; empty when the server runs without the plugin."""
        if is_served(client):
            shared = empty_shared_mem(_table_name(_main_server_of(client)), False, (NUM_FLAGS,), "int64")
            self._table = dgl_backend.zerocopy_from_dlpack(shared.to_dlpack())
            rpc.send_request(client.machine_id * rpc.get_num_server_per_machine(), StaticNamesRequest())
            self.static_names = frozenset(rpc.recv_response().names)

    def is_of(self, client: Any) -> bool:
        """Whether this is the view of that client."""
        return self._client is client

    @property
    def is_guarded(self) -> bool:
        """Whether the server of this machine tells us of writes; without that no row can be held."""
        return self._table is not None

    def may_hold(self, name: str) -> bool:
        """Whether this field's rows are still those of the partition, and served the ordinary way."""
        return (
            self._table is not None
            and name in self.static_names
            and int(self._table[_flag_of(name)]) == 0
            and self._client._pull_handlers.get(name) is kvstore.default_pull_handler
        )

    def announce(self, name: str) -> None:
        """Tells every machine that this field will be written, before it is; returns when all of them know."""
        if self._table is None or name not in self.static_names or name in self._told:
            return
        per_machine = rpc.get_num_server_per_machine()
        main_servers = range(0, self._client.num_servers, per_machine)
        for server in main_servers:
            rpc.send_request(server, WrittenRequest(name))
        for _ in main_servers:
            rpc.recv_response()
        self._told.add(name)

    def announce_direct_writes(self) -> None:
        """Announces fields whose shared-memory part this process wrote into without a push (`local_partition`)."""
        if self._table is None:
            return
        for name in self.static_names - self._told:
            part = self._client._data_store.get(name)
            if part is not None and part._version > 0:
                self.announce(name)
