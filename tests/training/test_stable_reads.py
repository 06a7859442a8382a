# SPDX-License-Identifier: Apache-2.0
"""Rows that servers hand out: ordinary tensors that can be left on disk; gradients of learnt ones are summed."""

from __future__ import annotations

import contextlib
import gc
import sys
import tempfile
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from dgl.distributed import DistEmbedding, kvstore
from torch import Tensor

import dgl_hybrid
from dgl_hybrid.errors import HybridError
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.connect import create_communicator
from dgl_hybrid.exchange.ids import Ownership
from dgl_hybrid.ops.cpu import resting_rows
from dgl_hybrid.sampling import hooks
from dgl_hybrid.training import stable_reads
from dgl_hybrid.training.fields import RowSets
from dgl_hybrid.training.stable_reads import StableReads

NAME = "node~_N~feat"


class Client:
    """Of one trainer, without servers."""

    def __init__(self, rows: Tensor) -> None:
        self.data_store = {NAME: rows}
        self.num_servers = 0

    def pull(self, name: str, id_tensor: Tensor) -> Tensor:
        return self.data_store[name][id_tensor]

    def push(self, name: str, id_tensor: Tensor, data_tensor: Tensor) -> None:
        self.data_store[name][id_tensor] = data_tensor

    def barrier(self) -> None:
        pass


class UnconnectedClient(kvstore.KVClient):  # type: ignore[misc]
    """Of DGL's own kind."""

    asked: list[str]

    def barrier(self) -> None:
        self.asked.append("barrier")


