# SPDX-License-Identifier: Apache-2.0
"""Graphs from `.npz` files, every key checked; nothing is unpickled."""

from __future__ import annotations

import json
import logging
import tokenize
import zipfile
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from dgl_hybrid.datasets.dataset import MASKS, GraphDataset, make_dataset
from dgl_hybrid.errors import DatasetError

Array = npt.NDArray[np.generic]
_SPARSE_KEYS = ("feat_data", "feat_indices", "feat_indptr", "feat_shape")
_KEYS = frozenset(
    ("src", "dst", "num_nodes", "feat", *_SPARSE_KEYS, "label", *MASKS, *(f"{key}s" for key in MASKS), "meta")
)

_logger = logging.getLogger(__name__)


def load_npz(path: str | Path, *, split: int | None = None) -> GraphDataset:
    """Reads one graph.

    Keys: `src`, `dst` integers (num_arcs,); `num_nodes`; `feat` (num_nodes, F), or CSR as `feat_data`, `feat_indices`,
    `feat_indptr`, `feat_shape`; `label` integers (num_nodes,), -1 for none; `train_mask`, `val_mask`, `test_mask` bool
    (num_nodes,); optionally `train_masks` etc. (splits, num_nodes) and `meta`, a JSON string. Directed graphs stay
    directed. Other keys (weights of edges, say) are not read, and a warning says so.

    Args:
        path: The file.
        split: Row of `train_masks`, `val_masks`, `test_masks` to use in place of the three masks.
    Raises:
        DatasetError: missing or damaged file, missing key, wrong dtype, shape or range, NaN; names file and key.
    """
    path = Path(path)
    arrays = _read_arrays(path)
    unread = sorted(set(arrays) - _KEYS)
    if unread:
        _logger.warning("%s: %s is not read; load_npz says which keys are", path, ", ".join(unread))
    num_nodes = _scalar(arrays, "num_nodes", path)
    feat = _features(arrays, num_nodes, path)
    masks: dict[str, torch.Tensor] = {}
    for key in MASKS:
        mask = _get(arrays, key if split is None else f"{key}s", path)
        if split is not None:
            if mask.ndim != 2 or not 0 <= split < mask.shape[0]:
                raise DatasetError(f"{path}: split must be a row of {key}s, whose shape is {mask.shape} (got {split})")
            mask = mask[split]
        if mask.dtype != np.bool_:
            raise DatasetError(f"{path}: {key} must be bool of shape ({num_nodes},) (got {mask.dtype} {mask.shape})")
        masks[key] = torch.from_numpy(np.ascontiguousarray(mask))
    meta = _meta(arrays, path)
    named_classes = meta.get("num_classes")
    label = _integers(arrays, "label", path)
    num_classes = int(label.max(initial=-1)) + 1
    if named_classes is not None:
        if not isinstance(named_classes, int) or isinstance(named_classes, bool) or named_classes < 0:
            raise DatasetError(
                f"{path}: num_classes in meta must be an integer, 0 or more (got {json.dumps(named_classes)})"
            )
        num_classes = max(num_classes, named_classes)
    return make_dataset(
        name=path.name.removesuffix(".npz"),
        origin=str(path),
        src=torch.from_numpy(_integers(arrays, "src", path)),
        dst=torch.from_numpy(_integers(arrays, "dst", path)),
        feat=torch.from_numpy(feat),
        label=torch.from_numpy(label),
        masks=masks,
        num_classes=num_classes,
        meta={**meta, "file": path.name, "split": split} if split is not None else {**meta, "file": path.name},
    )


_DAMAGE = (
    *(OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error),
    # Other methods of compression, encryption; headers of arrays, which NumPy reads as Python; sizes.
    *(NotImplementedError, RuntimeError, SyntaxError, tokenize.TokenError, MemoryError),
)
"""What NumPy and zipfile raise for archives that are damaged, or none of theirs."""


def _read_arrays(path: Path) -> dict[str, Array]:
    try:
        if path.is_dir():
            raise DatasetError(f"{path} is a folder. Give the path of an .npz graph.")
        if path.stat().st_size and not zipfile.is_zipfile(path):
            with path.open("rb") as stream:
                is_array = stream.read(6) == np.lib.format.MAGIC_PREFIX
            if not is_array:  # NumPy would take it for pickled objects
                raise DatasetError(
                    f"{path} cannot be read as .npz (it is no such archive). It may be truncated; "
                    f"numpy.savez_compressed writes them."
                )
        # The stream is ours, so that a file numpy rejects is closed all the same.
        with path.open("rb") as stream:
            stored = np.load(stream, allow_pickle=False)
            if isinstance(stored, np.lib.npyio.NpzFile):
                with stored:
                    return {key: stored[key] for key in stored.files}
    except FileNotFoundError as error:
        raise DatasetError(f"{path} does not exist. Give the path of an .npz graph.") from error
    except PermissionError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}") from error
    except _DAMAGE as error:
        raise DatasetError(
            f"{path} cannot be read as .npz ({error}). It may be truncated, or hold pickled objects, which are refused."
        ) from error
    raise DatasetError(f"{path} is a single array, not an .npz archive. Save it with numpy.savez_compressed.")


