# SPDX-License-Identifier: Apache-2.0
"""The READMEs speak of things that exist: files, rooms, commands, options, names of the package, each other.

Those of users: the front page and what it leads to in the package's folders.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import dgl_hybrid
from dgl_hybrid.cli import main, train
from dgl_hybrid.cli.one_line_parser import OneLineParser
from dgl_hybrid.planner.config import STRATEGIES
from dgl_hybrid.training.config import MODELS
from tests.cli import test_accuracy

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FILES = [ROOT / "README.md", *sorted(ROOT.glob("dgl_hybrid/*/README.md"))]
EVERYTHING = "\n\n".join(file.read_text(encoding="utf-8") for file in FILES)

# Frozen on purpose, with the fields that tests/cli/test_options.py freezes: a new knob is added to both with thought.
COMMANDS = {"demo", "partition", "plan", "train", "launch", "run", "doctor"}
GENERAL_OPTIONS = {"--help", "--config", "--print-config", "--json", "--verbose", "--debug"}


def options_of(command: str) -> set[str]:
    parser = OneLineParser(prog="p")
    import_module(main.COMMANDS[command][0]).add_options(parser)
    actions: list[argparse.Action] = parser._actions
    return {flag for action in actions for flag in action.option_strings if flag.startswith("--")}


def code_spans(text: str = EVERYTHING) -> list[str]:
    blocks = re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE)
    return [*blocks, *re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))]


def uses(text: str = EVERYTHING) -> list[tuple[str, str]]:
    """(command, the words after it) wherever a README shows a command line."""
    return re.findall(r"dgl-hybrid ([a-z]+)\b(.*)", "\n".join(code_spans(text)))


def table_after(heading: str) -> list[list[str]]:
    """The rows of the first table after some text, without its head."""
    lines = README[README.index(heading) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| ---"))
    rows = []
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows


def test_files_on_the_way_into_the_code_exist() -> None:
    way = README[README.index("**Dive into the code**") :].split("\n\n")[0]
    files = re.findall(r"`([^`]+)`", way)
    assert len(files) >= 3
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_rooms_are_the_packages_folders() -> None:
    named = {folder for row in table_after("| room |") for folder in re.findall(r"`([^`]+/)`", row[0])}
    assert sorted(folder for folder in named if not (ROOT / folder).is_dir()) == []
    packages = {f"dgl_hybrid/{file.parent.name}/" for file in (ROOT / "dgl_hybrid").glob("*/__init__.py")}
    assert packages <= named


def test_other_paths_exist() -> None:
    """Whatever looks like a path of this repository.

    What commands write there (`.gitignore`) is none, whether it lies there from an earlier run or not.
    """
    spans = {span for span in code_spans() if re.fullmatch(r"[a-z_.]+(/[\w.]+)*/(\w+\.(py|md|json))?", span)}
    written = set((ROOT / ".gitignore").read_text(encoding="utf-8").split())
    named = spans - written
    assert len(named) > 10
    assert sorted(path for path in named if not (ROOT / path).exists()) == []


def anchors(file: Path) -> set[str]:
    """What links may lead to in a file: its headings, as they are written in addresses."""
    headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_to_files_and_sections() -> None:
    links = [
        (file, *link.partition("#")[::2])
        for file in FILES
        for link in re.findall(r"\]\(([^)\s]+)\)", file.read_text(encoding="utf-8"))
        if not link.startswith("https://")
    ]
    assert {file for file, *_ in links} == set(FILES), "each leads on, or back"
    wrong = []
    for file, path, anchor in links:
        target = (file.parent / path).resolve() if path else file
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            wrong.append((file.relative_to(ROOT).as_posix(), path, anchor))
    assert wrong == []
    reached = {(file.parent / path).resolve() for file, path, _ in links if file == FILES[0] and path}
    assert set(FILES[1:]) <= reached, "the front page leads to all of them"


def test_commands_are_those_of_the_program() -> None:
    assert set(main.COMMANDS) == COMMANDS
    assert {command for command, _ in uses(README)} == COMMANDS
    rows = [re.match(r"`dgl-hybrid ([a-z]+)\b", row[0]) for row in table_after("## Command line")]
    assert [row[1] if row else None for row in rows] == list(main.COMMANDS), "the table has a row for each, in order"


def test_options_are_those_of_the_commands() -> None:
    for command, words in uses():
        ours = words.split(".py")[0]  # what comes after a script is the script's
        assert set(re.findall(r"--[a-z][a-z-]*", ours)) <= options_of(command), command
    fields_of_train = {"--" + field.name.replace("_", "-") for config in train.CONFIGS for field in fields(config)}
    assert {flag for flag in options_of("train") - fields_of_train if not flag.startswith("--no-")} == GENERAL_OPTIONS


def test_choices_are_those_of_the_program() -> None:
    """Models in the command table, strategies in theirs."""
    (words,) = (words for command, words in uses(README) if command == "train" and "|" in words)
    assert re.search(r"--model (\S+)", words.replace("\\|", "|"))[1].split("|") == list(MODELS)
    assert set(re.search(r"--strategy (\S+)", words.replace("\\|", "|"))[1].split("|")) <= set(STRATEGIES)
    explained = {name for row in table_after("## What the strategies are") for name in re.findall(r"`(\w+)`", row[0])}
    assert explained == set(STRATEGIES)


def test_names_of_the_package_exist() -> None:
    names = set(
        re.findall(r"\bdgl_hybrid\.(\w+)\(?", "\n".join(re.findall(r"```python\n(.*?)```", EVERYTHING, re.DOTALL)))
    )
    assert {"FullGraphLoader", "PartitionedGraph", "infer"} <= names
    assert names <= set(dgl_hybrid.__all__)
    assert all(callable(getattr(dgl_hybrid, name)) for name in names)


def test_commands_of_the_accuracy_table_are_those_of_its_test() -> None:
    (mark,) = (mark for mark in test_accuracy.test_accuracy.pytestmark if mark.name == "parametrize")
    tested = {name: list(options) for name, options, _ in mark.args[1]}
    rows = {row[0]: row[1].strip("`").split() for row in table_after("Test accuracy with 3 ranks")}
    assert rows == {
        name: ["dgl-hybrid", "train", "--data", f"FOLDER/{name}.npz", *options] for name, options in tested.items()
    }
