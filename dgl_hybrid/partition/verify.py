# SPDX-License-Identifier: Apache-2.0
"""`verify_partition`: are all files of a folder there, and are they what was written?"""

from __future__ import annotations

import logging
from pathlib import Path

from dgl_hybrid.errors import PartitionError
from dgl_hybrid.partition.dgl_files import check_graph_file, check_tensor_file
from dgl_hybrid.partition.manifest import (
    MANIFEST_NAME,
    SIDECAR_NAME,
    WRITTEN_OVER_REMEDY,
    Manifest,
    check_file,
    read_json_object,
    read_manifest,
)
from dgl_hybrid.partition.summary import PartitionSummary, read_partition_summary

_logger = logging.getLogger(__name__)
_REMEDY = "Copy the folder again from its source, or write it anew with dgl_hybrid.partition_graph."
_PLAIN_REMEDY = "Copy the folder again from its source, or partition the graph anew."


def verify_partition(
    part_config: str | Path, part_id: int | None = None, *, checksums: bool = True, sizes: bool = True
) -> None:
    """Checks the files of one part, or of all, against the manifest before any of them is parsed.

    Not collective. A plain DistDGL folder has no checksums; its files must exist and not be empty. So it is with one
    that DGL has written over one of ours, leaving what was beside its own files; a warning says so.

    Args:
        part_config: Path of `<graph name>.json`.
        part_id: The part whose files must be here (machines hold their own part only), or None for all.
        checksums: Compare what is in the files: all of them are read.
        sizes: Look whether one is cut short, which takes no time. With both False, files need only be there.
    Raises:
        ValueError: part_id is not one of the parts.
        PartitionError: a file is missing, truncated or changed; names it and says what to do.
    """
    summary = read_partition_summary(part_config)
    if part_id is not None and not 0 <= part_id < summary.num_parts:
        raise ValueError(f"part_id must be in 0..{summary.num_parts - 1} for {summary.part_config} (got {part_id})")
    part_ids = range(summary.num_parts) if part_id is None else (part_id,)
    for part in part_ids:
        _check_present(summary, part)
    manifest = read_manifest(summary.folder)
    if manifest is not None and not summary.has_sidecar:
        if checksums and manifest.graph_name == summary.graph_name:
            # Somebody has changed it, or DGL has written another partition of this name: nobody can tell.
            raise PartitionError(
                f"{summary.part_config}: checksum mismatch: it is not the file that {MANIFEST_NAME} lists. {_REMEDY} "
                f"{WRITTEN_OVER_REMEDY}"
            )
        _logger.warning("%s", _manifest_of_another(summary))
        return
    if manifest is None or not (checksums or sizes):
        return
    wanted = {summary.part_config.name}
    for part in part_ids:
        wanted |= {name for name in manifest.files if name.startswith(f"part{part}/")}
        files = summary.part_files[part]
        wanted |= {files.part_graph, files.node_feats, files.edge_feats}
        if summary.is_homogeneous:
            wanted.add(f"part{part}/{SIDECAR_NAME}")
    for name in sorted(wanted):
        _check_listed(summary, manifest, name, checksum=checksums)


def find_problems_of_plain_part(part_config: str | Path, part_id: int) -> list[str]:
    """Looks for what would keep DistDGL's servers from opening a part that DGL has written. Not collective.

    Their errors name no file, and one that is cut short ends them in the midst of DGL's C++. What else a JSON file may
    say, which other versions of DGL understand, is not judged.

    Args:
        part_config: Path of `<graph name>.json`.
        part_id: The part whose files must be here.

    Returns:
        In words, one for each file that is missing or damaged.
    """
    path = Path(part_config)
    try:
        part = read_json_object(path).get(f"part-{part_id}")
    except PartitionError as error:
        return [str(error)]
    if not isinstance(part, dict):
        return []
    problems = []
    for key in ("part_graph", "node_feats", "edge_feats"):
        name = part.get(key)
        if not isinstance(name, str) or (key == "part_graph" and "part_graph_graphbolt" in part):
            continue
        file = path.parent / name
        if not file.is_file():
            problems.append(f"{file} is missing, which {path.name} names for part {part_id}. {_PLAIN_REMEDY}")
        else:
            try:
                (check_graph_file if key == "part_graph" else check_tensor_file)(file, _PLAIN_REMEDY)
            except PartitionError as error:
                problems.append(str(error))
    return problems


def verify_sidecar(summary: PartitionSummary, part_id: int) -> None:
    """Compares a part's sidecar and the structure that it is of with the manifest's checksums; reads both files.

    Not collective. For who takes facts from a sidecar and the structure from elsewhere; the JSON file may have been
    rewritten since, as by DGL's conversion to GraphBolt.

    Raises:
        PartitionError: one of them is not what was written, or cannot be read; names it.
    """
    manifest = read_manifest(summary.folder)
    if manifest is None or manifest.graph_name != summary.graph_name:
        raise PartitionError(_manifest_of_another(summary))
    for name in (summary.part_files[part_id].part_graph, f"part{part_id}/{SIDECAR_NAME}"):
        _check_listed(summary, manifest, name, checksum=True)


def _manifest_of_another(summary: PartitionSummary) -> str:
    return (
        f"{summary.folder / MANIFEST_NAME} is of another partition than {summary.part_config.name}, which something "
        f"else has written or changed since: that one is read as plain DistDGL, without original ids and checksums. "
        f"Delete {MANIFEST_NAME} and part*/{SIDECAR_NAME}, or partition anew with dgl_hybrid.partition_graph."
    )


def _check_listed(summary: PartitionSummary, manifest: Manifest, name: str, *, checksum: bool) -> None:
    record = manifest.files.get(name)
    if record is None:
        raise PartitionError(
            f"{summary.folder / name} is not listed in {MANIFEST_NAME}, which is damaged or of another partition. "
            f"{_REMEDY}"
        )
    check_file(summary.folder, name, record, checksum=checksum)


def _check_present(summary: PartitionSummary, part_id: int) -> None:
    files = summary.part_files[part_id]
    for name in (files.part_graph, files.node_feats, files.edge_feats):
        path = summary.folder / name
        if not path.is_file() or path.stat().st_size == 0:
            word = "is empty" if path.is_file() else "is missing"
            raise PartitionError(f"{path} {word}; {summary.part_config.name} names it. {_REMEDY}")
    sidecar = summary.folder / f"part{part_id}" / SIDECAR_NAME
    if summary.manifest_graph_name is None and sidecar.exists():
        raise PartitionError(
            f"{summary.folder / MANIFEST_NAME} is missing although {sidecar.relative_to(summary.folder)} is there. "
            "Copy it from the original folder, or delete the hybrid.safetensors files to read this as plain DistDGL."
        )
    if summary.has_sidecar and summary.is_homogeneous and not sidecar.is_file():
        raise PartitionError(f"{sidecar} is missing; {MANIFEST_NAME} lists it. {_REMEDY}")
