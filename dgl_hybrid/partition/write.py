# SPDX-License-Identifier: Apache-2.0
"""`partition_graph`: DGL's signature, DGL's files, and our sidecar and checksums beside them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import inspect
import itertools
import json
import logging
import numbers
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import dgl
import torch
from dgl.data.utils import save_tensors
from dgl.distributed import partition as dgl_partition
from safetensors import SafetensorError
from torch import Tensor

from dgl_hybrid.errors import PartitionError
from dgl_hybrid.partition.assign import assign_nodes, check_method, check_num_parts
from dgl_hybrid.partition.clusters import ClusterError
from dgl_hybrid.partition.dgl_files import check_graph_file, check_tensor_file
from dgl_hybrid.partition.local_order import MIN_EDGES, LocalOrder, is_sought, look_for_order
from dgl_hybrid.partition.manifest import (
    MANIFEST_NAME,
    SIDECAR_NAME,
    read_json_object,
    sync_path,
    sync_tree,
    write_manifest,
)
from dgl_hybrid.partition.narrow_ids import narrow_dtype
from dgl_hybrid.partition.quiet import captured_output
from dgl_hybrid.partition.rights import umask
from dgl_hybrid.partition.sidecar import Sidecar, write_sidecar
from dgl_hybrid.partition.signals import ending_signals_raise, ending_signals_wait
from dgl_hybrid.partition.split import PartStructure, Renumbering, counts_to_offsets, cut_part, renumber

_logger = logging.getLogger(__name__)

_PART_FILES = (
    *("graph.dgl", "node_feat.dgl", "edge_feat.dgl", SIDECAR_NAME),
    *("fused_csc_sampling_graph.pt", "fused_csc_sampling_graph.tar"),  # GraphBolt's
    *("orig_nids.dgl", "orig_eids.dgl"),  # of DGL's tools for partitioning on several hosts
)
"""What lies in the folder of a part: with these alone, it may be replaced."""

_YOUNG_S = 60.0
"""Of a folder that may belong to a process which has just made it, and not locked it yet."""

OnStep = Callable[[str, int, int], None]
"""Told as a step begins: what it is, which one it is, from 0, and how many there are."""

BalanceTypes = Tensor | dict[str, Tensor]
IdMapping = tuple[Tensor, Tensor] | tuple[dict[str, Tensor], dict[tuple[str, str, str], Tensor]]


def partition_graph(
    g: dgl.DGLGraph,
    graph_name: str,
    num_parts: int,
    out_path: str | Path,
    num_hops: int = 1,
    part_method: str = "metis",
    balance_ntypes: BalanceTypes | None = None,
    balance_edges: bool = False,
    return_mapping: bool = False,
    num_trainers_per_machine: int = 1,
    objtype: str = "cut",
    graph_formats: str | list[str] | tuple[str, ...] | None = None,
    use_graphbolt: bool = False,
    *,
    seed: int = 0,
    local_order: bool = True,
    on_step: OnStep | None = None,
    **kwargs: bool,
) -> IdMapping | None:
    """Writes a partition folder that plain DistDGL reads, with full-graph degrees and checksums beside DGL's files.

    The folder is written aside and renamed into place; an interrupted write leaves nothing that loads. Not collective:
    one process calls it. Inside one destination, edge ids rise in original edge-id order.

    Args:
        g: Graph on the CPU; directed, with duplicate edges, self-loops and isolated vertices as it likes. Its vertex
            and edge data of any dtype DGL can store are split among the parts.
        graph_name: The JSON file is called `<graph_name>.json`.
        num_parts: P, at most the number of vertices.
        out_path: Folder to write; a former partition of the same graph name in it is replaced, and so are folders
            `part<k>` that hold a part's files and no others.
        num_hops: How far the halo reaches, at least 1. The in-edges of halo vertices at in-distance < num_hops are
            stored, so `num_hops = L` holds all that an L-layer model would recompute.
        part_method: "metis", "random" or "contiguous" (1D ranges of original ids).
        balance_ntypes: As in DGL: (N_total,) classes to spread evenly (METIS only), e.g. the train mask.
        balance_edges: Balance in-edges as well (METIS), or instead of vertices (contiguous).
        return_mapping: As in DGL: return the original ids.
        num_trainers_per_machine: As in DGL: with METIS, also writes vertex and edge data "trainer_id"; `g` gets them.
        objtype: As in DGL: "cut" or "vol".
        graph_formats: As in DGL: sparse formats to store.
        use_graphbolt: As in DGL: store GraphBolt structures as well.
        seed: For part_method "random"; what DGL draws afterwards still follows from the script's own seed. METIS takes
            none, and DGL's build of it reads uninitialised memory: two calls may differ, even in one process. Keep the
            folder where a partition must be the same again.
        local_order: Look for an order of each part's vertices by locality and keep it with the part, where the graph is
            large enough for it to matter: full-graph training uses it, and looks for it at every start where it is not
            kept. It takes 2 s for 100,000 vertices of a part, and 13 to 33 s for a million.
        on_step: Told of each step as it begins, of which large graphs have long ones.
        **kwargs: As in DGL: options of the GraphBolt conversion.
    Returns:
        None, or with `return_mapping` original ids by global id of vertices and edges, (N_total,) and (E_total,) int64
        (dicts by type for heterographs).
    Raises:
        TypeError: `g` is no graph.
        ValueError: an argument is out of range or unknown.
        PartitionError: the folder cannot be written, something that is no partition's would be replaced, or METIS
            failed.
    """
    if not isinstance(g, dgl.DGLGraph):
        raise TypeError(f"partition_graph needs a dgl.DGLGraph (got {type(g).__name__})")
    _check_order(graph_name, num_parts, out_path)
    check_method(part_method)
    _check_arguments(graph_name, num_hops, num_trainers_per_machine, objtype)
    _check_formats(g)
    target = Path(out_path).absolute()
    _check_target(target, graph_name, num_parts)
    following = contextlib.ExitStack()
    staging, lock = _make_staging(target)
    following.callback(os.close, lock)

    def begin_step(what: str, number: int) -> None:
        if on_step is not None:
            on_step(what, number, num_parts + 2)

    def begin_writing() -> None:
        # What is written aside goes with this process. Not while METIS runs: it lets no Python run for minutes.
        following.enter_context(ending_signals_raise())

    try:
        begin_step(f"splitting the graph ({part_method})", 0)
        if g.is_homogeneous:
            if isinstance(balance_ntypes, dict):
                if len(balance_ntypes) != 1:
                    raise ValueError(f"balance_ntypes must name one vertex type (got {sorted(balance_ntypes)})")
                balance_ntypes = next(iter(balance_ntypes.values()))
            ids = _write_homogeneous(
                g,
                graph_name,
                num_parts,
                staging,
                num_hops=num_hops,
                part_method=part_method,
                balance_ntypes=balance_ntypes,
                balance_edges=balance_edges,
                num_trainers=num_trainers_per_machine,
                objtype=objtype,
                graph_formats=graph_formats,
                seed=seed,
                local_order=local_order,
                begin_writing=begin_writing,
                begin_part=lambda part_id: begin_step(f"writing part {part_id}", 1 + part_id),
            )
            mapping: IdMapping | None = (ids.orig_node_ids, ids.orig_edge_ids)
        else:
            if part_method == "contiguous":
                raise ValueError("part_method 'contiguous' is for homogeneous graphs; use 'metis' or 'random'")
            mapping = _write_heterograph(
                g,
                graph_name,
                num_parts,
                staging,
                num_hops=num_hops,
                part_method=part_method,
                balance_ntypes=balance_ntypes,
                balance_edges=balance_edges,
                num_trainers_per_machine=num_trainers_per_machine,
                objtype=objtype,
                graph_formats=graph_formats,
                seed=seed,
            )
            begin_writing()
        if use_graphbolt:
            _add_graphbolt(staging / f"{graph_name}.json", kwargs)
        begin_step("checksums", num_parts + 1)
        files = [str(path.relative_to(staging)) for path in sorted(staging.rglob("*")) if path.is_file()]
        write_manifest(staging, graph_name=graph_name, num_parts=num_parts, seed=seed, files=files)
        sync_tree(staging)
        _move_into_place(staging, target, graph_name)
    except OSError as error:
        raise _cannot_be_written(target, error) from error
    except (dgl.DGLError, SafetensorError) as error:
        if not _is_of_files(error):
            raise
        raise _cannot_be_written(target, error) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        following.close()
    return mapping if return_mapping else None


def _make_staging(target: Path) -> tuple[Path, int]:
    """Makes a folder beside or in the target, to write in, and removes those that killed processes have left there.

    Returns:
        It, and a descriptor of it whose lock says that somebody writes there.
    """
    # Inside a folder that is there: a working directory or a mount point is not to be renamed over, and the folder
    # above may be another user's.
    parent = target if target.is_dir() else target.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        # In both places: one that was killed before there was a target has written beside it.
        for place in dict.fromkeys((parent, target.parent)):
            for left in place.glob(f".{glob.escape(target.name)}.writing-*"):
                _remove_if_left(left)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.writing-", dir=parent))
        # mkdtemp makes the folder private; a partition is read by other users and machines, as DGL's is.
        # Its group stays that of the folder above, where that is asked for.
        staging.chmod((staging.stat().st_mode & stat.S_ISGID) | (0o775 & ~umask()))
        lock = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _cannot_be_written(target, error) from error
    with contextlib.suppress(OSError):  # of a file system without locks nothing is removed later, either
        fcntl.flock(lock, fcntl.LOCK_EX)
    return staging, lock


def _remove_if_left(folder: Path) -> None:
    """Removes what a killed process was writing, which may be as large as a partition; not what somebody writes now,
    or may be about to lock, nor a user's own folder of such a name.
    """
    with contextlib.suppress(OSError):
        if folder.is_symlink() or time.time() - folder.stat().st_mtime < _YOUNG_S:
            return
        if not all(re.fullmatch(r"part\d+|.+\.json", path.name) for path in folder.iterdir()):
            return
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


def _is_of_files(error: Exception) -> bool:
    """Whether a file could not be opened or written: libraries tell it in words, DGL by where in its source it was."""
    return ("local_filesys" if isinstance(error, dgl.DGLError) else "I/O error") in str(error)


_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.ENAMETOOLONG)
"""Why files cannot be written where there is room."""


def _cannot_be_written(target: Path, error: Exception) -> PartitionError:
    # Of DGL's words, a stack of addresses follows in further lines.
    why = "DGL could not write a file, as on a full disk" if isinstance(error, dgl.DGLError) else str(error)
    is_refused = isinstance(error, OSError) and error.errno in _REFUSED
    remedy = "Choose another out_path" if is_refused else "Free space or choose another out_path"
    return PartitionError(f"{target} cannot be written: {why}. {remedy}.")


def _write_heterograph(
    g: dgl.DGLGraph, graph_name: str, num_parts: int, folder: Path, *, seed: int, **options: object
) -> IdMapping | None:
    """Lets DGL write it: full-graph training does not read heterographs yet, sampled training does."""
    check_num_parts(num_parts, int(g.num_nodes()))
    # With the plugin on, the name leads to `partition_graph` above, which would begin again; this module may have been
    # imported before or after.
    write = inspect.unwrap(dgl_partition.partition_graph)
    # Nothing else of it draws, and what does not draw leaves the script's own draws as they are.
    is_drawn = options["part_method"] == "random" and num_parts > 1
    try:
        with (
            _seeded(seed) if is_drawn else contextlib.nullcontext(),
            captured_output("dgl.distributed.partition_graph"),
        ):
            mapping: IdMapping | None = write(g, graph_name, num_parts, str(folder), return_mapping=True, **options)
    except (IndexError, KeyError, TypeError, AssertionError, dgl.DGLError) as error:
        # KeyError: no vertex was drawn for the last part; TypeError: METIS returned nothing.
        if _is_of_files(error):
            raise
        raise PartitionError(
            f"DGL cannot write this heterograph in {num_parts} parts ({type(error).__name__}: {error}); it needs "
            "vertices and edges of every type in every part. Use fewer parts or another part_method."
        ) from error
    return mapping


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Has DGL draw from `seed`, and go on afterwards from what the script has seeded; its state cannot be read."""
    following = int(dgl.random.choice(2**31 - 1, 1))
    dgl.seed(seed)
    try:
        yield
    finally:
        dgl.seed(following)


