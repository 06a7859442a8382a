# SPDX-License-Identifier: Apache-2.0
"""Files of DGL that are not whole are told of before DGL reads them, which may end the process."""

from __future__ import annotations

import contextlib
import random
import resource
from collections.abc import Callable
from pathlib import Path

import dgl
import pytest
import torch
from dgl.data.utils import load_tensors, save_tensors

from dgl_hybrid import partition_graph
from dgl_hybrid.errors import PartitionError
from dgl_hybrid.partition.dgl_files import check_graph_file, check_tensor_file
from tests.helpers.graphs import power_law

TENSORS = {
    "_N/feat": torch.arange(60.0).view(20, 3),
    "_N/label": torch.arange(20),
    "_N/mask": torch.ones(20, dtype=torch.uint8),
    "_N/half": torch.ones(20, 2, dtype=torch.float16),
    "_N/none": torch.ones(0, 4),
    "_N/größe": torch.tensor([1.0]),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "node_feat.dgl"
    save_tensors(str(path), TENSORS)
    return path


def test_whole_files_pass(file: Path, tmp_path: Path) -> None:
    check_tensor_file(file, "")
    empty = tmp_path / "empty.dgl"
    save_tensors(str(empty), {})
    check_tensor_file(empty, "")
    another = tmp_path / "another.dgl"
    another.write_bytes(b"of another layout, which DGL may know")
    check_tensor_file(another, "")
    assert load_tensors(str(file)).keys() == TENSORS.keys()


def test_every_cut_is_told(file: Path) -> None:
    content = file.read_bytes()
    for length in range(len(content)):
        file.write_bytes(content[:length])
        with pytest.raises(PartitionError, match=r"node_feat\.dgl is truncated.*\. Write it anew"):
            check_tensor_file(file, "Write it anew")


def test_flipped_bits_are_told_or_change_values_alone(file: Path) -> None:
    content, draw = file.read_bytes(), random.Random(0)
    told = 0
    for _ in range(1000):
        at = draw.randrange(16, len(content))
        file.write_bytes(content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :])
        with contextlib.suppress(PartitionError):
            check_tensor_file(file, "")
            continue
        told += 1
    assert told > 200


@pytest.mark.parametrize(
    ("num_graphs", "labels"), [(1, {}), (3, {}), (2, {"kind": torch.arange(2)})], ids=["one", "three", "labels"]
)
def test_cuts_of_graphs_are_told(num_graphs: int, labels: dict[str, torch.Tensor], tmp_path: Path) -> None:
    file = tmp_path / "graph.dgl"
    dgl.save_graphs(str(file), [power_law(40, 90) for _ in range(num_graphs)], labels)
    content, draw = file.read_bytes(), random.Random(0)
    check_graph_file(file, "")
    near_ends = [*range(40), *range(4080, 4130), *range(len(content) - 80, len(content))]
    for length in [*near_ends, *(draw.randrange(len(content)) for _ in range(300))]:
        file.write_bytes(content[:length])
        with pytest.raises(PartitionError, match=r"graph\.dgl is truncated.*\. Write it anew"):
            check_graph_file(file, "Write it anew")
    another_start = content[:4096] + bytes([content[4096] ^ 8]) + content[4097:]
    for damaged in (content + b"and on", another_start):
        file.write_bytes(damaged)
        with pytest.raises(PartitionError, match="does not end as DGL ends a file"):
            check_graph_file(file, "")


def test_graphs_of_another_layout_pass(tmp_path: Path) -> None:
    file = tmp_path / "graph.dgl"
    dgl.save_graphs(str(file), [power_law(40, 90)])
    head = file.read_bytes()[:32]
    file.write_bytes(head[:8] + b"\3" + head[9:])  # of a later version
    check_graph_file(file, "")
    file.write_bytes(b"PK\3\4" + bytes(100))
    check_graph_file(file, "")


@pytest.mark.parametrize("check", [check_tensor_file, check_graph_file])
def test_a_file_that_is_not_there_is_named(check: Callable[[Path, str], None], tmp_path: Path) -> None:
    with pytest.raises(PartitionError, match=r"gone\.dgl cannot be read: No such file"):
        check(tmp_path / "gone.dgl", "")


@pytest.mark.parametrize(("name", "width"), [("node_feat.dgl", 200), ("graph.dgl", 1)])
def test_what_dgl_could_not_write_is_told(name: str, width: int, tmp_path: Path) -> None:
    """DGL loses its last buffer without a word, and the manifest would have vouched for the rest."""
    graph = power_law(400, 1200)
    graph.ndata["feat"] = torch.rand(400, width)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    whole = tmp_path / "whole"
    partition_graph(graph, "g", 1, str(whole), part_method="random")
    size = (whole / "part0" / name).stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 100, before[1]))
    try:
        with pytest.raises(PartitionError, match=rf"cannot be written: .*{name} is truncated.*is there a quota"):
            partition_graph(graph, "g", 1, str(tmp_path / "cut"), part_method="random")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "cut").exists()
