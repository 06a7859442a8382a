# SPDX-License-Identifier: Apache-2.0
"""From a dataset's name to a partition folder: written once into the workspace, keyed by content, verified on reuse."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from dgl_hybrid.datasets import GraphDataset, load_dataset
from dgl_hybrid.datasets.spec import named_transforms, parse_spec
from dgl_hybrid.datasets.transforms import normalize_rows
from dgl_hybrid.errors import PartitionError
from dgl_hybrid.ops.compiled_code import user_cache_folder
from dgl_hybrid.partition import partition_graph, read_partition_summary, verify_partition
from dgl_hybrid.partition.location import find_part_config
from dgl_hybrid.partition.manifest import MANIFEST_NAME, hash_file
from dgl_hybrid.partition.write import OnStep
from dgl_hybrid.planner.durable import write_durably

_logger = logging.getLogger(__name__)

PART_METHODS = ("metis", "random", "contiguous")
_WITH_SELF_LOOPS = ("gcn", "gat", "gatv2")
_OF_A_NEW_PARTITION = ("part_method", "num_hops", "workspace")
_DATASET_FILE = "dataset.json"
"""What we know of the graph beyond what DGL's files say; believed for the very partition that it was written for."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
"""What file systems answer that have none: Lustre as it is often mounted, FUSE, some NFS."""
_FORMAT = 2
"""Part of every key: raised when datasets or partitions come out differently."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The graph."""

    data: str = "powerlaw"
    """Name of a graph (powerlaw, powerlaw:nodes=50000,degree=20, dgl:cora, ogb:ogbn-arxiv), or path of an .npz file."""
    symmetric: bool | None = None
    """Add the reverse of every arc and keep one of parallel arcs; by default for the model gcn, which is defined on
    undirected graphs."""
    self_loops: bool | None = None
    """Give every vertex one self-loop; by default for the models gcn, gat and gatv2, which are defined with them."""
    normalize_features: bool | None = None
    """Divide each row of features by its sum; by default where all features are 0 or 1 (bags of words)."""

    def for_model(self, model: str) -> DataConfig:
        """Returns the config with what the graph's name says (`g.npz:symmetric=false`) and the model's defaults filled
        in.

        Raises:
            DatasetError, ValueError: See `with_options_of_name`.
        """
        given = self.with_options_of_name()
        return replace(
            given,
            symmetric=model == "gcn" if given.symmetric is None else given.symmetric,
            self_loops=model in _WITH_SELF_LOOPS if given.self_loops is None else given.self_loops,
        )

    def with_options_of_name(self) -> DataConfig:
        """Returns the config with what the graph's name says filled in.

        Raises:
            DatasetError: The name has options that are none.
            ValueError: It says other than this config does.
        """
        named = named_transforms(self.data)
        for name, value in named.items():
            if getattr(self, name) not in (None, value):
                flag = ("--no-" if value else "--") + name.replace("_", "-")
                raise ValueError(
                    f"--data {self.data} says {name}={str(value).lower()}, and {flag} is given: leave out one of them"
                )
        return DataConfig(**{**asdict(self), **named})

    def load(self) -> GraphDataset:
        """Loads the graph.

        Raises:
            DatasetError: Unknown, malformed, NaN features, ….
            ValueError: The graph's name says other than this config does.
        """
        given = self.with_options_of_name()
        dataset = load_dataset(
            self.data,
            symmetric=bool(given.symmetric),
            self_loops=bool(given.self_loops),
            normalize_features=bool(given.normalize_features),
        )
        feat = dataset.graph.ndata["feat"]
        # Some rows at a time: of all of them this would take three quarters of their memory once more.
        are_binary = (bool(((rows == 0) | (rows == 1)).all()) for rows in feat.split(1 << 16))
        if given.normalize_features is None and all(are_binary):
            dataset.graph.ndata["feat"] = normalize_rows(feat)
        return dataset

    def changes(self) -> str:
        """Says in words what is done to the graph."""
        words = []
        if self.symmetric:
            words.append("reverse arcs added, one of parallel arcs kept")
        if self.self_loops:
            words.append("self-loops added")
        if self.normalize_features or self.normalize_features is None:
            words.append("feature rows normalised" + ("" if self.normalize_features else " if binary"))
        return ", ".join(words) or "as it is"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionConfig:
    """How the graph is split among ranks."""

    ranks: int | None = None
    """Number of ranks, and of parts; without it the parts of an existing partition, else 2."""
    part_method: str = "metis"
    """metis, random or contiguous."""
    num_hops: int = 1
    """Hops of halo stored with each part; what is missing for caching is fetched at the start."""
    partition: str | None = None
    """Existing partition to train on, a folder or its JSON file, instead of loading and partitioning a graph."""
    workspace: str | None = None
    """Folder that keeps partitions for later runs; dgl_hybrid in XDG_CACHE_HOME, else in ~/.cache, if not given."""

    def __post_init__(self) -> None:
        """Checks every field."""
        if self.ranks is not None and self.ranks < 1:
            raise ValueError(f"ranks must be at least 1 (got {self.ranks})")
        if self.part_method not in PART_METHODS:
            raise ValueError(f"unknown part_method (got {self.part_method!r}); choose one of {', '.join(PART_METHODS)}")
        if self.num_hops < 1:
            raise ValueError(f"num_hops must be at least 1 (got {self.num_hops})")


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedGraph:
    """A partition that ranks can open."""

    part_config: Path
    dataset: str
    num_classes: int | None
    num_parts: int


