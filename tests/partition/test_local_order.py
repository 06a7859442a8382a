# SPDX-License-Identifier: Apache-2.0
"""An order of vertices by locality: found where there is some to find, and what it gains is counted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dgl_hybrid.exchange.segments import indptr_of
from dgl_hybrid.partition import clusters, local_order
from dgl_hybrid.partition.clusters import ClusterError, Numbers, cut_into_clusters
from dgl_hybrid.partition.local_order import count_reads, find_local_order
from tests.helpers.rings import in_edges, ring


def test_distinct_reads_of_a_window_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_order, "_WINDOW", 4)
    indptr, sources = torch.tensor([0, 3, 3, 8]), torch.tensor([7, 7, 7, 7, 1, 2, 3, 1])
    assert count_reads(indptr, sources) == (1 + 3) / 8
    # As they are read: 7 1 2 3, 1 7 7 7.
    assert count_reads(indptr, sources, torch.tensor([2, 1, 0])) == (4 + 2) / 8
    assert count_reads(torch.tensor([0, 3]), torch.tensor([5, 5, 6])) == 2 / 3, "fewer reads than a window are one"
    assert count_reads(torch.zeros(4, dtype=torch.int64), torch.empty(0, dtype=torch.int64)) == 0.0
    monkeypatch.setattr(local_order, "_MOST_WINDOWS", 1)
    assert count_reads(indptr, sources) == 1 / 4, "of two windows the first"


def distances(order: Tensor, indptr: Tensor, indices: Tensor) -> Tensor:
    """How far each source is from who reads it."""
    assert torch.equal(order.sort().values, torch.arange(len(order)))
    position = torch.argsort(order)
    return (position[indices] - torch.repeat_interleave(position, indptr.diff())).abs()


def test_neighbours_on_a_shuffled_ring_come_near_each_other() -> None:
    indptr, indices, _ = ring(2999, torch.Generator().manual_seed(0))
    # Three levels of breadth-first search, each with four vertices from either side of the ring.
    assert int(distances(find_local_order(indptr, indices), indptr, indices).max()) <= 24


def test_a_ring_of_several_clusters_is_cut_once_for_each() -> None:
    indptr, indices, _ = ring(12_000, torch.Generator().manual_seed(0))
    far = distances(find_local_order(indptr, indices), indptr, indices) > 24
    # Eight clusters, each an arc: twenty edges go over the end between two.
    assert 0 < int(far.sum()) <= 8 * 20


@pytest.mark.parametrize("degree", [8, 60])
def test_communities_are_found_whatever_share_of_their_edges_is_looked_at(degree: int) -> None:
    """A fifth of all edges go anywhere, so that a breadth-first search alone finds nothing."""
    generator, num_rows, size = torch.Generator().manual_seed(0), 12_000, 1500
    dst = torch.arange(num_rows).repeat_interleave(degree)
    near = dst // size * size + torch.randint(size, (len(dst),), generator=generator)
    anywhere = torch.randint(num_rows, (len(dst),), generator=generator)
    src = torch.where(torch.rand(len(dst), generator=generator) < 0.2, anywhere, near)
    ids = torch.randperm(num_rows, generator=generator)
    order = find_local_order(*in_edges(num_rows, ids[src], ids[dst]))
    windows = (torch.argsort(ids)[order] // size).view(-1, size // 10)
    is_of_most = windows == windows.mode().values.unsqueeze(1)
    assert float(is_of_most.float().mean()) > 0.95


@pytest.mark.parametrize("reads", [True, False])
def test_hubs_are_left_out(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All others are a step from one, so nobody was near anybody; and to sort its neighbours took minutes."""
    monkeypatch.setattr(local_order, "_MOST_NEIGHBORS", 100)
    indptr, indices, _ = ring(2999, torch.Generator().manual_seed(0))
    src, dst = indices, torch.repeat_interleave(torch.arange(2999), indptr.diff())
    others, hub = torch.arange(1, 2999), torch.zeros(2998, dtype=torch.int64)
    ends = (others, hub) if reads else (hub, others)
    with_hub = in_edges(2999, torch.cat([src, ends[0]]), torch.cat([dst, ends[1]]))
    order = find_local_order(*with_hub)
    is_other = (src != 0) & (dst != 0)
    # Without the hub the ring is a path: each has all its neighbours within two levels of the search.
    assert int(distances(order, indptr, indices)[is_other].max()) <= 24


@pytest.mark.parametrize(
    ("num_rows", "src", "dst"), [(1, [], []), (4000, [], []), (4000, [7], [7]), (3, [0, 2], [2, 0])]
)
def test_any_edges_give_an_order(num_rows: int, src: list[int], dst: list[int]) -> None:
    ends = (torch.tensor(end, dtype=torch.int64) for end in (src, dst))
    order = find_local_order(*in_edges(num_rows, *ends))
    assert torch.equal(order.sort().values, torch.arange(num_rows))


