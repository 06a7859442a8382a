# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.one_gpu`, and `benchmarks.overlap` on a GPU: what becomes of lines; PyG computes what DGL does."""

from __future__ import annotations

from typing import Any

import dgl
import pytest
import torch
from torch import nn

from benchmarks.one_gpu import run as one_gpu
from benchmarks.overlap import run as overlap
from benchmarks.systems.adaptors import SYSTEMS
from benchmarks.systems.adaptors.base import Stopwatch
from benchmarks.systems.variants import MARK
from dgl_hybrid.training.models import build_model
from tests.helpers.graphs import NUM_CLASSES, NUM_FEATURES, power_law

MIB = 2**20


def line(variant: str, epoch_s: float, mib: int) -> dict[str, Any]:
    times = {"p20": 0.9 * epoch_s, "p50": epoch_s, "p80": 1.1 * epoch_s}
    return {"cell": "a cell", "variant": variant, "status": "ok", "facts": {"gpu_bytes": mib * MIB}, **times}


def test_every_variant_is_a_system() -> None:
    assert set(one_gpu.SYSTEMS) | set(overlap.ON_GPU) <= set(SYSTEMS)


def test_the_faster_and_the_thriftier_of_the_others_count() -> None:
    lines = [line(one_gpu.OURS, 0.010, 300), line(one_gpu.INDEX, 0.050, 2000), line(one_gpu.SPARSE, 0.030, 3000)]
    found = one_gpu.COMPARISON.compare(lines)
    assert found["vs_pyg"] == pytest.approx(3.0)
    assert found["memory_vs_pyg"] == pytest.approx(0.15)
    (row,) = one_gpu.COMPARISON.rows_of([found])
    assert row[1:] == ("10.00 (9.00 to 11.00)", "50.00", "30.00", "3.00", "300", "2,000", "3,000")
    assert len(row) == len(one_gpu.COMPARISON.head)


def test_overlap_on_a_gpu_has_rows_of_the_same_kind() -> None:
    exchanges = [{"layer": 1, "backward": False, "blocked_s": 0.1, "beside_s": 0.0}]
    figures = {"exchange_s": 0.1, "wait_s": 0.0, "sent_bytes": 10, "exchanges": exchanges, "status": "ok"}
    lines = [{"cell": "a cell", "variant": variant, "p50": 0.5, **figures} for variant in overlap.ON_GPU]
    (row,) = overlap.GPU_COMPARISON.rows_of([overlap.GPU_COMPARISON.compare(lines)])
    assert row[1:4] == ("500", "500", "1.00")


@pytest.mark.parametrize("comparison", [one_gpu.COMPARISON, overlap.GPU_COMPARISON], ids=["one_gpu", "overlap"])
def test_tables_have_their_place(comparison: Any) -> None:
    assert MARK in comparison.readme.read_text("utf-8")


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert one_gpu.main([]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_a_watch_waits_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    for device in (None, torch.device("cpu")):
        with Stopwatch(device):
            pass
    assert waited == []
    with Stopwatch(torch.device("cuda", 0)):
        pass
    assert waited == [torch.device("cuda", 0)]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("edges", ["index", "sparse"])
@pytest.mark.parametrize("model", ["gcn", "sage", "gat"])
def test_pyg_computes_what_dgl_does(model: str, edges: str) -> None:
    pytest.importorskip("torch_geometric", reason="PyTorch Geometric is not installed")
    from benchmarks.systems.adaptors.pyg import convert

    src, dst = power_law(num_nodes=60).edges()
    ids = torch.arange(60)
    both = torch.unique(torch.stack([torch.cat([src, dst, ids]), torch.cat([dst, src, ids])]), dim=1)
    graph = dgl.graph(tuple(both), num_nodes=len(ids))
    x = torch.rand(len(ids), NUM_FEATURES)
    ours = build_model(model, NUM_FEATURES, 8, NUM_CLASSES, 2, heads=2, seed=1)
    for parameter in ours.parameters():  # biases begin at zero
        nn.init.normal_(parameter)
    sparse = torch.sparse_coo_tensor(both.flip(0), torch.ones(both.shape[1]), (len(ids), len(ids))).coalesce()
    given = both if edges == "index" else sparse.to_sparse_csr()
    layers = [convert(layer) for layer in ours.layers]
    h = layers[0](x, given)
    h = layers[1](torch.relu(h) if model != "gat" else torch.nn.functional.elu(h), given)
    torch.testing.assert_close(h, ours([graph, graph], x), rtol=1e-4, atol=1e-4)
