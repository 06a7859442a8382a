# SPDX-License-Identifier: Apache-2.0
"""Measures what a remote row and a remote sampling seed take here, against an empty message."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from dgl.distributed import graph_services, rpc
from torch import Tensor

from dgl_hybrid.sampling.choose import RemoteCosts
from dgl_hybrid.sampling.counts import COUNTS

_FEW, _MANY = 1, 2048
_REPEATS, _MOST_REPEATS = 5, 20
_CLEAR = 1.0
"""Many items have been told from an empty message once they take longer by so many times what that takes."""
_LEAST_SEED_S, _LEAST_ROW_S = 2e-7, 5e-8
"""What one takes its owner and the memory of both, without any network. Where processes share cores, a difference of
two timings can come out as nothing, or less, and all of the budget would go to the other kind."""


def measure_remote_costs(
    pull: Callable[[Tensor], Tensor] | None, ids: Tensor, owner: int, *, fanout: int, row_ids: Tensor
) -> RemoteCosts:
    """Times small and larger messages to one other machine, in turns; the least of a few tries each.

    Args:
        pull: Reads rows of the widest field by id, or None when there is no field.
        ids: (n,) homogeneous ids of vertices that machine `owner` owns, n > 0.
        fanout: Of the sampling requests.
        row_ids: (n,) the ids of the same vertices as `pull` takes them.
    """

    def sample(number: int) -> None:
        COUNTS.fill_seeds += len(ids[:number])
        rpc.remote_call_to_machine([(owner, graph_services.SamplingRequest(ids[:number], fanout))])

    # Of few vertices the same ones several times: what a hundred take is lost in what an empty message does.
    often = -(-_MANY // len(ids))
    ids, row_ids = ids.repeat(often)[:_MANY], row_ids.repeat(often)[:_MANY]
    latency_s, seed_s = _message_and_item_s(lambda: sample(_FEW), lambda: sample(_MANY))
    row_s = 0.0
    if pull is not None:
        _, row_s = _message_and_item_s(lambda: pull(row_ids[:_FEW]), lambda: pull(row_ids))
    return RemoteCosts(row_s=max(row_s, _LEAST_ROW_S), seed_s=max(seed_s, _LEAST_SEED_S), latency_s=latency_s)


def _message_and_item_s(few: Callable[[], object], many: Callable[[], object]) -> tuple[float, float]:
    """Returns what a message of `_FEW` items takes, and what each further one does; in turns, as long as they are near
    each other.
    """
    few_s = many_s = math.inf
    for repeat in range(_MOST_REPEATS):
        few_s, many_s = min(few_s, _time_s(few)), min(many_s, _time_s(many))
        if repeat + 1 >= _REPEATS and many_s - few_s > _CLEAR * few_s:
            break
    return few_s, (many_s - few_s) / (_MANY - _FEW)


def _time_s(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s