def _add_graphbolt(part_config: Path, options: Mapping[str, bool]) -> None:
    try:
        with captured_output("dgl_partition_to_graphbolt"):
            dgl_partition.dgl_partition_to_graphbolt(str(part_config), **options)
    except ImportError as error:
        # DGL ships GraphBolt as a library per PyTorch version, and none for current ones.
        raise PartitionError(f"use_graphbolt=True needs DGL's GraphBolt library: {error}") from error


def _check_order(graph_name: object, num_parts: object, out_path: object) -> None:
    if not isinstance(graph_name, str) or isinstance(num_parts, bool) or not isinstance(num_parts, numbers.Integral):
        raise TypeError(
            f"partition_graph takes a name, a number of parts and a folder, in this order (got {graph_name!r}, "
            f"{num_parts!r}, {out_path!r})"
        )
    if not isinstance(out_path, str | os.PathLike):
        raise TypeError(f"out_path must be a folder (got {out_path!r})")


def _check_arguments(graph_name: str, num_hops: int, num_trainers: int, objtype: str) -> None:
    if not graph_name or "/" in graph_name or "\\" in graph_name or graph_name.startswith(".") or "\0" in graph_name:
        raise ValueError(f"graph_name must be usable as a file name (got {graph_name!r})")
    if f"{graph_name}.json" == MANIFEST_NAME:
        raise ValueError(f"graph_name must not be {graph_name!r}: its JSON file would be the manifest")
    if num_hops < 1:
        raise ValueError(
            f"num_hops must be at least 1 (got {num_hops}): the in-edges of owned vertices start one hop away"
        )
    if num_trainers < 1:
        raise ValueError(f"num_trainers_per_machine must be at least 1 (got {num_trainers})")
    if objtype not in ("cut", "vol"):
        raise ValueError(f"objtype must be 'cut' or 'vol' (got {objtype!r})")