def test_eight_in_edges_of_each_are_looked_at_evenly_and_no_loops() -> None:
    edges = local_order._some_edges_both_ways(
        *in_edges(20, torch.tensor([*range(1, 17), 1, 1]), torch.tensor([*[0] * 16, 1, 3]))
    )
    rows = [edges.indices[edges.indptr[row] : edges.indptr[row + 1]].tolist() for row in range(20)]
    assert sorted(rows[0]) == [1, 3, 5, 7, 9, 11, 13, 15]
    assert sorted(rows[1]) == [0, 3]
    assert [rows[3], rows[5], rows[2]] == [[0, 1], [0], []]


def test_an_order_is_the_same_every_time() -> None:
    indptr, indices, _ = ring(10_000, torch.Generator().manual_seed(4))
    assert torch.equal(find_local_order(indptr, indices), find_local_order(indptr, indices))


def test_components_smaller_than_a_cluster_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """METIS is asked for the two large ones alone: of many small ones it takes long."""
    monkeypatch.setattr(local_order, "_CLUSTER_ROWS", 500)
    asked: list[int] = []

    def cut(indptr: Numbers, indices: Numbers, num_clusters: int, timeout_s: float) -> Numbers:
        asked.append(len(indptr) - 1)
        return cut_into_clusters(indptr, indices, num_clusters, timeout_s)

    monkeypatch.setattr(local_order, "cut_into_clusters", cut)
    generator = torch.Generator().manual_seed(0)
    parts = [ring(size, generator)[:2] for size in (1200, *[20] * 50, 900)]
    first = indptr_of(torch.tensor([len(indptr) - 1 for indptr, _ in parts]))
    indices = torch.cat([of_part + begin for (_, of_part), begin in zip(parts, first, strict=False)])
    indptr = indptr_of(torch.cat([of_part.diff() for of_part, _ in parts]))
    order = find_local_order(indptr, indices)
    assert asked == [2100]
    assert torch.equal(order.sort().values, torch.arange(3100))
    ring_of = torch.searchsorted(first, order, right=True) - 1
    small = ring_of[(ring_of > 0) & (ring_of < 51)]
    assert len(small.unique_consecutive()) == 50
    # The four clusters come as a whole, each of one of the two.
    assert len(ring_of[(ring_of == 0) | (ring_of == 51)].unique_consecutive()) <= 4


def test_rows_stay_breadth_first_where_metis_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    indptr, indices, _ = ring(6000, torch.Generator().manual_seed(0))
    assert int(distances(find_local_order(indptr, indices), indptr, indices).max()) > 24
    monkeypatch.setattr(clusters.sys, "executable", "/nowhere/python")
    order = find_local_order(indptr, indices)
    assert int(distances(order, indptr, indices).max()) <= 24, "this order has no clusters"
    assert "rows are put in breadth-first order, not in clusters" in caplog.text
    assert "FileNotFoundError" in caplog.text
    monkeypatch.setattr(clusters.sys, "executable", None)
    assert torch.equal(find_local_order(indptr, indices), order)
    assert "there is no Python to start METIS with" in caplog.text


def test_a_graph_comes_to_metis_whole_while_the_pipe_stays_open() -> None:
    """As where another thread of the rank has forked: the end of the input never comes."""
    indptr, indices, _ = ring(3000, torch.Generator().manual_seed(0))
    numbers = np.concatenate([indptr.numpy(), indices.numpy()]).astype(np.int32)
    head = np.array([3000, len(indices), 2], dtype=np.int64)
    command = [sys.executable, "-P", clusters.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(head.tobytes() + numbers.tobytes())
        process.stdin.flush()
        found = np.frombuffer(process.stdout.read(), dtype=np.int32)
        assert process.wait() == 0
    assert np.bincount(found).tolist() == pytest.approx([1500, 1500], abs=100)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        _, said = process.communicate(head.tobytes() + numbers.tobytes()[:-4])
    assert process.returncode == 1
    assert b"EOFError: expected 27001 numbers" in said


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("raise SystemExit('no module named pymetis')", "exit status 1: no module named pymetis"),
        ("import os; os.kill(os.getpid(), 9)", "exit status -9: it said nothing"),
        ("print('*** cannot bisect')", "returned 18 bytes that are no clusters of 3 vertices"),
        ("import sys; sys.stdout.buffer.write(bytes(12)[:8] + b'\\2\\0\\0\\0')", "12 bytes that are no clusters"),
        ("import time; time.sleep(60)", "TimeoutExpired"),
    ],
)
def test_errors_of_the_process_that_runs_metis_say_why(
    script: str, error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "metis.py").write_text(script)
    monkeypatch.setattr(clusters, "__file__", str(tmp_path / "metis.py"))
    path = np.array([0, 1, 3, 4], dtype=np.int32), np.array([1, 0, 2, 1], dtype=np.int32)
    with pytest.raises(ClusterError, match=error):
        cut_into_clusters(*path, 2, 0.5 if "sleep" in script else 60.0)


def test_a_ring_is_cut_into_arcs() -> None:
    num_rows = 400
    row = np.arange(num_rows)
    indices = np.stack([(row - 1) % num_rows, (row + 1) % num_rows], axis=1).ravel().astype(np.int32)
    found = cut_into_clusters(np.arange(0, 2 * num_rows + 1, 2, dtype=np.int32), indices, 4, 60.0)
    assert np.bincount(found).min() >= 90
    assert int((found != np.roll(found, 1)).sum()) <= 8
