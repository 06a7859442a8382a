# SPDX-License-Identifier: Apache-2.0
"""The graphs: generated like well-known ones, or real; each made and partitioned once, into a folder that is kept.

    python -m benchmarks.systems.graphs products 0.1 2 FOLDER

Run as a process of its own by `prepare`, since partitioning takes much memory: the benchmark itself stays small.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.systems.grid import REAL

ROOT = Path(__file__).resolve().parents[2]
DATA_VARIABLE = "DGL_HYBRID_DATA"
_VERSION = 2
"""Part of every generated file's name: raised when graphs come out differently."""
ORIGINAL_IDS = ".benchmark_original_ids.npy"
"""Beside the partition: (num_nodes,) int64 original ids by global id. Ranks that read whole partitions for them would
be measured with what that leaves in their heaps."""
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphShape:
    """A graph to generate: power-law degrees, communities within communities, labels that neighbours tell."""

    nodes: int
    degree: float
    """Mean in-degree; every undirected edge counts at both ends."""
    features: int
    classes: int
    train: float
    """Fraction of vertices; half of what is left is for validation, half for testing."""
    far: float
    """Share of edges whose second end is anywhere, however far: with `decay` it decides how well METIS can cut."""
    decay: float = 0.5
    """An edge that leaves a community of some size ends in the next larger one with this probability."""
    exponent: float = 2.5
    """Of the power law of degrees."""
    signal: float = 3.5
    """Distance between class centres in units of the features' noise."""
    label_noise: float = 0.05
    """Fraction of labels drawn anew; bounds the reachable accuracy."""

    def scaled(self, scale: float) -> GraphShape:
        """Returns the same with more or fewer vertices of the same mean degree."""
        nodes = max(round(self.nodes * scale), 4 * self.classes)
        return replace(self, nodes=nodes, degree=min(self.degree, nodes / 8))