def _check_formats(g: dgl.DGLGraph) -> None:
    known = sorted({name for names in g.formats().values() for name in names})
    if "coo" not in known:
        raise ValueError(
            f"a graph that is partitioned must have the format coo (got {', '.join(known)} alone): pass "
            f"g.formats(['coo', 'csr', 'csc'])"
        )


def _check_target(target: Path, graph_name: str, num_parts: int) -> None:
    if target.exists() and not target.is_dir():
        raise PartitionError(f"{target} exists and is not a folder. Choose another out_path.")
    for path in sorted(target.glob("*.json")):
        if path.name not in (f"{graph_name}.json", MANIFEST_NAME) and _has_parts_in(path):
            # DGL would mix the parts of two graphs in one folder, silently.
            raise PartitionError(
                f"{target} holds the partition of graph {path.stem!r}; writing {graph_name!r} there would "
                "overwrite its parts. Choose another out_path or remove that folder."
            )
    former = target / f"{graph_name}.json"
    # A damaged one of ours is worth nothing to anybody: the folder's manifest tells whose it was.
    if os.path.lexists(former) and not _part_files(former) and not (target / MANIFEST_NAME).is_file():
        raise PartitionError(
            f"{former} describes no partition, and would have to be replaced. Choose another out_path or remove it."
        )
    known = {path.name for path in _part_files(former)}.union(_PART_FILES)
    replaced = {target / f"part{part_id}" for part_id in range(num_parts)}
    for path in sorted(replaced.union(_part_folders(former))):
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise PartitionError(
                f"{path} is {'a link' if path.is_symlink() else 'no folder'}, and would have to be replaced. Choose "
                f"another out_path or remove it."
            )
        try:
            others = sorted(file.name for file in path.iterdir() if file.name not in known) if path.is_dir() else []
        except OSError as error:
            raise _cannot_be_written(target, error) from error
        if others:
            raise PartitionError(
                f"{path} would have to be replaced, and holds what is of no partition: {', '.join(others[:3])}"
                f"{', …' if len(others) > 3 else ''}. Choose another out_path or move that elsewhere."
            )


