# SPDX-License-Identifier: Apache-2.0
"""Counts what DistDGL as it is reads from other machines, apart from the plugin's own counters."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from dgl.distributed import graph_services, kvstore


class StockCounts:
    """Inside the `with`: rows of every `KVClient.pull` that lie elsewhere, and every `SamplingRequest` that is made.

    Only for use with the plugin off: then each such request is sent to another machine, since DistDGL draws the
    neighbours of its own vertices without one.
    """

    def __init__(self) -> None:
        self.remote_rows = 0
        self.remote_sampling_requests = 0
        self.remote_seeds = 0

    def __enter__(self) -> StockCounts:
        self._pull, self._init = kvstore.KVClient.pull, graph_services.SamplingRequest.__init__
        pull, init = self._pull, self._init
        counts = self

        def counting_pull(client: Any, name: str, id_tensor: Any) -> Any:
            parts = client._part_policy[name].to_partid(id_tensor)
            counts.remote_rows += int((parts != client.machine_id).sum())
            return pull(client, name, id_tensor)

        def counting_init(request: Any, nodes: Any, *args: Any, **kwargs: Any) -> None:
            counts.remote_sampling_requests += 1
            counts.remote_seeds += len(nodes)
            init(request, nodes, *args, **kwargs)

        kvstore.KVClient.pull = counting_pull
        graph_services.SamplingRequest.__init__ = counting_init
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        kvstore.KVClient.pull = self._pull
        graph_services.SamplingRequest.__init__ = self._init

    def to_json(self) -> dict[str, int]:
        return {
            "remote_rows": self.remote_rows,
            "remote_sampling_requests": self.remote_sampling_requests,
            "remote_seeds": self.remote_seeds,
        }
