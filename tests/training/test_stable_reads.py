# SPDX-License-Identifier: Apache-2.0
"""Rows that servers hand out are ordinary tensors that can be left on disk, whoever reads them first."""

from __future__ import annotations

import sys
import tempfile

import pytest
import torch
from torch import Tensor

from dgl_hybrid.exchange.connect import create_communicator
from dgl_hybrid.exchange.ids import Ownership
from dgl_hybrid.ops.cpu import resting_rows
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