def _has_parts_in(path: Path) -> bool:
    """Whether a file describes a partition, ours or DGL's own, whose parts lie where another one's would."""
    return bool(_part_folders(path))


def _part_files(path: Path) -> list[Path]:
    """Returns the files of parts that a partition's JSON file names; none if it is of another kind."""
    try:
        content = read_json_object(path)
    except PartitionError:
        return []  # nothing that could be read is lost
    parts = [part for name, part in content.items() if re.fullmatch(r"part-\d+", name) and isinstance(part, dict)]
    files = [file for part in parts for file in part.values() if isinstance(file, str)]
    return [Path(os.path.normpath(path.parent / file)) for file in files]


def _part_folders(path: Path) -> list[Path]:
    """Returns the folders beside a partition's JSON file, named as ours are, in which it says that its parts lie."""
    folders = {file.parent for file in _part_files(path)}
    return sorted(
        folder for folder in folders if folder.parent == path.parent and re.fullmatch(r"part\d+", folder.name)
    )


def _write_homogeneous(
    g: dgl.DGLGraph,
    graph_name: str,
    num_parts: int,
    folder: Path,
    *,
    num_hops: int,
    part_method: str,
    balance_ntypes: Tensor | None,
    balance_edges: bool,
    num_trainers: int,
    objtype: str,
    graph_formats: str | list[str] | tuple[str, ...] | None,
    seed: int,
    local_order: bool,
    begin_writing: Callable[[], None],
    begin_part: Callable[[int], None],
) -> Renumbering:
    src, dst = (ends.to("cpu", torch.int64) for ends in g.edges(order="eid"))
    num_nodes, num_edges = int(g.num_nodes()), int(g.num_edges())
    bare = dgl.graph((src, dst), num_nodes=num_nodes)
    node_data, edge_data = dict(g.ndata), dict(g.edata)
    by_trainer = num_trainers > 1 and (part_method == "metis" or num_parts == 1)
    node_part = assign_nodes(
        bare,
        num_parts * num_trainers if by_trainer else num_parts,
        "metis" if by_trainer else part_method,
        balance_ntypes=balance_ntypes,
        balance_edges=balance_edges,
        objtype=objtype,
        seed=seed,
    )
    if by_trainer:
        node_data["trainer_id"], edge_data["trainer_id"] = node_part, node_part[dst]
        for frame, data in ((g.ndata, node_data), (g.edata, edge_data)):
            frame["trainer_id"] = data["trainer_id"].to(g.device)
        node_part = node_part // num_trainers
    begin_writing()
    ids = renumber(src, dst, node_part, num_parts)
    in_degrees = torch.bincount(dst, minlength=num_nodes)[ids.orig_node_ids]
    out_degrees = torch.bincount(src, minlength=num_nodes)[ids.orig_node_ids]
    del bare, src, dst
    ntype, etype = g.ntypes[0], ":".join(g.canonical_etypes[0])
    for part_id in range(num_parts):
        begin_part(part_id)
        part = cut_part(ids, part_id, num_hops)
        part_folder = folder / f"part{part_id}"
        part_folder.mkdir(mode=0o775)
        inner_nodes = ids.orig_node_ids[part.nodes[: part.num_inner_nodes]]
        inner_edges = ids.orig_edge_ids[part.edges[: part.num_inner_edges]]
        _save_data(part_folder / "node_feat.dgl", ntype, node_data, inner_nodes)
        _save_data(part_folder / "edge_feat.dgl", etype, edge_data, inner_edges)
        owned = slice(int(ids.node_offsets[part_id]), int(ids.node_offsets[part_id + 1]))
        halo = part.nodes[part.num_inner_nodes :]
        bool_node = [f"node/{name}" for name, data in node_data.items() if data.dtype == torch.bool]
        bool_edge = [f"edge/{name}" for name, data in edge_data.items() if data.dtype == torch.bool]
        write_sidecar(
            part_folder / SIDECAR_NAME,
            Sidecar(
                part_id=part_id,
                in_degrees=in_degrees[owned],
                out_degrees=out_degrees[owned],
                orig_node_ids=inner_nodes,
                orig_edge_ids=inner_edges,
                halo_global=halo,
                halo_in_degrees=in_degrees[halo],
                bool_data=tuple(bool_node + bool_edge),
                local_order=_order_of(part) if local_order and num_edges >= MIN_EDGES else None,
            ),
        )
        _save_structure(part_folder / "graph.dgl", part, ids, graph_formats)
    content: dict[str, object] = {
        "graph_name": graph_name,
        "num_nodes": num_nodes,
        "num_edges": num_edges,
        "part_method": part_method,
        "num_parts": num_parts,
        "halo_hops": num_hops,
        "node_map": {ntype: _ranges(ids.node_offsets)},
        "edge_map": {etype: _ranges(ids.edge_offsets)},
        "ntypes": {ntype: 0},
        "etypes": {etype: 0},
    }
    for part_id in range(num_parts):
        content[f"part-{part_id}"] = {
            "node_feats": f"part{part_id}/node_feat.dgl",
            "edge_feats": f"part{part_id}/edge_feat.dgl",
            "part_graph": f"part{part_id}/graph.dgl",
        }
    (folder / f"{graph_name}.json").write_text(json.dumps(content, indent=4), encoding="utf-8")
    return ids


