# SPDX-License-Identifier: Apache-2.0
"""Trained weights on disk and what going on with them takes: safetensors files that hold their own checksum. No pickle.

A folder has `best.safetensors`, the weights of the least validation loss, and `last.safetensors`, those of the last
evaluation with the optimizer's state. Weights are named as in the `state_dict` of the model of `dgl.nn` layers, so that
`safetensors.torch.load_file` alone reads them, too.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from dgl_hybrid.errors import CheckpointError
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.planner.durable import remove_unfinished, write_durably
from dgl_hybrid.training.config import TrainJob
from dgl_hybrid.training.models import GraphStack, build_model
from dgl_hybrid.training.report import Accuracy

_logger = logging.getLogger(__name__)

BEST_NAME, LAST_NAME = "best.safetensors", "last.safetensors"
FORMAT_VERSION = 1

_KEY = "dgl_hybrid"
_OPTIMIZER = "optimizer."
"""Before the names of its tensors, which no weight has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What `build_model` is called with."""

    model: str
    in_feats: int
    hidden: int
    num_classes: int
    num_layers: int
    dropout: float
    heads: int
    dtype: str

    @classmethod
    def of(cls, job: TrainJob, in_feats: int) -> ModelFacts:
        """Of a job whose number of classes is known."""
        assert job.num_classes is not None
        return cls(in_feats=in_feats, num_classes=job.num_classes, dtype=job.training.dtype, **asdict(job.model))

    def build(self) -> GraphStack:
        """Returns a model of unmodified layers, its weights drawn anew."""
        return build_model(
            self.model,
            self.in_feats,
            self.hidden,
            self.num_classes,
            self.num_layers,
            dropout=self.dropout,
            heads=self.heads,
            dtype=getattr(torch, self.dtype),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where a run was when it was saved."""

    accuracy: Accuracy
    """Of the weights beside it; `accuracy.epoch` epochs were done."""
    best: Accuracy
    """Of the run so far."""
    loader: Mapping[str, int]
    """`FullGraphLoader.state_dict`: which dropout masks come next."""
    approximate: str | None = None
    """What was exchanged approximately by then; None: nothing, or nobody knows, of files of before."""

    def to_json(self) -> dict[str, Any]:
        """Returns a dictionary that `json.dumps` takes, NaN as null."""
        best, accuracy = (
            {k: None if math.isnan(v) else v for k, v in asdict(a).items()} for a in (self.best, self.accuracy)
        )
        return {
            "accuracy": accuracy,
            "best": best,
            "loader": dict(self.loader),
            "approximate": self.approximate,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Progress:
        """Reads what `to_json` wrote."""
        accuracy, best = (Accuracy(**_with_nan(data[name])) for name in ("accuracy", "best"))
        return cls(accuracy=accuracy, best=best, loader=data["loader"], approximate=data.get("approximate"))


def _with_nan(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: math.nan if value is None else value for name, value in record.items()}


class Checkpoints:
    """The folder of one run. Rank 0 alone reads and writes it; methods are collective, and fail on every rank or none.

    Args:
        folder: Made by `make_folder`, or when something is saved.
        communicator: Of the ranks that train.
        model: Alike on every rank; not wrapped.
        optimizer: Of all the model's parameters, in their order.
        facts: Of the model; a checkpoint of another one is refused.
        dataset: Its name, for who reads the file.
        graph: What the graph is told by, however it is partitioned; a checkpoint of another one is refused.
        seed: Of the run; a checkpoint of another one is refused.
        may_change: Options by name that a resumed run may have others of; a warning tells of those that it has.
    """

    def __init__(
        self,
        folder: str | Path,
        communicator: Communicator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        facts: ModelFacts,
        dataset: str,
        *,
        graph: Mapping[str, int | str],
        seed: int,
        may_change: Mapping[str, float],
    ) -> None:
        self._folder = Path(folder)
        self._communicator = communicator
        self._model, self._optimizer, self._facts, self._dataset = model, optimizer, facts, dataset
        self._graph, self._seed, self._may_change = dict(graph), seed, dict(may_change)
        self._lock: Callable[[], object] | None = None
        """Ends what keeps other runs out of the folder."""

    def release(self) -> None:
        """Lets other runs write into the folder. Not collective."""
        if self._lock is not None:
            self._lock()
            self._lock = None

    def _keep_others_out(self) -> None:
        """Makes sure that no other run writes into the folder until `release`, or the end of this object or process.

        Raises:
            CheckpointError: One does.
        """
        if self._lock is not None:
            return
        # The folder itself: a file of its own would be there for ever.
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(folder)
            raise CheckpointError(
                f"another run is writing into {self._folder}: choose another folder for --checkpoint, or wait for its "
                f"end and go on from it with --resume"
            ) from None
        except OSError:
            os.close(folder)  # a file system that locks no folders
            return
        self._lock = weakref.finalize(self, os.close, folder)

    def make_folder(self) -> None:
        """Makes the folder, and sure that it can be written into, by this run alone: before training, and not after it.

        Raises:
            CheckpointError: It cannot.
        """
        with self._communicator.agreed():
            if self._communicator.rank == 0:
                try:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    with tempfile.TemporaryFile(dir=self._folder):
                        pass
                    self._keep_others_out()
                    remove_unfinished(self._folder, (BEST_NAME, LAST_NAME))
                except OSError as error:
                    raise CheckpointError(
                        f"--checkpoint {self._folder} must be a folder that can be written into: {error.strerror}"
                    ) from error

    def refuse_to_overwrite(self) -> None:
        """Makes sure that no earlier run's weights would be lost.

        Raises:
            CheckpointError: There are some.
        """
        with self._communicator.agreed():
            if self._communicator.rank == 0:
                last, best = (self._folder / name for name in (LAST_NAME, BEST_NAME))
                others = ["choose another folder for --checkpoint", "delete it"]
                solutions = ["go on from it with --resume", *others] if last.exists() else others
                for path in (last, best):
                    if path.exists():
                        listed = ", ".join(f"{number}) {solution}" for number, solution in enumerate(solutions, 1))
                        raise CheckpointError(f"{path} is there already. Possible solutions: {listed}")

    def save(self, progress: Progress) -> None:
        """Writes the last weights, and the best if these are, aside first: a reader sees the old file or the new one.

        Raises:
            CheckpointError: They cannot be written; the files of before are as they were.
        """
        with self._communicator.agreed():
            if self._communicator.rank != 0:
                return
            weights = {name: value.detach().cpu().contiguous() for name, value in self._model.state_dict().items()}
            # The best first: if the run ends in between, it comes by these again after it was resumed.
            files = {BEST_NAME: weights} if progress.best == progress.accuracy else {}
            files[LAST_NAME] = weights | self._optimizer_tensors()
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                contents = {name: self._content(tensors, progress) for name, tensors in files.items()}
                write_durably(self._folder, contents)
            except OSError as error:
                raise CheckpointError(
                    f"the model of epoch {progress.accuracy.epoch} cannot be saved in {self._folder}: {error.strerror}"
                ) from error

    def restore(self) -> Progress:
        """Puts what was saved last into model and optimizer.

        Raises:
            CheckpointError: Missing, damaged, of another model, graph or seed, or still being written.
        """
        communicator = self._communicator
        record: dict[str, Any] | None = None
        tensors: dict[str, Tensor] = {}
        with communicator.agreed():
            if communicator.rank == 0:
                path = self._folder / LAST_NAME
                if path.exists():
                    self._keep_others_out()
                record, tensors = _read(path)
                self._check(path, record)
                record["shapes"] = {
                    name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()
                }
        record = communicator.broadcast_json(record)
        assert record is not None
        tensors = self._share(tensors, record["shapes"])
        weights = {name: value for name, value in tensors.items() if not name.startswith(_OPTIMIZER)}
        self._model.load_state_dict(weights)
        state: dict[int, dict[str, Tensor]] = {}
        for index, (name, _) in enumerate(self._model.named_parameters()):
            prefix = f"{_OPTIMIZER}{name}."
            state[index] = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": state})
        return Progress.from_json(record["progress"])

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        return {
            f"{_OPTIMIZER}{name}.{key}": value.detach().cpu().contiguous()
            for name, parameter in self._model.named_parameters()
            for key, value in self._optimizer.state[parameter].items()
        }

    def _content(self, tensors: dict[str, Tensor], progress: Progress) -> bytes:
        record: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "dataset": self._dataset,
            "graph": self._graph,
            "seed": self._seed,
            "options": self._may_change,
            "model": asdict(self._facts),
            "progress": progress.to_json(),
        }
        record["sha256"] = _digest(record, tensors)
        return save_tensors(tensors, {_KEY: json.dumps(record)})

    def _check(self, path: Path, record: Mapping[str, Any]) -> None:
        of_graph = self._graph | record.get("graph", {})  # files of before have not all of these
        of_run = {"seed": record.get("seed", self._seed)}
        for what, saved, given in (
            ("a model", record["model"], asdict(self._facts)),
            ("a graph", of_graph, self._graph),
            ("a run", of_run, {"seed": self._seed}),
        ):
            for name, expected in given.items():
                if saved[name] != expected:
                    raise CheckpointError(
                        f"{path} is of {what} with {name} {saved[name]} (expected {expected}). Resume with the options "
                        "it was trained with, or train anew in another folder"
                    )
        for name, saved in record.get("options", {}).items():
            given_now = self._may_change.get(name, saved)
            if given_now != saved:
                _logger.warning("%s was trained with %s %s, and goes on with %s", path, name, saved, given_now)

    def _share(self, tensors: dict[str, Tensor], shapes: Mapping[str, tuple[str, list[int]]]) -> dict[str, Tensor]:
        """Returns rank 0's tensors on every rank. Collective; float64 holds every value of the others' dtypes."""
        sizes = [math.prod(shape) for _, shape in shapes.values()]
        flat = torch.zeros(sum(sizes), dtype=torch.float64)
        if tensors:
            flat = torch.cat([tensors[name].double().flatten() for name in shapes])
        parts = self._communicator.sum_(flat).split(sizes)
        return {
            name: part.to(getattr(torch, dtype)).view(shape)
            for (name, (dtype, shape)), part in zip(shapes.items(), parts, strict=True)
        }


