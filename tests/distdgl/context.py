# SPDX-License-Identifier: Apache-2.0
"""What a check inside a trainer gets (`Context`) and gives (`Findings`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import dgl
import torch
import torch.distributed as dist
from dgl.distributed import rpc
from torch import Tensor

from tests.helpers.distdgl import ETYPE, Truth


@dataclass(slots=True)
class Findings:
    """How much was compared, what was wrong, and figures for the test outside to judge."""

    compared: int = 0
    wrong: list[str] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    def same(self, what: str, got: Tensor, expected: Tensor, *, rtol: float = 0.0, atol: float = 0.0) -> None:
        """Compares element by element; dtype and shape too."""
        self.compared += expected.numel()
        if got.dtype != expected.dtype or got.shape != expected.shape:
            self.wrong.append(f"{what}: {got.dtype} {tuple(got.shape)}, not {expected.dtype} {tuple(expected.shape)}")
            return
        differ = got != expected if rtol == 0.0 == atol else ~torch.isclose(got, expected, rtol=rtol, atol=atol)
        if bool(differ.any()):
            where = differ.nonzero()[0].tolist()
            self.wrong.append(
                f"{what}: {int(differ.sum())} of {differ.numel()} differ, first at {where}: "
                f"{got[tuple(where)].item()}, not {expected[tuple(where)].item()}"
            )

    def same_ids(self, what: str, got: Tensor, expected: Tensor) -> None:
        """Compares as multisets."""
        self.same(f"{what} (sorted)", got.sort()[0], expected.sort()[0])

    def true(self, what: str, holds: bool) -> None:
        self.compared += 1
        if not holds:
            self.wrong.append(what)

    def equal(self, what: str, got: object, expected: object) -> None:
        self.true(f"{what}: {got!r}, not {expected!r}", got == expected)

    def raises(self, what: str, error: type[BaseException], call: Callable[[], object]) -> None:
        self.compared += 1
        try:
            call()
        except error:
            return
        self.wrong.append(f"{what}: no {error.__name__}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The running graph beside the truth. Global ids are the partitioned graph's, original ids the truth's."""

    g: dgl.distributed.DistGraph
    truth: Truth
    rank: int
    world: int
    plugin: bool
    seed: int

    def orig_nodes(self, ids: Tensor, ntype: str | None = None) -> Tensor:
        """Original ids of global ids."""
        return self.truth.orig_nodes[ntype or self.g.ntypes[0]][ids]

    def orig_edges(self, ids: Tensor, etype: ETYPE | None = None) -> Tensor:
        return self.truth.orig_edges[etype or self.g.canonical_etypes[0]][ids]

    def nodes_of(self, orig: Tensor, ntype: str | None = None) -> Tensor:
        """Global ids of original ids."""
        return inverse(self.truth.orig_nodes[ntype or self.g.ntypes[0]])[orig]

    def edges_of(self, orig: Tensor, etype: ETYPE | None = None) -> Tensor:
        return inverse(self.truth.orig_edges[etype or self.g.canonical_etypes[0]])[orig]

    def owned(self, ids: Tensor, ntype: str = "_N") -> Tensor:
        """Which of these vertices this machine owns."""
        book = self.g.get_partition_book()
        return book.nid2partid(ids, ntype) == book.partid

    def generator(self, salt: int = 0, *, same_on_all: bool = False) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * salt + (0 if same_on_all else self.rank))

    def some(self, size: int, count: int, salt: int = 0) -> Tensor:
        """`count` different numbers below `size`, other ones on each rank."""
        return torch.randperm(size, generator=self.generator(salt))[:count]

    def fence(self) -> None:
        """Until here, all writes of all trainers have been carried out.

        With the plugin on that is what `g.barrier()` promises; without it each trainer first asks every server for an
        answer, because a server handles one client's requests in order.
        """
        if not self.plugin:
            ask_every_server()
        self.g.barrier()

    def gather(self, value: Any) -> list[Any]:
        """Every trainer's value, in rank order; collective."""
        out: list[Any] = [None] * self.world
        dist.all_gather_object(out, value)
        return out


def ask_every_server() -> None:
    for server in range(rpc.get_num_server()):
        rpc.send_request(server, rpc.GetNumberClientsRequest(rpc.get_rank()))
    for _ in range(rpc.get_num_server()):
        rpc.recv_response()


def inverse(order: Tensor) -> Tensor:
    out = torch.empty_like(order)
    out[order] = torch.arange(len(order))
    return out


Check = Callable[[Context, Findings], None]


@dataclass(frozen=True, slots=True)
class NamedCheck:
    """A check and when it may run."""

    name: str
    run: Check
    needs_plugin: bool = False
    """Stock DGL 2.1 fails it, and would hang or end a server."""


def named(*checks: Check, needs_plugin: bool = False) -> list[NamedCheck]:
    """Names checks by their functions: `check_features` is `features`."""
    return [NamedCheck(f.__name__.removeprefix("check_"), f, needs_plugin) for f in checks]
