# SPDX-License-Identifier: Apache-2.0
"""Plans on disk: ids in safetensors, everything else in JSON that holds the ids' checksum and its own. No pickle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from ..errors import PlanError
from .durable import write_durably
from .estimate import EpochEstimate
from .model_trace import ModelTrace
from .plan import DependencyPlan
from .topology import Topology

FORMAT_VERSION = 1


def plan_paths(directory: Path, rank: int) -> tuple[Path, Path]:
    """Returns the JSON and the safetensors path of one rank's plan."""
    return directory / f"plan_rank{rank}.json", directory / f"plan_rank{rank}.safetensors"


def save_plan(plan: DependencyPlan, directory: str | Path) -> Path:
    """Writes one rank's plan into `directory`, aside first, and returns the JSON file's path.

    Not collective: each rank saves its own. A crash between the two renames leaves a pair that does not load.

    Args:
        plan: Of this rank.
        directory: Made if it is not there; ranks may share it.

    Raises:
        PlanError: There is no plan.
        OSError: The files cannot be written; where their bytes cannot, those of before are as they were.
    """
    if not isinstance(plan, DependencyPlan):
        raise PlanError(
            f"there is no plan to save (got {type(plan).__name__}): a loader has one from its second epoch on, at once "
            f"if it is given model="
        )
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    json_path, ids_path = plan_paths(directory, plan.rank)
    blob = save_tensors({f"cached_{level}": ids.contiguous() for level, ids in enumerate(plan.cached)})
    record: dict[str, object] = {
        "format_version": FORMAT_VERSION,
        "strategy": plan.strategy,
        "rank": plan.rank,
        "world_size": plan.world_size,
        "num_layers": plan.num_layers,
        "num_cached": list(plan.num_cached),
        "communicated": list(plan.communicated),
        "objective_s": plan.objective_s,
        "estimate": plan.estimate.to_json() if plan.estimate else None,
        "trace": plan.trace.to_json() if plan.trace else None,
        "trace_digest": plan.trace.digest() if plan.trace else None,
        "topology": plan.topology.to_json() if plan.topology else None,
        "topology_digest": plan.topology.digest() if plan.topology else None,
        "partition_fingerprint": plan.partition_fingerprint,
        "chunk_rows": plan.chunk_rows,
        "made_for": None if plan.made_for is None else dict(plan.made_for),
        "ids_sha256": hashlib.sha256(blob).hexdigest(),
        "ids_bytes": len(blob),
    }
    record["record_sha256"] = _record_digest(record)
    write_durably(directory, {ids_path.name: blob, json_path.name: (json.dumps(record, indent=1) + "\n").encode()})
    return json_path


def load_plan(
    directory: str | Path,
    rank: int,
    *,
    world_size: int | None = None,
    num_layers: int | None = None,
    partition_fingerprint: str | None = None,
    made_for: Mapping[str, str | int | float] | None = None,
) -> DependencyPlan:
    """Reads and checks the plan of `rank`.

    Args:
        directory: Where `save_plan` wrote.
        rank: Whose plan.
        world_size: Checked if given.
        num_layers: Checked if given.
        partition_fingerprint: Checked if given.
        made_for: Checked if given, as far as the plan tells.

    Raises:
        PlanError: Missing, damaged, or for another rank, world size, layer count, partition or model.
    """
    directory = Path(directory)
    json_path, ids_path = plan_paths(directory, rank)
    try:
        record = json.loads(json_path.read_bytes())
        blob = ids_path.read_bytes()
    except FileNotFoundError as error:
        raise PlanError(
            f"no plan for rank {rank}: {error.filename} is missing; make one with `dgl-hybrid plan`"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(f"{json_path} is damaged ({error}); plan again") from error
    version = record.get("format_version") if isinstance(record, dict) else None
    if version != FORMAT_VERSION:
        raise PlanError(f"{json_path} must have format version {FORMAT_VERSION} (got {version}); plan again")
    if record.pop("record_sha256", None) != _record_digest(record):
        raise PlanError(f"{json_path} is damaged: its checksum does not match; plan again")
    if (fault := _fault_of(record)) is not None:
        raise PlanError(f"{json_path} cannot be read ({fault}); plan again")
    if len(blob) != record["ids_bytes"] or hashlib.sha256(blob).hexdigest() != record["ids_sha256"]:
        raise PlanError(f"{ids_path} is damaged: it does not match the checksum in {json_path.name}; plan again")
    expected = {"rank": rank, "world_size": world_size, "num_layers": num_layers}
    expected |= {"partition_fingerprint": partition_fingerprint}  # type: ignore[dict-item]
    for name, value in expected.items():
        if value is not None and record[name] != value:
            raise PlanError(f"{json_path} was made for {name} {record[name]} (expected {value}); plan again")
    told = record.get("made_for") or {}
    for name, of_model in (made_for or {}).items():
        if name in told and told[name] != of_model:
            raise PlanError(
                f"{json_path} was made for a model with {name} {told[name]} (expected {of_model}); plan again"
            )
    try:
        tensors = load_tensors(blob)
        cached = tuple(tensors[f"cached_{level}"] for level in range(record["num_layers"]))
        plan = DependencyPlan(
            strategy=record["strategy"],
            rank=record["rank"],
            world_size=record["world_size"],
            num_layers=record["num_layers"],
            cached=cached,
            communicated=tuple(record["communicated"]),
            objective_s=record["objective_s"],
            estimate=EpochEstimate.from_json(record["estimate"]) if record["estimate"] else None,
            trace=ModelTrace.from_json(record["trace"]) if record["trace"] else None,
            topology=Topology.from_json(record["topology"]) if record["topology"] else None,
            partition_fingerprint=record["partition_fingerprint"],
            chunk_rows=record.get("chunk_rows"),
            made_for=record.get("made_for"),
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError, SafetensorError) as error:
        raise PlanError(f"{json_path} cannot be read ({error}); plan again") from error
    if any(ids.dtype != torch.int64 or ids.dim() != 1 for ids in cached):
        raise PlanError(f"{ids_path} must hold one-dimensional int64 ids; plan again")
    return plan


_KINDS: Mapping[str, tuple[type, ...]] = {
    "strategy": (str,),
    "rank": (int,),
    "world_size": (int,),
    "num_layers": (int,),
    "communicated": (list,),
    "objective_s": (float, int),
    "estimate": (dict, type(None)),
    "trace": (dict, type(None)),
    "topology": (dict, type(None)),
    "partition_fingerprint": (str,),
    "ids_sha256": (str,),
    "ids_bytes": (int,),
}
"""What a record holds in any case. A checksum proves that it was written so, not that it was by `save_plan`."""


def _fault_of(record: Mapping[str, Any]) -> str | None:
    for name, kinds in _KINDS.items():
        if name not in record:
            return f"{name} is missing"
        if not isinstance(record[name], kinds) or isinstance(record[name], bool):
            return f"{name} is {record[name]!r}"
    if not all(type(count) is int and count >= 0 for count in record["communicated"]):
        return f"communicated is {record['communicated']!r}"
    chunk_rows, made_for = record.get("chunk_rows"), record.get("made_for")
    if chunk_rows is not None and not (type(chunk_rows) is int and 0 < chunk_rows < 2**63):
        return f"chunk_rows is {chunk_rows!r}"
    return f"made_for is {made_for!r}" if not isinstance(made_for, dict | None) else None


def _record_digest(record: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
