# SPDX-License-Identifier: Apache-2.0
"""Parses dataset specs: `kind[:name][:key=value,...]`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dgl_hybrid.errors import DatasetError

Kind = Literal["powerlaw", "npz", "dgl", "ogb"]
TRANSFORMS = ("symmetric", "self_loops", "normalize_features")
COMMON_OPTIONS: Mapping[str, type] = {**dict.fromkeys(TRANSFORMS, bool), "seed": int}


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """A parsed spec; options are still text."""

    text: str
    kind: Kind
    name: str
    """File path for npz, dataset name for dgl and ogb, empty for powerlaw."""
    options: dict[str, str]


def parse_spec(text: str) -> DatasetSpec | None:
    """Splits a spec; None if it is of no known kind.

    Examples: "powerlaw", "powerlaw:nodes=2000,degree=8", "graphs/cora.npz", "cora.npz:self_loops=true", "dgl:cora",
    "ogb:ogbn-arxiv:symmetric=true".

    Raises:
        DatasetError: an option is not `key=value` or occurs twice.
    """
    npz = re.fullmatch(r"(?P<path>.*\.npz)(?::(?P<options>[^/]*))?", text, re.DOTALL)
    if npz is not None:
        return DatasetSpec(text=text, kind="npz", name=npz["path"], options=_split_options(npz["options"], text))
    kind, _, rest = text.partition(":")
    if kind == "powerlaw":
        return DatasetSpec(text=text, kind="powerlaw", name="", options=_split_options(rest, text))
    if kind == "dgl" or kind == "ogb":
        name, _, options = rest.partition(":")
        return DatasetSpec(
            text=text, kind="dgl" if kind == "dgl" else "ogb", name=name, options=_split_options(options, text)
        )
    return None


def convert_options(spec: DatasetSpec, known: Mapping[str, type]) -> dict[str, int | float | bool]:
    """Converts the options of a spec to their types.

    Args:
        spec: Parsed spec.
        known: Type (int, float or bool) of every option of this kind, `COMMON_OPTIONS` aside.
    Raises:
        DatasetError: unknown option (lists the known ones), a value of another type, or a negative seed.
    """
    types = {**known, **COMMON_OPTIONS}
    values: dict[str, int | float | bool] = {}
    for key in spec.options:
        if key not in types:
            raise DatasetError(f"dataset {spec.text!r}: unknown option {key!r}; known are {', '.join(sorted(types))}")
        values[key] = _convert(spec, key, types[key])
    if values.get("seed", 0) < 0:
        raise DatasetError(f"dataset {spec.text!r}: seed must not be negative (got {values['seed']})")
    return values


def named_transforms(text: str) -> dict[str, bool]:
    """Returns which of `TRANSFORMS` a spec asks for, or asks not to be made; those that it does not name are absent.

    Raises:
        DatasetError: an option is not `key=value`, occurs twice, or is neither true nor false.
    """
    spec = parse_spec(text)
    names = [] if spec is None else [name for name in TRANSFORMS if name in spec.options]
    return {name: bool(_convert(spec, name, bool)) for name in names if spec is not None}


def _convert(spec: DatasetSpec, key: str, kind: type) -> int | float | bool:
    raw = spec.options[key]
    try:
        converted: int | float | bool = _BOOLEANS[raw.lower()] if kind is bool else kind(raw)
    except (KeyError, ValueError) as error:
        raise DatasetError(f"dataset {spec.text!r}: {key} must be {_WORDS[kind]} (got {raw!r})") from error
    return converted


_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_WORDS = {bool: "true or false", int: "an integer", float: "a number"}


def _split_options(raw: str | None, text: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for item in (raw or "").split(","):
        if not item.strip():
            continue
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key or not value:
            raise DatasetError(f"dataset {text!r}: options must look like key=value,key=value (got {item!r})")
        if key in options:
            raise DatasetError(f"dataset {text!r}: option {key!r} is given twice")
        options[key] = value
    return options