def _order_of(part: PartStructure) -> LocalOrder | None:
    """Looks for an order of a part's inner vertices; None where there can be none, or METIS fails."""
    if not is_sought(part.num_inner_nodes):
        return None
    src, dst = part.src[: part.num_inner_edges], part.dst[: part.num_inner_edges]
    is_inner = src < part.num_inner_nodes
    src, dst = (ends[is_inner].to(narrow_dtype(part.num_inner_nodes)) for ends in (src, dst))
    indptr = counts_to_offsets(torch.bincount(dst, minlength=part.num_inner_nodes))
    if not bool((dst[1:] >= dst[:-1]).all()):
        src = src[torch.argsort(dst, stable=True)]  # as they will be read: by destination, then by edge id
    del dst
    try:
        return look_for_order(indptr, src, needs_clusters=True)
    except ClusterError as error:
        _logger.warning("no order of a part's vertices by locality is kept: %s. Training will look for one.", error)
        return None


def _ranges(offsets: Tensor) -> list[list[int]]:
    bounds = offsets.tolist()
    return [[start, end] for start, end in itertools.pairwise(bounds)]


def _save_data(path: Path, prefix: str, data: Mapping[str, Tensor], rows: Tensor) -> None:
    """Writes DGL's tensor file for the owned rows; DGL's own bookkeeping fields stay out, as in DGL."""
    reserved = (dgl.NID, dgl.EID, "inner_node", "inner_edge")
    kept = {f"{prefix}/{name}": tensor.cpu()[rows] for name, tensor in data.items() if name not in reserved}
    save_tensors(str(path), kept)
    _check_written(path, check_tensor_file)