def _get(arrays: dict[str, Array], key: str, path: Path) -> Array:
    if key not in arrays:
        raise DatasetError(f"{path}: key {key!r} is missing; the file has {', '.join(sorted(arrays)) or 'none'}")
    return arrays[key]


def _integers(arrays: dict[str, Array], key: str, path: Path) -> npt.NDArray[np.int64]:
    array = _get(arrays, key, path)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DatasetError(f"{path}: {key} must be integers of one dimension (got {array.dtype} {array.shape})")
    if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise DatasetError(f"{path}: {key} must fit into 64 bits with a sign (got {int(array.max())})")
    return array.astype(np.int64, copy=False)


def _scalar(arrays: dict[str, Array], key: str, path: Path) -> int:
    array = _get(arrays, key, path)
    if array.size != 1 or array.dtype.kind not in "iu" or int(array.reshape(-1)[0]) < 0:
        found = f"{array.dtype} {array.reshape(-1)[0] if array.size == 1 else array.shape}"
        raise DatasetError(f"{path}: {key} must be one non-negative integer (got {found})")
    return int(array.reshape(-1)[0])


def _features(arrays: dict[str, Array], num_nodes: int, path: Path) -> npt.NDArray[np.float32]:
    if "feat" in arrays:
        feat = arrays["feat"]
        if feat.ndim != 2 or feat.shape[0] != num_nodes or feat.dtype.kind not in "fiub":
            raise DatasetError(
                f"{path}: feat must be numbers of shape ({num_nodes}, F) (got {feat.dtype} {feat.shape})"
            )
        sparse = [key for key in _SPARSE_KEYS if key in arrays]
        if sparse:
            _logger.warning("%s: feat is read, and %s are not", path, ", ".join(sparse))
        return _narrowed(feat, "feat", path)
    if not any(key in arrays for key in _SPARSE_KEYS):
        raise DatasetError(
            f"{path}: key 'feat' is missing, and so are {', '.join(_SPARSE_KEYS)}; "
            f"the file has {', '.join(sorted(arrays))}"
        )
    shape = _integers(arrays, "feat_shape", path)
    indices, indptr = _integers(arrays, "feat_indices", path), _integers(arrays, "feat_indptr", path)
    data = _get(arrays, "feat_data", path)
    if shape.shape != (2,) or int(shape[0]) != num_nodes or int(shape[1]) < 0:
        raise DatasetError(f"{path}: feat_shape must be ({num_nodes}, F) (got {shape.tolist()})")
    width = int(shape[1])
    if indptr.shape != (num_nodes + 1,) or indptr[0] != 0 or bool((np.diff(indptr) < 0).any()):
        raise DatasetError(
            f"{path}: feat_indptr must be {num_nodes + 1} rising offsets from 0 (got shape {indptr.shape}, beginning "
            f"with {indptr[:3].tolist()})"
        )
    if data.shape != (int(indptr[-1]),) or indices.shape != data.shape or data.dtype.kind not in "fiub":
        raise DatasetError(
            f"{path}: feat_data and feat_indices must hold feat_indptr[-1] = {int(indptr[-1])} numbers "
            f"(got {data.dtype} {data.shape}, {indices.shape})"
        )
    if indices.size and (int(indices.min()) < 0 or int(indices.max()) >= width):
        raise DatasetError(
            f"{path}: feat_indices must be in 0..{width - 1} (got {int(indices.min())}..{int(indices.max())})"
        )
    try:
        dense = np.zeros(num_nodes * width, dtype=np.float32)
    except (MemoryError, ValueError, OverflowError) as error:  # more bytes than there are, or than can be numbered
        raise DatasetError(
            f"{path}: feat_shape asks for {num_nodes} x {width} numbers of 4 bytes, for which there is no room "
            f"({error})"
        ) from error
    rows = np.repeat(np.arange(num_nodes), np.diff(indptr))
    np.add.at(dense, rows * width + indices, _narrowed(data, "feat_data", path))
    return dense.reshape(num_nodes, width)


def _narrowed(values: Array, key: str, path: Path) -> npt.NDArray[np.float32]:
    """Returns numbers as float32, none of which may become infinite by that."""
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32, copy=False)
    if values.dtype.kind == "f" and bool((np.isinf(narrow) & np.isfinite(values)).any()):
        raise DatasetError(
            f"{path}: {key} must fit float32, numbers up to {np.finfo(np.float32).max:.3g} (got {values.dtype} of up "
            f"to {np.abs(values[np.isfinite(values)]).max():.3g})"
        )
    return narrow


def _meta(arrays: dict[str, Array], path: Path) -> dict[str, object]:
    if "meta" not in arrays:
        return {}
    try:
        meta = json.loads(str(arrays["meta"]))
    except (json.JSONDecodeError, RecursionError) as error:
        raise DatasetError(f"{path}: meta must be a JSON string ({error})") from error
    if not isinstance(meta, dict):
        raise DatasetError(f"{path}: meta must hold a JSON object (got {type(meta).__name__})")
    return meta