def check_existing_partition(data: DataConfig, partition: PartitionConfig) -> None:
    """Checks that an existing partition is not asked to be another one: it is used as it was written.

    Args:
        data: As given, without a model's defaults.
        partition: As given.
    Raises:
        ValueError: An option of how a graph is loaded or split, or where parts are kept, is given with `partition`.
    """
    if partition.partition is None:
        return
    given: list[str] = []
    for config, names in ((data, [field.name for field in fields(data)]), (partition, _OF_A_NEW_PARTITION)):
        for name in names:
            value = getattr(config, name)
            if value != getattr(type(config)(), name):
                given.append(("--no-" if value is False else "--") + name.replace("_", "-"))
    if given:
        raise ValueError(
            f"{', '.join(given)} cannot be given with --partition: the graph in {partition.partition} was loaded and "
            f"split before, and is read from there. Make another partition with `dgl-hybrid partition`, or leave out "
            "--partition."
        )


def prepare_partition(data: DataConfig, partition: PartitionConfig, *, on_step: OnStep | None = None) -> PreparedGraph:
    """Finds the partition that is asked for, or loads the graph and writes it. Not collective: one process calls it.

    Args:
        data: The graph.
        partition: How it is split, and where parts are kept.
        on_step: Told of each step, if a partition is written.

    Raises:
        DatasetError: Unknown, malformed, NaN features, ….
        PartitionError: The given partition is not one, or has another number of parts than `ranks`.
    """
    if partition.partition is not None:
        return _existing(partition.partition, partition.ranks)
    num_parts = partition.ranks or 2
    root = Path(partition.workspace) if partition.workspace else default_workspace()
    description = describe(data, partition, num_parts)
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()
    with _locked(root, digest[:16]) as is_alone:
        if is_alone:
            _remove_unfinished(root, digest[:16])
        found = _reusable(root, digest[:16])
        if found is not None:
            return found
        return _write(data, partition, num_parts, root, digest[:16], description, on_step)


def default_workspace() -> Path:
    """Returns the folder for partitions: `dgl_hybrid` in the user's cache.

    Raises:
        ValueError: There is none, as this user has no home.
    """
    folder = user_cache_folder()
    if folder is None:
        raise ValueError("there is no home folder to keep partitions in: name a folder with --workspace")
    return folder


def describe(data: DataConfig, partition: PartitionConfig, num_parts: int) -> dict[str, object]:
    """Returns what a partition's content follows from; a file counts by its content and the name it gives the graph."""
    description: dict[str, object] = {
        "format": _FORMAT,
        **asdict(data),
        "num_parts": num_parts,
        "part_method": partition.part_method,
        "num_hops": partition.num_hops,
    }
    spec = parse_spec(data.data)
    if spec is not None and spec.kind == "npz" and Path(spec.name).is_file():
        with Path(spec.name).open("rb") as stream:
            options = data.data.removeprefix(spec.name)
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        description["data"] = [content, options, Path(spec.name).name]
    return description


def _existing(location: str, ranks: int | None) -> PreparedGraph:
    part_config = find_part_config(location)
    summary = read_partition_summary(part_config)
    if ranks is not None and ranks != summary.num_parts:
        raise PartitionError(
            f"{part_config} has {summary.num_parts} parts (asked for: {ranks}). Start {summary.num_parts} ranks, or "
            f"partition the graph into {ranks} parts."
        )
    described = _read_description(part_config) if summary.has_sidecar else None
    dataset, num_classes = described or (summary.graph_name, None)
    return PreparedGraph(part_config=part_config, dataset=dataset, num_classes=num_classes, num_parts=summary.num_parts)


