# SPDX-License-Identifier: Apache-2.0
"""`load_dataset`: one door for generated graphs, `.npz` files, DGL's and OGB's datasets."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from dgl_hybrid.datasets.builtin import DGL_CLASSES, OGB_NAMES, load_dgl, load_ogb
from dgl_hybrid.datasets.dataset import GraphDataset
from dgl_hybrid.datasets.npz import load_npz
from dgl_hybrid.datasets.powerlaw import PowerLawConfig, generate_powerlaw
from dgl_hybrid.datasets.spec import DatasetSpec, convert_options, parse_spec
from dgl_hybrid.datasets.transforms import transform_dataset
from dgl_hybrid.errors import DatasetError


def list_datasets() -> list[str]:
    """Every spec that needs no file: "powerlaw", "dgl:..." and "ogb:..."."""
    return ["powerlaw", *(f"dgl:{name}" for name in DGL_CLASSES), *(f"ogb:{name}" for name in OGB_NAMES)]


def load_dataset(
    spec: str = "powerlaw",
    *,
    seed: int = 0,
    symmetric: bool = False,
    self_loops: bool = False,
    normalize_features: bool = False,
) -> GraphDataset:
    """Loads a graph for vertex classification.

    Args:
        spec: "powerlaw", "powerlaw:nodes=20000,degree=16,features=64,classes=16,train=0.3" (see `PowerLawConfig`), the
            path of an `.npz` file, "dgl:cora", "ogb:ogbn-arxiv". Options follow a colon as key=value, e.g.
            "cora.npz:self_loops=true,split=3"; `symmetric`, `self_loops`, `normalize_features` and `seed`
            are known to all, and decide over the arguments below.
        seed: Of generated graphs and of random splits.
        symmetric: Add the reverse of every arc, keep one of parallel arcs (directed graphs stay directed otherwise).
        self_loops: Give every vertex exactly one self-loop.
        normalize_features: Divide each row of features by its sum of absolute values.
    Returns:
        The checked dataset; what was done to it stands in `meta["transforms"]`.
    Raises:
        TypeError: the spec is no string.
        DatasetError: unknown spec (lists what exists), missing or malformed data.
    """
    if not isinstance(spec, str):
        raise TypeError(f"a dataset is named by a string (got {type(spec).__name__})")
    parsed = parse_spec(spec)
    if parsed is None:
        hint = f" Did you mean {Path(spec + '.npz')}?" if spec and Path(spec + ".npz").is_file() else ""
        raise DatasetError(
            f"unknown dataset {spec!r}.{hint} Give the path of an .npz file or one of: {', '.join(list_datasets())}"
        )
    dataset, options = _load(parsed, seed)
    return transform_dataset(
        dataset,
        symmetric=bool(options.get("symmetric", symmetric)),
        self_loops=bool(options.get("self_loops", self_loops)),
        normalize_features=bool(options.get("normalize_features", normalize_features)),
    )


def _load(parsed: DatasetSpec, seed: int) -> tuple[GraphDataset, dict[str, int | float | bool]]:
    if parsed.kind == "powerlaw":
        # The default of a field has its type; annotations are text under postponed evaluation.
        types = {field.name: type(field.default) for field in fields(PowerLawConfig)}
        options = convert_options(parsed, types)
        own = {key: value for key, value in options.items() if key in types}
        config = PowerLawConfig(**own)  # type: ignore[arg-type]
        return generate_powerlaw(config, seed=int(options.get("seed", seed))), options
    if parsed.kind == "ogb":
        options = convert_options(parsed, {})
        return load_ogb(parsed.name), options
    options = convert_options(parsed, {"split": int})
    split = int(options["split"]) if "split" in options else None
    if parsed.kind == "npz":
        return load_npz(parsed.name, split=split), options
    return load_dgl(parsed.name, seed=int(options.get("seed", seed)), split=split), options