def load_model(path: str | Path) -> GraphStack:
    """Returns a model that `dgl-hybrid train --checkpoint` saved, in evaluation mode. Not collective.

    It is of unmodified `dgl.nn` layers: for `dgl_hybrid.infer`, or plain DGL with `[graph] * num_layers` as blocks, if
    `graph` is the one it was trained on. To graphs that it loads, `train` adds reverse edges (gcn) and self-loops (gcn,
    gat, gatv2), and it divides rows of features that are all 0 or 1 by their sums, unless told otherwise: a graph as it
    was before gives other logits, and no error. `dgl_hybrid.load_dataset(name, symmetric=True, self_loops=True,
    normalize_features=True).graph` has these changes; leave out those that were not made. How many vertices and edges
    it was trained on is logged.

    Args:
        path: `best.safetensors` or `last.safetensors`.

    Raises:
        CheckpointError: Missing or damaged.
    """
    record, tensors = _read(Path(path))
    try:
        model = ModelFacts(**record["model"]).build()
        model.load_state_dict({name: t for name, t in tensors.items() if not name.startswith(_OPTIMIZER)})
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path} is not of a model that this version builds ({error})") from error
    graph = record.get("graph", {})  # files of before do not tell
    if "edges" in graph:
        _logger.info(
            "%s was trained on %s as a graph of %s vertices and %s edges, those that were added to it included: on "
            "another one it gives other logits",
            path,
            record["dataset"],
            graph["vertices"],
            graph["edges"],
        )
    return model.eval()


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the record and the tensors of a checkpoint that is as it was written.

    Raises:
        CheckpointError: Missing, damaged, or of another version.
    """
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder: name {BEST_NAME} or {LAST_NAME} in it")
    try:
        with safe_open(path, framework="pt") as file:
            record = json.loads((file.metadata() or {})[_KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {path}") from error
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged, or not a checkpoint of dgl-hybrid ({error})") from error
    version = record.get("format_version") if isinstance(record, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{path} must have format version {FORMAT_VERSION} (got {version})")
    if record.pop("sha256", None) != _digest(record, tensors):
        raise CheckpointError(f"{path} is damaged: its checksum does not match")
    return record, tensors


def _digest(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