def _check_written(path: Path, check: Callable[[Path, str], None]) -> None:
    """Looks whether DGL has written all of it, which does not look itself."""
    try:
        check(path, "DGL has not told of an error as it wrote it: is there a quota, or another limit?")
    except PartitionError as error:
        raise OSError(str(error)) from None


def _save_structure(
    path: Path, part: PartStructure, ids: Renumbering, graph_formats: str | list[str] | tuple[str, ...] | None
) -> None:
    structure = dgl.graph((part.src, part.dst), num_nodes=part.nodes.numel())
    structure.ndata["inner_node"] = torch.arange(part.nodes.numel()) < part.num_inner_nodes
    structure.edata["inner_edge"] = torch.arange(part.edges.numel()) < part.num_inner_edges
    structure.ndata[dgl.NID] = part.nodes
    structure.edata[dgl.EID] = part.edges
    structure.ndata["part_id"] = torch.searchsorted(ids.node_offsets, part.nodes, right=True) - 1
    # DGL's own writer casts these fields to the dtypes DistGraph servers share in memory.
    dgl_partition._save_graphs(str(path), [structure], formats=graph_formats)
    _check_written(path, check_graph_file)


def _move_into_place(staging: Path, target: Path, graph_name: str) -> None:
    """Renames the finished folder to its name; the JSON, without which nothing loads, comes last."""
    if not target.exists():
        try:
            staging.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # else another process has come first
                raise
        else:
            sync_path(target.parent)
            return
    # No signal ends it in the middle, when neither the old partition is there nor the new one.
    with _alone_in(target), ending_signals_wait():
        _replace_files(staging, target, graph_name)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Another process that has finished a partition for the same place waits: parts of two fit no JSON."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # of a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace_files(staging: Path, target: Path, graph_name: str) -> None:
    """What is replaced stays, under other names, until all is there that replaces it, and comes back if that fails."""
    last = [MANIFEST_NAME, f"{graph_name}.json"]
    new = sorted(staging.iterdir(), key=lambda path: last.index(path.name) if path.name in last else -1)
    # The old JSON goes first: from here until the last rename the folder does not load, so no mixture is ever read.
    former = [target / name for name in reversed(last)]
    former += [path for path in _part_folders(target / last[-1]) if path.is_dir()]  # of more parts than there are now
    former += [target / path.name for path in new]
    aside: list[tuple[Path, Path]] = []
    moved: list[Path] = []
    for path in list(target.iterdir()):  # what one that was killed here has left
        if re.fullmatch(r"\..+\.replaced-[0-9a-f]{8}", path.name):
            _remove(path)
    try:
        for path in dict.fromkeys(former):
            if path.exists():
                # In the same folder: a part of another user's may be renamed there, and nowhere else.
                hidden = target / f".{path.name}.replaced-{secrets.token_hex(4)}"
                path.rename(hidden)
                aside.append((hidden, path))
        sync_path(target)
        for path in new:
            if path.name == last[-1]:
                sync_path(target)
            path.rename(target / path.name)
            moved.append(path)
    except OSError:
        for now, then in [*((target / path.name, path) for path in reversed(moved)), *reversed(aside)]:
            with contextlib.suppress(OSError):  # as much as possible, and the error that was first
                now.rename(then)
        raise
    sync_path(target)
    for hidden, _ in aside:
        _remove(hidden)


def _remove(path: Path) -> None:
    """Removes a file or folder, as far as this user may."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
