# SPDX-License-Identifier: Apache-2.0
"""Node and edge fields as one rank sees them, and the id tensors whose rows are always the same tensor."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.exchange.ids import Ownership, fetch_rows
from dgl_hybrid.graph.tensor_versions import version_of
from dgl_hybrid.ops.cpu.resting_rows import new_rows


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    rows: Tensor
    version: int

    @property
    def was_changed(self) -> bool:
        return was_changed(self.rows, self.version)


@dataclass(frozen=True)
class _RowSet:
    reference: weakref.ref[Tensor]
    ids_global: Tensor | None
    """None: the referenced tensor itself, which must not be kept alive from here."""


class GraphField(ABC):
    """One node or edge field: `field[ids]` reads rows by global id, `field.local` is this rank's part.

    The rows of an id tensor that a loader yielded (`input_nodes`, `seeds`, `blocks[i].srcdata[dgl.NID]`,
    `blocks[i].edata[dgl.EID]`, …) are the same tensor at every read, until somebody writes into the field or into that
    tensor. Ranks agree on what was written when a loader begins an epoch; before that, what is read again after a write
    must be so on every rank.
    """

    name: str
    ownership: Ownership

    @property
    @abstractmethod
    def local(self) -> Tensor:
        """(N, ...) the rows this rank owns."""

    @property
    @abstractmethod
    def key(self) -> str:
        """What holds its rows: where another field takes its name, that has another key or version."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Counts the writes that all ranks know of: equal on all of them."""

    @abstractmethod
    def has_as_it_is(self, rows: Tensor) -> bool:
        """Whether `rows` is what a read returned, and nobody has written into it or made it learnable."""

    @abstractmethod
    def __getitem__(self, ids: Tensor) -> Tensor: ...

    @abstractmethod
    def identify(self, rows: Tensor) -> bool:
        """Whether `rows` is a tensor that this field returned for a loader's id tensor."""

    @abstractmethod
    def is_current(self, rows: Tensor) -> bool:
        """Whether, besides, the next read with these ids returns it again, as far as all ranks know."""

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole field, all ranks together."""
        return torch.Size((self.ownership.total, *self.local.shape[1:]))

    def __len__(self) -> int:
        return self.ownership.total


class StoredField(GraphField):
    """A field of a graph without servers.

    The first read of a loader's id tensor is collective, since some rows are owned elsewhere. Any other ids must be
    owned by this rank.
    """

    def __init__(self, name: str, local: Tensor, ownership: Ownership, row_sets: RowSets, kind: str) -> None:
        _refuse_learnable(local, kind, name)
        self.name = name
        self.ownership = ownership
        self._local = local
        self._version = 0
        self._row_sets = row_sets
        self._kind = kind
        self._local_version = version_of(local)
        self._read: dict[int, _Read | None] = {}  # by identity of the ids; None: dropped, as each key has a finalizer

    @property
    def local(self) -> Tensor:
        return self._local

    @property
    def key(self) -> str:
        return self.name

    @property
    def version(self) -> int:
        return self._version

    def __getitem__(self, ids: Tensor) -> Tensor:
        known = self._row_sets.find(self._kind, ids)
        if known is not None:
            key = id(ids)
            read = self._read.get(key)
            if read is None or read.was_changed:
                # Kept for later reads, so an ordinary tensor even if an evaluation in inference mode comes first.
                with torch.inference_mode(False):
                    communicator = self._row_sets.communicator
                    rows = fetch_rows(communicator, self.ownership, self.local, known, new_rows=new_rows).to(ids.device)
                if key not in self._read:
                    weakref.finalize(ids, self._read.pop, key, None)
                read = self._read[key] = _Read(rows, rows._version)
            return read.rows
        given: Any = ids
        ids_global = torch.empty(()) if given is None or isinstance(given, slice) else torch.as_tensor(given)
        if ids_global.dim() != 1 or ids_global.dtype == torch.bool or ids_global.is_floating_point():
            got = f"{ids_global.dtype}, shape {tuple(ids_global.shape)}" if ids_global.dim() else repr(ids)
            raise TypeError(f"{self._kind} field {self.name!r} is read by a vector of integer ids (got {got})")
        host_ids = ids_global.to("cpu", torch.int64)
        if not bool(self.ownership.is_owned(host_ids).all()):
            self.ownership.check_range(host_ids, f"{self._kind} ids")
            foreign = host_ids[~self.ownership.is_owned(host_ids)]
            raise ValueError(
                f"{self._kind} field {self.name!r}: {len(foreign)} of {len(host_ids)} ids are not owned by rank "
                f"{self.ownership.rank} of {self.ownership.world_size} (first: {int(foreign[0])}). Without servers "
                f"only owned rows and the id tensors that the loader yields can be read."
                + (_OF_A_COPY if self._row_sets.have_copied(self._kind, host_ids) else "")
            )
        return self.local[host_ids - self.ownership.start].to(ids_global.device)

    def identify(self, rows: Tensor) -> bool:
        return any(read is not None and read.rows is rows for read in self._read.values())

    def has_as_it_is(self, rows: Tensor) -> bool:
        return any(read is not None and read.rows is rows and not read.was_changed for read in self._read.values())

    def is_current(self, rows: Tensor) -> bool:
        return self.identify(rows)  # what was written is forgotten at once

    def set_local(self, rows: Tensor) -> None:
        """Replaces this rank's rows; every rank must do so, since rows read before are read again."""
        if len(rows) != len(self.local):
            raise ValueError(f"{self._kind} field {self.name!r} must have {len(self.local)} rows (got {len(rows)})")
        _refuse_learnable(rows, self._kind, self.name)
        self._local = rows
        self._local_version = version_of(rows)
        self._version += 1
        self._read.update(dict.fromkeys(self._read))

    def find_writes(self) -> int:
        """Says what happened here since the last `drop_reads`: 2 if `local` was written to, 1 if only rows that were
        read from it were, else 0. Ranks may differ.
        """
        if version_of(self._local) != self._local_version:
            return _WROTE_FIELD
        return _WROTE_ROWS if any(read is not None and read.was_changed for read in self._read.values()) else 0

    def forget(self, ids: Tensor) -> None:
        """Drops the rows of one id tensor; they are read again if asked for."""
        if id(ids) in self._read:
            self._read[id(ids)] = None

    def drop_reads(self, writes: int) -> None:
        """Lets all rows be read again; every rank does so with the greatest of what `find_writes` returned on any."""
        self._read.update(dict.fromkeys(self._read))
        self._local_version = version_of(self._local)
        self._version += writes == _WROTE_FIELD


