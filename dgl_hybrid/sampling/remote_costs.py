# SPDX-License-Identifier: Apache-2.0
"""Measures what a remote row and a remote sampling seed take here, against an empty message."""

from __future__ import annotations

import time
from collections.abc import Callable

from dgl.distributed import graph_services, rpc
from torch import Tensor

from dgl_hybrid.sampling.choose import RemoteCosts
from dgl_hybrid.sampling.counts import COUNTS

_FEW, _MANY, _REPEATS = 1, 2048, 5
_SMALLEST_S = 1e-9  # a difference of two timings can come out as nothing, or less


def measure_remote_costs(
    pull: Callable[[Tensor], Tensor] | None, ids: Tensor, owner: int, *, fanout: int, row_ids: Tensor
) -> RemoteCosts:
    """Times small and larger messages to one other machine; the least of a few tries each.

    Args:
        pull: Reads rows of the widest field by id, or None when there is no field.
        ids: (n,) homogeneous ids of vertices that machine `owner` owns, n > 0.
        fanout: Of the sampling requests.
        row_ids: (n,) the ids of the same vertices as `pull` takes them.
    """

    def sample(number: int) -> None:
        COUNTS.fill_seeds += len(ids[:number])
        rpc.remote_call_to_machine([(owner, graph_services.SamplingRequest(ids[:number], fanout))])

    many = min(_MANY, len(ids))
    latency_s = _least_s(lambda: sample(_FEW))
    seed_s = (_least_s(lambda: sample(many)) - latency_s) / max(many - _FEW, 1)
    row_s = 0.0
    if pull is not None:
        few_s, many_s = _least_s(lambda: pull(row_ids[:_FEW])), _least_s(lambda: pull(row_ids[:many]))
        row_s = (many_s - few_s) / max(many - _FEW, 1)
    return RemoteCosts(row_s=max(row_s, _SMALLEST_S), seed_s=max(seed_s, _SMALLEST_S), latency_s=latency_s)


def _least_s(call: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS):
        start_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - start_s)
    return min(times)
