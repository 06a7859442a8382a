# SPDX-License-Identifier: Apache-2.0
"""`GraphDataset`, what every loader returns, and the checks every one of them passes through."""

from __future__ import annotations

from dataclasses import dataclass

import dgl
import torch
from torch import Tensor

from dgl_hybrid.errors import DatasetError

MASKS = ("train_mask", "val_mask", "test_mask")


@dataclass(frozen=True, kw_only=True)
class GraphDataset:
    """One graph for vertex classification.

    `graph` is homogeneous, on the CPU, int64 ids; vertex data `feat` float32 (N, F), `label` int64 (N,) with -1 for
    none, and `train_mask`, `val_mask`, `test_mask` bool (N,).
    """

    name: str
    graph: dgl.DGLGraph
    num_classes: int
    meta: dict[str, object]
    """Where it comes from and what was done to it: source, seed, transformations."""


def check_features(name: str, tensor: Tensor) -> None:
    """Raises if a feature tensor holds NaN or infinity; integers pass.

    Args:
        name: How the message calls the tensor, e.g. "cora.npz: feat".
        tensor: (N, ...) of any dtype and device. Syncs the host for CUDA tensors.
    Raises:
        DatasetError: names the first offending rows.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return
    # One pass without a mask of the same size: a finite sum proves all terms finite; overflow only takes the slow path.
    if tensor.is_floating_point() and bool(torch.isfinite(tensor.sum(dtype=torch.float64))):
        return
    bad = ~torch.isfinite(tensor.reshape(tensor.shape[0], -1)).all(dim=1)
    rows = bad.nonzero().flatten()
    if rows.numel() == 0:
        return
    shown = ", ".join(str(row) for row in rows[:5].tolist())
    raise DatasetError(
        f"{name} must be finite (got NaN or infinity in {rows.numel()} of {tensor.shape[0]} rows, "
        f"first rows: {shown}). Clean the features before partitioning or training."
    )


MOST_CLASSES = 10_000
"""Of a graph that has fewer vertices: what is more is ids of another kind, or a number that stands for none."""


def make_dataset(
    *,
    name: str,
    origin: str,
    src: Tensor,
    dst: Tensor,
    feat: Tensor,
    label: Tensor,
    masks: dict[str, Tensor],
    meta: dict[str, object],
    num_classes: int | None = None,
) -> GraphDataset:
    """Checks all parts and assembles the dataset; keys in messages are those of the `.npz` format.

    Args:
        name: Short name.
        origin: File or source, for messages.
        src: (E,) integer, in 0..N-1.
        dst: (E,) integer, in 0..N-1.
        feat: (N, F) floating or integer; becomes float32.
        label: (N,) integer, -1 for none.
        masks: The three of `MASKS`, bool (N,).
        meta: Kept as it is.
        num_classes: If None, largest label + 1.
    Raises:
        DatasetError: a shape, range or value is wrong; names `origin` and the key.
    """
    if feat.ndim != 2:
        raise DatasetError(f"{origin}: feat must have shape (num_nodes, F) (got {tuple(feat.shape)})")
    num_nodes = feat.shape[0]
    if src.ndim != 1 or src.shape != dst.shape:
        raise DatasetError(
            f"{origin}: src and dst must be of one shape (num_arcs,) (got {tuple(src.shape)}, {tuple(dst.shape)})"
        )
    for key, ids in (("src", src), ("dst", dst)):
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= num_nodes):
            raise DatasetError(
                f"{origin}: {key} must be in 0..{num_nodes - 1} (got {int(ids.min())}..{int(ids.max())})"
            )
    if label.shape != (num_nodes,) or label.is_floating_point():
        raise DatasetError(
            f"{origin}: label must be integers of shape ({num_nodes},) (got {label.dtype} {tuple(label.shape)}); "
            "multi-label and regression targets are not supported"
        )
    if num_nodes and int(label.min()) < -1:
        raise DatasetError(f"{origin}: label must be -1 (none) or a class id (got {int(label.min())})")
    largest = int(label.max()) if num_nodes else -1
    if num_classes is None:
        num_classes = largest + 1
    if num_classes > max(num_nodes, MOST_CLASSES):
        raise DatasetError(
            f"{origin}: label must be class ids from 0 on, -1 for none: {num_classes} classes of {num_nodes} vertices "
            f"would be (largest label {largest}). Number the classes through, and write -1 where there is none."
        )
    if largest >= num_classes:
        raise DatasetError(f"{origin}: label must be below num_classes={num_classes} (got {largest})")
    for key in MASKS:
        mask = masks[key]
        if mask.dtype != torch.bool or mask.shape != (num_nodes,):
            raise DatasetError(
                f"{origin}: {key} must be bool of shape ({num_nodes},) (got {mask.dtype} {tuple(mask.shape)})"
            )
        unlabelled = mask & (label < 0)
        if bool(unlabelled.any()):
            raise DatasetError(
                f"{origin}: {key} selects {int(unlabelled.sum())} vertices without a label, "
                f"the first is {int(unlabelled.nonzero()[0])}"
            )
    feat = feat.to(torch.float32)
    check_features(f"{origin}: feat", feat)
    graph = dgl.graph((src.to(torch.int64), dst.to(torch.int64)), num_nodes=num_nodes)
    graph.ndata["feat"] = feat
    graph.ndata["label"] = label.to(torch.int64)
    for key in MASKS:
        graph.ndata[key] = masks[key]
    return GraphDataset(name=name, graph=graph, num_classes=num_classes, meta=meta)