_WROTE_ROWS, _WROTE_FIELD = 1, 2


def _refuse_learnable(rows: Tensor, kind: str, name: str) -> None:
    """Fields are read, also from other ranks; nobody would bring a gradient of a row that is held here to its owner."""
    if rows.requires_grad:
        raise ValueError(
            f"{kind} field {name!r} must not require a gradient (got rows that do): gradients of rows that other ranks "
            f"read would be lost. Keep them in the model (nn.Embedding), or train a DistEmbedding of a DistGraph; "
            f"`rows.detach()` stores their values."
        )


def was_changed(rows: Tensor, version: int) -> bool:
    """Whether the script wrote into rows it had read, or made them a leaf: the next read gives the field's rows anew.

    Within an epoch this is alike on every rank only if the program is; before each epoch ranks agree on it.
    """
    return rows._version != version or rows.requires_grad


_OF_A_COPY = (
    " These are a copy of what it has yielded: read by that very tensor, on every rank, and move what comes "
    "(`g.ndata[name][input_nodes].to(device)`). Such a copy can be read only while each rank owns all of it."
)


class RowSets:
    """The id tensors that loaders yielded, by identity: reading their rows is a collective all ranks share."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self._sets: dict[tuple[str, int], _RowSet] = {}

    def register_nodes(self, ids: Tensor) -> None:
        """Makes the rows of these node ids readable, whoever owns them. Every rank registers its own."""
        self._register("node", ids)

    def register_edges(self, ids: Tensor) -> None:
        """Makes the rows of these edge ids readable, whoever owns them. Every rank registers its own."""
        self._register("edge", ids)

    def _register(self, kind: str, ids: Tensor) -> None:
        key = (kind, id(ids))
        host_ids = ids.to("cpu", torch.int64)
        self._sets[key] = _RowSet(weakref.ref(ids), None if host_ids is ids else host_ids)
        weakref.finalize(ids, self._sets.pop, key, None)

    def find(self, kind: str, ids: object) -> Tensor | None:
        known = self._sets.get((kind, id(ids)))
        if known is None or known.reference() is not ids:
            return None
        return known.reference() if known.ids_global is None else known.ids_global

    def have_copied(self, kind: str, host_ids: Tensor) -> bool:
        """Whether these are the ids of a tensor that is registered, and not that tensor."""
        known = (self.find(kind, row_set.reference()) for (of, _), row_set in list(self._sets.items()) if of == kind)
        return any(ids is not None and torch.equal(ids.to("cpu", torch.int64), host_ids) for ids in known)


class GraphFields(Mapping[str, GraphField]):
    """The node or edge fields by name; a name that does not exist raises KeyError listing those that do."""

    @abstractmethod
    def __setitem__(self, name: str, value: Any) -> None: ...


class StoredFields(GraphFields):
    """The fields of a graph without servers."""

    def __init__(self, data: Mapping[str, Tensor], ownership: Ownership, row_sets: RowSets, kind: str) -> None:
        self._ownership, self._row_sets, self._kind = ownership, row_sets, kind
        self._fields = {name: StoredField(name, rows, ownership, row_sets, kind) for name, rows in data.items()}

    def __getitem__(self, name: str) -> StoredField:
        if name not in self._fields:
            raise KeyError(f"no {self._kind} field {name!r}; there are {sorted(self._fields) or 'none'}")
        return self._fields[name]

    def stored(self) -> Iterable[tuple[str, StoredField]]:
        return self._fields.items()

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __setitem__(self, name: str, local_rows: Tensor) -> None:
        """Adds or replaces a field by this rank's rows. Every rank does the same."""
        if name in self._fields:
            self._fields[name].set_local(local_rows)
            return
        num_owned = self._ownership.stop - self._ownership.start
        if len(local_rows) != num_owned:
            raise ValueError(f"{self._kind} field {name!r} must have {num_owned} rows (got {len(local_rows)})")
        self._fields[name] = StoredField(name, local_rows, self._ownership, self._row_sets, self._kind)

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


def find_stored_writes(fields_by_kind: Mapping[str, StoredFields]) -> dict[str, int]:
    """Returns what `find_writes` found of each field of which it found something."""
    return {key: writes for key, field in _by_key(fields_by_kind).items() if (writes := field.find_writes())}


def spread_stored_writes(
    communicator: Communicator, fields_by_kind: Mapping[str, StoredFields], found: Mapping[str, int]
) -> None:
    """Makes rows of fields that any rank found written to be read again on all. Collective."""
    fields = _by_key(fields_by_kind)
    most: Counter[str] = Counter()
    for of_rank in communicator.gather_json(found):
        most |= Counter(of_rank)  # the greater of both
    for key, writes in most.items():
        if key in fields:
            fields[key].drop_reads(writes)


def _by_key(fields_by_kind: Mapping[str, StoredFields]) -> dict[str, StoredField]:
    return {f"{kind} {name}": field for kind, of_kind in fields_by_kind.items() for name, field in of_kind.stored()}
