# SPDX-License-Identifier: Apache-2.0
"""The checksums of a partition folder, and checking them."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dgl_hybrid.errors import PartitionError

MANIFEST_NAME = "hybrid_manifest.json"
SIDECAR_NAME = "hybrid.safetensors"
FORMAT_VERSION = 1
_REMEDY = "Copy the folder again from its source, or write it anew with dgl_hybrid.partition_graph."
WRITTEN_OVER_REMEDY = (
    f"If something else has partitioned into this folder since, delete {MANIFEST_NAME} and part*/{SIDECAR_NAME} to "
    "read what it wrote as plain DistDGL."
)
"""To follow what is said of a file that is not as it was written."""


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What one file of the folder must be."""

    sha256: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of `hybrid_manifest.json`; all paths are relative to its folder, so the folder can be moved."""

    graph_name: str
    num_parts: int
    seed: int
    files: dict[str, FileRecord]


def hash_file(path: Path) -> FileRecord:
    """Size in bytes and SHA-256 of a file."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return FileRecord(sha256=digest, num_bytes=path.stat().st_size)


def write_manifest(folder: Path, *, graph_name: str, num_parts: int, seed: int, files: list[str]) -> None:
    """Hashes `files` (relative paths) and writes `hybrid_manifest.json` into `folder`."""
    content = {
        "format": "dgl_hybrid partition",
        "format_version": FORMAT_VERSION,
        "graph_name": graph_name,
        "num_parts": num_parts,
        "seed": seed,
        "files": {
            name: {"sha256": record.sha256, "bytes": record.num_bytes}
            for name, record in ((name, hash_file(folder / name)) for name in sorted(files))
        },
    }
    (folder / MANIFEST_NAME).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest | None:
    """Reads and checks the manifest.

    Returns:
        None if the folder has none (a plain DistDGL folder).
    Raises:
        PartitionError: the manifest is malformed, of another version, or names a path outside the folder.
    """
    path = folder / MANIFEST_NAME
    if not path.is_file():
        return None
    content = read_json_object(path)
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise PartitionError(
            f"{path}: format_version must be {FORMAT_VERSION} (got {version!r}). "
            "Write the folder anew with this version's dgl_hybrid.partition_graph."
        )
    graph_name, num_parts, seed = (
        content.get("graph_name"),
        as_count(content.get("num_parts")),
        content.get("seed", 0),
    )
    raw_files = content.get("files")
    if not isinstance(graph_name, str) or num_parts is None or not isinstance(seed, int):
        raise PartitionError(f"{path}: graph_name, num_parts and seed must be a string and two integers. {_REMEDY}")
    if not isinstance(raw_files, dict) or not raw_files:
        raise PartitionError(f"{path}: 'files' must be a non-empty object (got {type(raw_files).__name__}). {_REMEDY}")
    files: dict[str, FileRecord] = {}
    for name, entry in raw_files.items():
        check_inside(name, path)
        digest = entry.get("sha256") if isinstance(entry, dict) else None
        size = as_count(entry.get("bytes")) if isinstance(entry, dict) else None
        if not isinstance(digest, str) or re.fullmatch(r"[0-9a-f]{64}", digest) is None or size is None:
            raise PartitionError(f"{path}: entry of {name!r} must hold 'sha256' (64 hex digits) and 'bytes'. {_REMEDY}")
        files[name] = FileRecord(sha256=digest, num_bytes=size)
    return Manifest(graph_name=graph_name, num_parts=num_parts, seed=seed, files=files)


def is_manifest_of(manifest: Manifest, part_config: Path) -> bool:
    """Tells whether a partition's JSON file is the one that was written with the manifest beside it.

    DGL's own `partition_graph` leaves the manifest and the sidecars of the partition that it writes over.
    """
    return manifest.files.get(part_config.name) == hash_file(part_config)


def partition_digest(part_config: Path) -> str:
    """SHA-256 of the manifest, which has the checksums of all files; of the JSON file where there is no manifest, or
    one of another partition.
    """
    path = part_config.parent / MANIFEST_NAME
    try:
        manifest = read_manifest(part_config.parent)
        is_foreign = manifest is not None and not is_manifest_of(manifest, part_config)
    except PartitionError:
        is_foreign = False  # a damaged one: whoever reads the partition says so
    return hash_file(path if path.is_file() and not is_foreign else part_config).sha256


def check_file(folder: Path, name: str, record: FileRecord, *, checksum: bool = True) -> None:
    """Compares one file with its record; without the checksum, whether it is all there.

    Longer files are somebody's work then, who has added a field, say.

    Raises:
        PartitionError: missing, of another size (truncated), of another checksum, or unreadable; names the file.
    """
    path = folder / name
    if not path.is_file():
        raise PartitionError(f"{path} is missing; {MANIFEST_NAME} lists it with {record.num_bytes} bytes. {_REMEDY}")
    size = path.stat().st_size
    if size < record.num_bytes or (checksum and size != record.num_bytes):
        word = "truncated" if size < record.num_bytes else "longer than written"
        raise PartitionError(
            f"{path} is {word}: {record.num_bytes} bytes were written (got {size}). {_REMEDY} {WRITTEN_OVER_REMEDY}"
        )
    if not checksum:
        return
    try:
        found = hash_file(path)
    except OSError as error:
        raise PartitionError(f"{path} cannot be read: {error.strerror or error}") from error
    if found.sha256 != record.sha256:
        raise PartitionError(
            f"{path}: checksum mismatch: sha256 {record.sha256[:16]}... was written "
            f"(got {found.sha256[:16]}...). {_REMEDY} {WRITTEN_OVER_REMEDY}"
        )


def check_inside(name: object, source: Path) -> str:
    """Checks that a path read from JSON is relative and stays inside its folder.

    Raises:
        PartitionError: absolute, empty, not a string, or climbing out with "..".
    """
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        raise PartitionError(f"{source}: a file name must be a relative path (got {name!r}). {_REMEDY}")
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts:
        raise PartitionError(f"{source}: the path {name!r} leaves the partition folder. {_REMEDY}")
    return name


def read_json_object(path: Path) -> dict[str, object]:
    """Parses a JSON object.

    Raises:
        PartitionError: missing, unreadable, not JSON, or not an object; names the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PartitionError(f"{path} does not exist. Give the path of a partition's <graph name>.json.") from error
    except IsADirectoryError as error:
        raise PartitionError(f"{path} is a folder: give the <graph name>.json of the partition in it.") from error
    except OSError as error:
        raise PartitionError(f"{path} cannot be read: {error.strerror}. Check the path and its permissions.") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PartitionError(f"{path} is not valid JSON, it may be truncated ({error}). {_REMEDY}") from error
    if not isinstance(content, dict):
        raise PartitionError(f"{path} must hold a JSON object (got {type(content).__name__}). {_REMEDY}")
    return content


def sync_tree(folder: Path) -> None:
    """Flushes every file and directory below `folder` to the disk."""
    for root, _, names in os.walk(folder):
        for name in names:
            sync_path(Path(root) / name)
        sync_path(Path(root))


def sync_path(path: Path) -> None:
    """Flushes one file or directory to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def as_count(value: object) -> int | None:
    """The value itself if JSON held a non-negative integer that fits int64, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None