SHAPES = {
    # As ogbn-products (100 features, 47 classes, 8 % train, mean degree 50).
    "products": GraphShape(nodes=200_000, degree=50.0, features=100, classes=47, train=0.08, far=0.012),
    # As Reddit: dense, wide features, most vertices in the train set, hard to cut.
    "reddit": GraphShape(nodes=50_000, degree=200.0, features=602, classes=41, train=0.66, far=0.04),
    "powerlaw": GraphShape(nodes=100_000, degree=30.0, features=128, classes=40, train=0.3, far=0.04, exponent=2.2),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedGraph:
    """A graph in parts, and what is to be known of it."""

    part_config: str
    data: dict[str, Any]
    """Fields of `DataConfig` with which one process loads the whole graph."""
    num_nodes: int
    num_edges: int
    """Self-loops included."""
    feat_dim: int
    num_classes: int
    num_train: int
    halo_rows: int
    """Vertices of other ranks that in-edges of own ones begin at, all ranks together."""
    feat_density: float = 1.0
    """Features that are not zero, of all."""


class GraphError(RuntimeError):
    """A graph cannot be had here."""


# -------------------------------------------------------------------- generating


def generate(shape: GraphShape, *, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    """Draws a graph; returns the arrays of an `.npz` file as `dgl_hybrid.load_dataset` reads it.

    Vertices stand in a row that is halved again and again into communities. An edge's first end is drawn by the
    vertices' power-law weights, the second within the first's smallest community, the next larger one, …, or anywhere.
    Classes are runs of that row, so both METIS and a model find them. Ids are shuffled; every edge has its reverse.
    """
    rng = np.random.default_rng(seed)
    n = shape.nodes
    leaves = 2 ** max(1, int(math.log2(max(2.0, min(4.0 * shape.classes, n / (2 * shape.degree))))))
    bounds = np.linspace(0, n, leaves + 1).astype(np.int64)
    src, dst = _draw_edges(rng, shape, bounds)
    cuts = np.cumsum(rng.dirichlet(np.full(shape.classes, 20.0)))[:-1] * n
    community = np.searchsorted(cuts, np.arange(n), side="right")
    centres = rng.standard_normal((shape.classes, shape.features), dtype=np.float32)
    centres *= np.float32(shape.signal / math.sqrt(2 * shape.features))
    feat = rng.standard_normal((n, shape.features), dtype=np.float32) + centres[community]
    label = community.astype(np.int64)
    redrawn = rng.random(n) < shape.label_noise
    label[redrawn] = rng.integers(0, shape.classes, size=int(redrawn.sum()))
    order = rng.permutation(n)
    num_train = round(shape.train * n)
    num_val = (n - num_train) // 2
    masks = {name: np.zeros(n, dtype=np.bool_) for name in ("train_mask", "val_mask", "test_mask")}
    masks["train_mask"][order[:num_train]] = True
    masks["val_mask"][order[num_train : num_train + num_val]] = True
    masks["test_mask"][order[num_train + num_val :]] = True
    place = rng.permutation(n)  # vertex k of the row gets the id place[k]
    back = np.argsort(place)
    return {
        "src": place[np.concatenate([src, dst])].astype(np.int32),
        "dst": place[np.concatenate([dst, src])].astype(np.int32),
        "num_nodes": np.int64(n),
        "feat": feat[back],
        "label": label[back],
        **masks,
        "meta": np.str_(json.dumps({"source": "generated", "seed": seed, "num_classes": shape.classes})),
    }


def _draw_edges(rng: np.random.Generator, shape: GraphShape, bounds: IntArray) -> tuple[IntArray, IntArray]:
    """Draws undirected edges, each once, as positions in the row of vertices."""
    n, leaves = shape.nodes, len(bounds) - 1
    num_levels = leaves.bit_length() - 1
    wanted = round(n * shape.degree / 2)
    weight = (1.0 - rng.random(n)) ** (-1.0 / (shape.exponent - 1.0))
    weight = np.minimum(weight, math.sqrt(float(weight.sum())))  # past this a vertex would mostly draw duplicates
    cumulative = np.concatenate([[0.0], np.cumsum(weight)])
    shares = shape.decay ** np.arange(num_levels + 1)
    shares *= (1 - shape.far) / shares.sum()
    shares[-1] += shape.far
    keys = np.empty(0, dtype=np.int64)
    for _ in range(20):  # duplicates and self-loops are dropped; dense graphs may end a little short
        missing = wanted - keys.size
        if missing <= wanted // 200:
            break
        count = int(missing * 1.1) + 16
        first = np.searchsorted(cumulative, rng.random(count) * cumulative[-1], side="right") - 1
        first = np.clip(first, 0, n - 1)
        level = rng.choice(num_levels + 1, size=count, p=shares)
        block = (np.searchsorted(bounds, first, side="right") - 1) >> level
        low, high = cumulative[bounds[block << level]], cumulative[bounds[(block + 1) << level]]
        second = np.clip(
            np.searchsorted(cumulative, low + (high - low) * rng.random(count), side="right") - 1, 0, n - 1
        )
        least, most = np.minimum(first, second), np.maximum(first, second)
        keys = np.unique(np.concatenate([keys, (least * n + most)[least != most]]))
    if keys.size > wanted:
        keys = np.sort(rng.choice(keys, size=wanted, replace=False))
    return keys // n, keys % n


# -------------------------------------------------------------------- preparing


def data_config(graph: str, scale: float, cache: Path) -> dict[str, Any]:
    """Returns how to load a graph: symmetric, every vertex with one self-loop. A generated one is written first.

    Raises:
        GraphError: A real graph's file is not here.
    """
    if graph in SHAPES:
        shape = SHAPES[graph].scaled(scale)
        text = json.dumps([_VERSION, asdict(shape)], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        file = cache / "graphs" / f"{graph}-{shape.nodes}-{digest}.npz"
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            aside = file.with_name(f".{os.getpid()}-{file.name}")
            with aside.open("wb") as stream:
                np.savez(stream, **generate(shape))  # type: ignore[arg-type]
            aside.rename(file)
        return {"data": str(file), "symmetric": False, "self_loops": True}
    if graph in REAL:
        folder = Path(os.environ.get(DATA_VARIABLE) or ROOT.parent / "shared" / "data")
        if not (folder / f"{graph}.npz").is_file():
            raise GraphError(f"{graph}.npz is not in {folder} (set {DATA_VARIABLE})")
        return {"data": str(folder / f"{graph}.npz"), "symmetric": True, "self_loops": True}
    return {"data": graph, "symmetric": True, "self_loops": True}


def make(graph: str, scale: float, ranks: int, cache: Path) -> PreparedGraph:
    """Generates and partitions, or finds what an earlier run has left in the cache."""
    import dgl_hybrid  # noqa: F401  mends DGL before anything imports it
    from dgl_hybrid.launch.workspace import DataConfig, PartitionConfig, prepare_partition
    from dgl_hybrid.partition import load_partition

    config = DataConfig(**data_config(graph, scale, cache))
    prepared = prepare_partition(config, PartitionConfig(ranks=ranks, workspace=str(cache / "parts")))
    facts = prepared.part_config.parent / ".benchmark_facts_3.json"
    if not facts.is_file():
        num_edges = num_train = halo_rows = feat_dim = num_nodes = num_entries = 0
        original: list[IntArray] = []
        for rank in range(ranks):
            part = load_partition(prepared.part_config, rank)
            sources = np.unique(part.lists.src_global.numpy())
            first, last = part.node_offsets[rank : rank + 2].tolist()
            halo_rows += int(((sources < first) | (sources >= last)).sum())
            num_edges += len(part.lists.src_global)
            num_nodes += part.num_inner
            num_train += int(part.node_data["train_mask"].sum())
            feat_dim = int(part.node_data["feat"].shape[1])
            num_entries += int(part.node_data["feat"].count_nonzero())
            if part.orig_node_ids is not None:
                original.append(part.orig_node_ids.numpy())
        record = PreparedGraph(
            part_config=str(prepared.part_config),
            data=asdict(config),
            num_nodes=num_nodes,
            num_edges=num_edges,
            feat_dim=feat_dim,
            num_classes=prepared.num_classes or 0,
            num_train=num_train,
            halo_rows=halo_rows,
            feat_density=num_entries / max(1, num_nodes * feat_dim),
        )
        ids = facts.with_name(f".{os.getpid()}{ORIGINAL_IDS}")
        np.save(ids, np.concatenate(original))
        ids.rename(facts.with_name(ORIGINAL_IDS))
        aside = facts.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(asdict(record)), encoding="utf-8")
        aside.rename(facts)
    found = json.loads(facts.read_text(encoding="utf-8"))
    # The folder may have been made from the same content under another path.
    return PreparedGraph(**(found | {"part_config": str(prepared.part_config), "data": asdict(config)}))


def prepare(graph: str, scale: float, ranks: int, cache: Path, *, timeout_s: float = 3600.0) -> PreparedGraph:
    """`make` in a process of its own.

    Raises:
        GraphError: It failed, or took too long; the message is its last line.
    """
    command = [sys.executable, "-m", "benchmarks.systems.graphs", graph, str(scale), str(ranks), str(cache)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise GraphError(f"{graph} in {ranks} parts was not ready after {timeout_s:g} s") from error
    if done.returncode:
        raise GraphError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return PreparedGraph(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    graph, scale, ranks, cache = sys.argv[1:]
    with contextlib.redirect_stdout(sys.stderr):  # METIS and downloads report on stdout
        prepared = make(graph, float(scale), int(ranks), Path(cache))
    print(json.dumps(asdict(prepared)))


if __name__ == "__main__":
    main()
