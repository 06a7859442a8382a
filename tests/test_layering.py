# SPDX-License-Identifier: Apache-2.0
"""Imports go downwards between the rooms of the package, and in no circle within one; function-local and type-checking
ones too.
"""

from __future__ import annotations

import ast
import graphlib
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dgl_hybrid"

# Each level may import from the ones after it; rooms of one level may import from each other.
LEVELS = (
    {"cli", "launch"},
    {"training"},
    {"sampling", "pipeline", "layouts"},
    {"graph"},
    {"exchange"},
    {"planner"},
    {"partition"},
    {"datasets"},
    {"ops"},
    {"compat"},
    {"errors"},
)
HEIGHT = {room: -level for level, rooms in enumerate(LEVELS) for room in rooms}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.name == "errors.py")


def imported_names(path: Path) -> set[str]:
    """Returns the dotted names in a file's imports, anywhere, and in `import_module("dgl_hybrid....")`."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            names.update(f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if called == "import_module" and node.args and isinstance(node.args[0], ast.Constant):
                names.add(str(node.args[0].value))
    return names


def imported_rooms(path: Path) -> set[str]:
    """Returns the rooms that a file imports from."""
    names = imported_names(path)
    rooms = {name.split(".")[1] for name in names if name.startswith("dgl_hybrid.")}
    return {room for room in rooms if (PACKAGE / room).is_dir() or room == "errors"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downwards(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert room in HEIGHT, f"room {room!r} has no level: add it to LEVELS"
    upwards = sorted(other for other in imported_rooms(path) if other != room and HEIGHT[other] > HEIGHT[room])
    assert not upwards, f"{path.relative_to(ROOT)} imports from {upwards}, which lie above {room!r}"


def imported_modules(path: Path) -> set[Path]:
    """Returns the files of the package that a file imports from."""
    found = set()
    for name in imported_names(path):
        parts = name.split(".")
        # What is imported from a module is named behind it: the longest name that is a file.
        for length in range(len(parts), 0, -1):
            base = ROOT.joinpath(*parts[:length])
            module = next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.exists()), None)
            if module is not None:
                found.add(module)
                break
    return found & set(PACKAGE.rglob("*.py")) - {path}


def test_no_modules_import_each_other() -> None:
    imports = {path: imported_modules(path) for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE}
    assert PACKAGE / "training" / "partitioned_graph.py" in imports[PACKAGE / "training" / "loader.py"]
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        circle = " -> ".join(str(path.relative_to(PACKAGE)) for path in reversed(error.args[1]))
        pytest.fail(f"modules import each other: {circle}")


def test_every_import_form_is_seen(tmp_path: Path) -> None:
    path = PACKAGE / "graph" / "made_up.py"
    forms = (
        "import dgl_hybrid.training.step",
        "from dgl_hybrid.training.step import Step",
        "from dgl_hybrid import training",
        "from ..training import step",
        "def f():\n    from dgl_hybrid.training import step",
        "if TYPE_CHECKING:\n    from dgl_hybrid.training import step",
        "importlib.import_module('dgl_hybrid.training.step')",
    )
    for form in forms:
        file = tmp_path / "made_up.py"
        file.write_text(form)
        tree = _Placed(path, file)
        assert imported_rooms(tree) == {"training"}, form  # type: ignore[arg-type]


class _Placed:
    """A file whose text lies elsewhere."""

    def __init__(self, path: Path, text: Path) -> None:
        self._path, self._text = path, text

    def relative_to(self, other: Path) -> Path:
        return self._path.relative_to(other)

    def read_text(self) -> str:
        return self._text.read_text()


def test_every_python_file_has_a_licence_line() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    files = [ROOT / name for name in listed.stdout.split()] or list(PACKAGE.rglob("*.py"))
    texts = {file: file.read_text() for file in files if file.exists()}
    missing = [
        str(file.relative_to(ROOT))
        for file, text in texts.items()
        if text.strip() and "SPDX-License-Identifier: Apache-2.0" not in text.split("\n", 2)[0] + text.split("\n", 2)[1]
    ]
    assert not missing