@pytest.mark.skipif(sys.platform != "linux", reason="rows are left on disk on Linux alone")
@pytest.mark.parametrize("evaluates_first", [False, True])
def test_rows_of_servers_rest_though_an_evaluation_reads_them_first(
    evaluates_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resting_rows, "_folder_on_disk", tempfile.gettempdir)
    stored = torch.rand(100, resting_rows.LEAST_BYTES // 200)
    communicator = create_communicator()
    owned = Ownership(offsets=torch.tensor([0, 100]), rank=0)
    row_sets, ids = RowSets(communicator), torch.arange(99, -1, -1)
    row_sets.register_nodes(ids)
    client = Client(stored)
    reads = StableReads(client, communicator, row_sets, owned, owned)
    with torch.inference_mode(evaluates_first):
        rows = client.pull(name=NAME, id_tensor=ids)
    assert not rows.is_inference()
    assert resting_rows.leave_on_disk(rows) > 0
    assert client.pull(name=NAME, id_tensor=ids) is rows
    assert reads.num_pulls == 1
    assert torch.equal(rows, stored.flip(0))


def test_fields_may_be_made_in_inference_mode() -> None:
    """A script that infers layer by layer into `DistTensor`s in it failed at its first barrier."""
    communicator = create_communicator()
    owned = Ownership(offsets=torch.tensor([0, 4]), rank=0)
    row_sets, ids = RowSets(communicator), torch.arange(3, -1, -1)
    row_sets.register_nodes(ids)
    client = Client(torch.rand(4, 2))
    with torch.inference_mode():
        client.data_store["node~_N~before"] = torch.rand(4, 2)
        reads = StableReads(client, communicator, row_sets, owned, owned)
        client.data_store["node~_N~layer_0"] = torch.zeros(4, 2)
        client.barrier()
    for name in ("node~_N~before", "node~_N~layer_0"):
        stored = client.data_store[name]
        assert torch.equal(client.pull(name=name, id_tensor=ids), stored.flip(0))
        with torch.inference_mode():
            stored.add_(1.0)
        client.barrier()
        assert torch.equal(client.pull(name=name, id_tensor=ids), stored.flip(0)), "writes count, as nobody counts them"
    assert reads.num_pulls == 4


class Rows(Client):
    """Also the `DistTensor` of an embedding."""

    kvstore_key = NAME

    def __getitem__(self, ids: Tensor) -> Tensor:
        return self.pull(name=NAME, id_tensor=ids)


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("is_in_epoch", [True, False])
@pytest.mark.parametrize("asked_for", ["cpu", "meta"])
def test_gradients_of_embeddings_are_summed_on_any_device(
    asked_for: str, is_in_epoch: bool, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`DistEmbedding(ids, device)` hands out a copy if that is not where the rows were read to. What was watched was
    the tensor that it is a copy of: gradients were those of one rank, without a word."""
    communicator = Communicator(None)
    communicator.world_size = 2
    monkeypatch.setattr(communicator, "agreed", contextlib.nullcontext)
    row_sets, ids = RowSets(communicator), torch.arange(6)
    if is_known:
        row_sets.register_nodes(ids)
    owned = Ownership(offsets=torch.tensor([0, 3, 6]), rank=0)
    client = Rows(torch.rand(6, 4))
    reads = StableReads(client, communicator, row_sets, owned, owned)
    embedding = DistEmbedding.__new__(DistEmbedding)
    embedding._tensor, embedding._trace = client, []
    settled: list[str] = []
    step: Any = UnfinishedStep()
    if is_in_epoch:
        reads.follow(step)

    def settle(grad: Tensor, ids_global: Tensor, *_: object) -> Tensor:
        assert torch.equal(ids_global, torch.arange(6))
        settled.append(grad.device.type)
        return grad

    with mock.patch.object(stable_reads, "settle_gradient", settle):
        for _ in range(2):
            rows = embedding(ids, torch.device(asked_for))
            reads.note_forward()
            (2 * rows).sum().backward()
        with torch.no_grad():
            assert not embedding(ids, torch.device(asked_for)).requires_grad
    assert [leaf.device.type for _, leaf in embedding._trace] == [asked_for] * 2
    # Ids of a script's own are those of sampled training, but within an epoch of the full graph.
    assert settled == [asked_for] * 2 * (is_known or is_in_epoch)
    if is_in_epoch and not is_known:
        agreed: list[int] = []

        @contextlib.contextmanager
        def agree() -> Iterator[None]:
            agreed.append(1)
            yield

        monkeypatch.setattr(communicator, "agreed", agree)
        for is_left in (False, True):
            step.is_left = is_left
            rows = embedding(torch.tensor([4, 4]))  # of one rank, perhaps, and of no loss
            with pytest.raises(HybridError, match="asked for 2 rows, some of them twice"):
                (2 * rows).sum().backward()
        assert len(agreed) == 2, "raised on all ranks: others are in that backward, too"
        step.was_trained = True  # what is learnt from now on is of batches of the script's own
        (embedding(torch.tensor([4, 4])) * 2).sum().backward()
        step.is_left, step.is_over = False, True
        (embedding(torch.tensor([4, 4])) * 2).sum().backward()
        # As `infer` leaves it, which takes a batch and evaluates: sampled training that comes after is not of it.
        step.is_left, step.is_over, step.was_trained, step.with_gradients = True, False, False, False
        (embedding(torch.tensor([4, 4])) * 2).sum().backward()


class UnfinishedStep:
    is_over = is_replaced = is_left = was_trained = False
    with_gradients = True


def test_embeddings_are_dgls_own_when_no_graph_is_left() -> None:
    gc.collect()  # graphs of other tests
    before = DistEmbedding.__call__
    communicator = create_communicator()
    owned = Ownership(offsets=torch.tensor([0, 3]), rank=0)
    client = Client(torch.rand(3, 2))
    reads = StableReads(client, communicator, RowSets(communicator), owned, owned)
    assert DistEmbedding.__call__ is not before
    del reads, client
    gc.collect()
    assert DistEmbedding.__call__ is before


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 1, 0)])
def test_a_client_keeps_nothing_of_graphs_that_are_gone(order: tuple[int, ...]) -> None:
    """It is the process's own, and outlives them; some end before those that came later."""
    gc.collect()
    num_answers = len(hooks._answers)
    client = object.__new__(UnconnectedClient)
    client._data_store, client.asked = {NAME: torch.rand(3, 2)}, []
    before, asked = dict(vars(client)), client.asked
    owned = Ownership(offsets=torch.tensor([0, 3]), rank=0)
    views = [StableReads(client, Communicator(None), RowSets(Communicator(None)), owned, owned) for _ in range(3)]
    for number, view in enumerate(views):
        view.agree = lambda number=number: asked.append(f"view {number}")  # type: ignore[method-assign,misc]
    del view
    alive = {0, 1, 2}
    for number in order:
        client.barrier()
        assert asked == ["barrier", *(f"view {one}" for one in sorted(alive))]
        asked.clear()
        assert len(hooks._answers) == num_answers + len(alive)
        views[number] = None  # type: ignore[call-overload]
        gc.collect()
        alive.remove(number)
    assert vars(client) == before
    assert len(hooks._answers) == num_answers


def test_rows_of_a_written_field_are_told_from_those_that_stay() -> None:
    """Results of both are kept by a first layer; a push into one leaves those of the other."""
    row_sets, ids, other = RowSets(Communicator(None)), torch.arange(3), "node~_N~pred"
    row_sets.register_nodes(ids)
    owned = Ownership(offsets=torch.tensor([0, 3]), rank=0)
    client = Client(torch.rand(3, 2))
    client.data_store[other] = torch.rand(3, 2)
    reads = StableReads(client, Communicator(None), row_sets, owned, owned)
    rows, predictions = (client.pull(name=name, id_tensor=ids) for name in (NAME, other))
    client.push(other, ids, torch.rand(3, 2))
    reads.spread_writes(reads.find_writes())
    assert reads.identify(NAME, rows, is_current=True)
    assert reads.identify(other, predictions), "until it is read again"
    assert not reads.identify(other, predictions, is_current=True)
    assert client.pull(name=NAME, id_tensor=ids) is rows
    again = client.pull(name=other, id_tensor=ids)
    assert again is not predictions
    assert reads.identify(other, again, is_current=True)
    dgl_hybrid.disable()


def test_what_was_learned_goes_when_a_step_is_done() -> None:
    """Rows and their gradient lay here until others were read, and until then beside those."""
    row_sets, ids = RowSets(Communicator(None)), torch.arange(3)
    row_sets.register_nodes(ids)
    owned = Ownership(offsets=torch.tensor([0, 3]), rank=0)
    client = Client(torch.rand(3, 2))
    reads = StableReads(client, Communicator(None), row_sets, owned, owned)
    rows = client.pull(name=NAME, id_tensor=ids).requires_grad_()
    rows.sum().backward()
    learned = weakref.ref(rows)
    client.push(NAME, ids, rows.detach() - rows.grad)
    del rows
    assert learned() is None
    assert client.pull(name=NAME, id_tensor=ids) is client.pull(name=NAME, id_tensor=ids)
    assert reads.num_pulls == 2
    dgl_hybrid.disable()


def test_rows_that_are_read_again_do_not_lie_beside_those_of_before() -> None:
    row_sets, ids = RowSets(Communicator(None)), torch.arange(3)
    row_sets.register_nodes(ids)
    owned = Ownership(offsets=torch.tensor([0, 3]), rank=0)
    before: list[weakref.ref[Tensor]] = []
    were_there: list[bool] = []

    class Watched(Client):
        def pull(self, name: str, id_tensor: Tensor) -> Tensor:
            were_there.extend(reference() is not None for reference in before)
            return super().pull(name, id_tensor)

    client = Watched(torch.rand(3, 2))
    reads = StableReads(client, Communicator(None), row_sets, owned, owned)
    before.append(weakref.ref(client.pull(name=NAME, id_tensor=ids)))
    client.push(NAME, ids, torch.rand(3, 2))
    client.pull(name=NAME, id_tensor=ids)
    assert were_there == [False]
    assert reads.num_pulls == 2
    dgl_hybrid.disable()


@pytest.mark.parametrize("is_leaf_of_script", [True, False])
def test_gradients_of_rows_that_are_gone_are_still_summed(is_leaf_of_script: bool) -> None:
    """Somebody else's push comes between the read of what is learned and the model's call."""
    communicator = Communicator(None)
    communicator.world_size = 2
    row_sets, ids = RowSets(communicator), torch.arange(6)
    row_sets.register_nodes(ids)
    owned = Ownership(offsets=torch.tensor([0, 3, 6]), rank=0)
    client = Rows(torch.rand(6, 4))
    reads = StableReads(client, communicator, row_sets, owned, owned)
    embedding = DistEmbedding.__new__(DistEmbedding)
    embedding._tensor, embedding._trace = client, []
    settled: list[Tensor] = []

    def settle(grad: Tensor, ids_global: Tensor, *_: object) -> Tensor:
        settled.append(ids_global)
        return grad

    with mock.patch.object(stable_reads, "settle_gradient", settle):
        rows = client.pull(name=NAME, id_tensor=ids).requires_grad_() if is_leaf_of_script else embedding(ids)
        client.push(NAME, torch.tensor([1]), torch.rand(1, 4))
        reads.note_forward()
        (2 * rows).sum().backward()
    assert [found.tolist() for found in settled] == [list(range(6))]
    dgl_hybrid.disable()


def test_disable_gives_dgls_functions_back_until_the_next_epoch() -> None:
    gc.collect()
    of_embeddings = DistEmbedding.__call__
    row_sets, ids = RowSets(Communicator(None)), torch.arange(3)
    row_sets.register_nodes(ids)
    owned = Ownership(offsets=torch.tensor([0, 3]), rank=0)
    client = Client(torch.rand(3, 2))
    views = [StableReads(client, Communicator(None), row_sets, owned, owned) for _ in range(2)]
    rows = client.pull(name=NAME, id_tensor=ids)
    assert set(vars(client)) == {"data_store", "num_servers", "push", "barrier", "pull"}
    dgl_hybrid.disable()
    assert DistEmbedding.__call__ is of_embeddings
    assert set(vars(client)) == {"data_store", "num_servers"}
    client.push(NAME, ids, 2 * rows)
    with torch.no_grad():
        views[0].note_forward()
    with pytest.raises(HybridError, match="since a FullGraphLoader on a DistGraph has yielded this batch"):
        views[0].note_forward()
    written = views[0].find_writes()  # which begins an epoch
    assert written == {NAME}
    views[0].spread_writes(written)
    again = client.pull(name=NAME, id_tensor=ids)
    assert torch.equal(again, 2 * rows)
    assert client.pull(name=NAME, id_tensor=ids) is again
    assert views[0].find_writes() == set()
    views[0].note_forward()
    dgl_hybrid.disable()


def test_under_a_function_of_somebody_elses_a_watch_that_is_over_does_nothing() -> None:
    row_sets, ids = RowSets(Communicator(None)), torch.arange(3)
    row_sets.register_nodes(ids)
    owned = Ownership(offsets=torch.tensor([0, 3]), rank=0)
    client = Client(torch.rand(3, 2))
    reads = StableReads(client, Communicator(None), row_sets, owned, owned)
    ours, calls = client.pull, []

    def profiled(name: str, id_tensor: Tensor) -> Tensor:
        calls.append(name)
        return ours(name=name, id_tensor=id_tensor)

    client.pull = profiled  # type: ignore[method-assign]
    dgl_hybrid.disable()
    first = client.pull(name=NAME, id_tensor=ids)
    assert client.pull(name=NAME, id_tensor=ids) is not first
    reads.find_writes()
    rows = client.pull(name=NAME, id_tensor=ids)
    assert client.pull(name=NAME, id_tensor=ids) is rows
    assert (calls, reads.num_pulls) == ([NAME] * 3, 1)
    dgl_hybrid.disable()