def _read_description(part_config: Path) -> tuple[str, int] | None:
    """Returns the graph's full name and number of classes; None if nothing tells them, or of another partition."""
    folder = part_config.parent
    try:
        content = json.loads((folder / _DATASET_FILE).read_text(encoding="utf-8"))
        if (
            content["part_config"] != part_config.name
            or content["manifest"] != hash_file(folder / MANIFEST_NAME).sha256
        ):
            return None
        return str(content["name"]), int(content["num_classes"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remove_unfinished(root: Path, key: str) -> None:
    """Removes what killed processes were writing, large as it may be; the caller holds the lock, so nobody writes."""
    for folder in (root, *root.glob(f"*-{key}")):
        for path in folder.glob(f".*-{key}.writing-*"):
            shutil.rmtree(path, ignore_errors=True)


def _reusable(root: Path, key: str) -> PreparedGraph | None:
    for folder in sorted(root.glob(f"*-{key}")):
        if not (folder / _DATASET_FILE).is_file():
            continue  # interrupted before it was complete
        try:
            prepared = _existing(str(folder), None)
            verify_partition(prepared.part_config)
            if prepared.num_classes is None:
                continue  # written over by something else, or by an earlier version
        except (PartitionError, OSError) as error:
            _logger.warning("partitioning again, the kept partition is damaged: %s", error)
            continue
        _logger.info("using the partition in %s", folder)
        return prepared
    return None


def _write(
    data: DataConfig,
    partition: PartitionConfig,
    num_parts: int,
    root: Path,
    key: str,
    description: dict[str, object],
    on_step: OnStep | None,
) -> PreparedGraph:
    dataset = load_graph(data, on_step)
    folder = root / f"{graph_name_of(dataset.name)}-{num_parts}-{key}"
    part_config = write_partition(dataset, num_parts, folder, partition, description, on_step=on_step)
    return PreparedGraph(
        part_config=part_config,
        dataset=dataset.name,
        num_classes=dataset.num_classes,
        num_parts=num_parts,
    )


def load_graph(data: DataConfig, on_step: OnStep | None) -> GraphDataset:
    """Returns the graph as `data` tells; the first step of a partition."""
    if on_step is not None:
        on_step(f"loading {data.data}", 0, 1)
    return data.load()


def graph_name_of(dataset_name: str) -> str:
    """Returns what a dataset's partition is called: usable as a file name, and not that of our own description."""
    name = "".join(c if c.isalnum() or c in "-_" else "-" for c in dataset_name) or "graph"
    return f"{name}_graph" if f"{name}.json" in (_DATASET_FILE, MANIFEST_NAME) else name


def write_partition(
    dataset: GraphDataset,
    num_parts: int,
    folder: Path,
    partition: PartitionConfig,
    description: dict[str, object],
    *,
    on_step: OnStep | None = None,
) -> Path:
    """Writes a partition folder and, last, what it was made from. Returns its JSON file.

    Raises:
        PartitionError: It cannot be written, or would overwrite another graph's partition or a file that is not ours.
    """
    _check_ours(folder / _DATASET_FILE)
    graph_name = graph_name_of(dataset.name)
    partition_graph(
        dataset.graph,
        graph_name,
        num_parts,
        folder,
        num_hops=partition.num_hops,
        part_method=partition.part_method,
        on_step=on_step,
    )
    record = {
        "name": dataset.name,
        "num_classes": dataset.num_classes,
        "part_config": f"{graph_name}.json",
        "manifest": hash_file(folder / MANIFEST_NAME).sha256,
        "made_from": description,
    }
    write_durably(folder, {_DATASET_FILE: (json.dumps(record, indent=1) + "\n").encode()})
    return folder / f"{graph_name}.json"


def _check_ours(path: Path) -> None:
    """Raises if there is a file that nobody can have from us: somebody's own description of data, most likely."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except NotADirectoryError:
        file = next(folder for folder in path.parents if folder.exists())
        raise PartitionError(f"{file} is a file, and a partition needs a folder: name another one") from None
    except OSError as error:
        raise PartitionError(f"{path} cannot be read ({error.strerror}): choose another folder") from error
    except ValueError:
        content = None
    if not isinstance(content, dict) or "made_from" not in content:
        raise PartitionError(
            f"{path} is not one of dgl_hybrid's, and a partition in this folder would overwrite it. Choose another "
            f"folder, or move that file."
        )


@contextmanager
def _locked(root: Path, key: str) -> Iterator[bool]:
    """One process at a time writes a partition; a second run of the same waits and then reuses it. Yields whether no
    other can be at it.

    Another user's workspace is read without a lock, if it has what is asked for: nothing is written there.
    """
    try:
        # Compiled code lies beside it, and nobody runs code from a folder that others may write into, which a umask
        # of 0 would make of this one.
        root.mkdir(mode=0o775, parents=True, exist_ok=True)
        file = (root / f".{key}.lock").open("w")
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) or _reusable(root, key) is None:
            raise PartitionError(
                f"the workspace {root} cannot be made, or not be written into ({error.strerror}). Name another folder "
                f"with --workspace (without it, it lies in XDG_CACHE_HOME, or in .cache of HOME)."
            ) from error
        yield False
        return
    with file:
        is_locked = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            is_locked = False
            _logger.warning("%s has no locks (%s): do not start two runs of one graph at once", root, error.strerror)
        yield is_locked
