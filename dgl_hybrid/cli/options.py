# SPDX-License-Identifier: Apache-2.0
"""Command-line options from config dataclasses: an option is a field, its help the field's doc string.

A value comes from the command line, else from `--config FILE`, else from the field's default.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import textwrap
import tomllib
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from dgl_hybrid.exchange.approximate import APPROXIMATIONS
from dgl_hybrid.launch.workspace import PART_METHODS
from dgl_hybrid.planner.config import STRATEGIES
from dgl_hybrid.training.config import DEVICES, DTYPES, MODELS

C = TypeVar("C")

CHOICES: dict[str, Sequence[str]] = {
    "model": MODELS,
    "strategy": STRATEGIES,
    "dtype": DTYPES,
    "device": DEVICES,
    "part_method": PART_METHODS,
    "approximate": APPROXIMATIONS,
}


def add_config_options(
    parser: argparse.ArgumentParser,
    configs: Sequence[type],
    *,
    without: Collection[str] = (),
    texts: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Adds an option for every field; those not given are absent from the parsed namespace.

    Args:
        parser: Gets the options, a group for each config.
        configs: Dataclasses.
        without: Fields that are no options of this command.
        texts: Help by field, where the field's doc string is not what this command does.
    """
    for config in configs:
        group = parser.add_argument_group(config.__name__.removesuffix("Config").lower())
        documentation = {**field_docs(config), **texts}
        for field in fields(config):
            if field.name in without:
                continue
            default = "" if field.default is None else f" [{field.default}]"
            text = (documentation.get(field.name, "") + default).replace("%", "%%")
            flag = "--" + field.name.replace("_", "-")
            kind = _type_of(config, field.name)
            if kind is bool:
                group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
            else:
                group.add_argument(
                    flag,
                    type=parse_bytes if field.name == "memory_budget" else kind,
                    choices=CHOICES.get(field.name),
                    metavar=None if field.name in CHOICES else kind.__name__.upper(),
                    default=argparse.SUPPRESS,
                    help=text,
                )


def resolve(
    args: argparse.Namespace, configs: Sequence[type[Any]], *, without: Mapping[str, str] = MappingProxyType({})
) -> list[Any]:
    """Builds the configs from the command line and the config file.

    Args:
        args: What the command line says.
        configs: Dataclasses.
        without: Fields that are no options of this command, and why. A file may name them with their defaults: one
            that another command has printed names every option.
    Raises:
        ValueError: The file cannot be read, or names an option that does not exist or a value that is wrong.
    """
    given = vars(args)
    names = {field.name for config in configs for field in fields(config)} - without.keys()
    defaults = {field.name: field.default for config in configs for field in fields(config) if field.name in without}
    from_file: dict[str, Any] = {}
    if given.get("config") is not None:
        from_file = read_config_file(Path(given["config"]))
        for name, default in defaults.items():
            if name in from_file and from_file.pop(name) != default:
                raise ValueError(f"{given['config']}: {name} is no option of this command: {without[name]}")
        unknown = sorted(set(from_file) - names)
        if unknown:
            raise ValueError(f"{given['config']}: unknown option {unknown[0]!r}; there are {', '.join(sorted(names))}")
    resolved = []
    for config in configs:
        values = {}
        for field in fields(config):
            if field.name in given:
                values[field.name] = given[field.name]
            elif field.name in from_file:
                values[field.name] = _checked(config, field.name, from_file[field.name], given["config"])
            if values.get(field.name) == "":  # a variable of the shell that is not set: "" would be the current folder
                flag = "--" + field.name.replace("_", "-")
                raise ValueError(f"{flag} must not be empty; leave it out for its default")
        resolved.append(config(**values))
    return resolved


def flatten(configs: Sequence[Any]) -> dict[str, Any]:
    """Returns all options of some configs, as `--config` reads them."""
    return {name: value for config in configs for name, value in asdict(config).items()}


def read_config_file(path: Path) -> dict[str, Any]:
    """Reads options from a .toml or .json file, named as the fields.

    Raises:
        ValueError: It cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors of Windows begin with a mark of it
        is_toml = path.suffix.lower() == ".toml"
        content = tomllib.loads(text) if is_toml else json.loads(text, object_pairs_hook=_without_doubles)
    except OSError as error:
        raise ValueError(f"config file {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # includes both decoders' errors
        kind = "TOML" if path.suffix.lower() == ".toml" else "JSON, as which all but .toml files are read"
        raise ValueError(f"config file {path} is not valid {kind}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"config file {path} must hold options by name (got {type(content).__name__})")
    named = [(name.replace("-", "_"), value) for name, value in content.items()]
    return _without_doubles(named, f"config file {path}: ")


def _without_doubles(pairs: Sequence[tuple[str, Any]], where: str = "") -> dict[str, Any]:
    """Returns a dict of them; of a name that is given twice, JSON would take the last value without a word.

    Raises:
        ValueError: One is.
    """
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{where}{name} is given twice")
        found[name] = value
    return found


def parse_bytes(text: str) -> float:
    """Reads a number of bytes: 200e6, 200MB, 1.5GiB."""
    units = {"": 1, "B": 1}
    for power, letter in enumerate("KMGT", start=1):
        units[letter] = units[letter + "B"] = 1000**power
        units[letter + "IB"] = 1024**power
    number = text.strip().upper()
    unit = ""
    while number and not (number[-1].isdigit() or number[-1] == "."):
        number, unit = number[:-1], number[-1] + unit
    if unit.strip() not in units:
        raise argparse.ArgumentTypeError(f"must be bytes such as 200e6 or 200MB (got {text!r})")
    try:
        return float(number) * units[unit.strip()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be bytes such as 200e6 or 200MB (got {text!r})") from None


@cache
def field_docs(config: type) -> Mapping[str, str]:
    """Returns the doc string under each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(config))).body[0]
    assert isinstance(body, ast.ClassDef)
    documentation = {}
    for statement, follower in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(follower, ast.Expr)
            and isinstance(follower.value, ast.Constant)
            and isinstance(follower.value.value, str)
        ):
            documentation[statement.target.id] = " ".join(follower.value.value.split())
    return documentation


def _type_of(config: type, name: str) -> type:
    hint = typing.get_type_hints(config)[name]
    if isinstance(hint, types.UnionType):
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    assert isinstance(hint, type)
    return hint


def _checked(config: type, name: str, value: Any, source: object) -> Any:
    kind = _type_of(config, name)
    hint = typing.get_type_hints(config)[name]
    if value is None and isinstance(hint, types.UnionType):
        return None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if name == "memory_budget" and isinstance(value, str):
        try:
            return parse_bytes(value)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{source}: {name} {error}") from None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{source}: {name} must be of type {kind.__name__} (got {value!r})")
    return value
