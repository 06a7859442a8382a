# SPDX-License-Identifier: Apache-2.0
"""The `.pth` file: scripts that never import dgl_hybrid, what it costs others, and installing and removing it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from dgl_hybrid.compat import startup
from tests.compat.processes import CHECKOUT, run_python

PTH = CHECKOUT / "dgl_hybrid" / "compat" / "dgl_hybrid_startup.pth"
SITE = Path(sysconfig.get_paths()["purelib"])
GRAPH_IN_CHILD = """
import sys, dgl
import multiprocessing as mp
if __name__ == "__main__":
    with mp.get_context("spawn").Pool(1) as pool:
        print(pool.apply(len, ([dgl.graph(([0, 1], [1, 2]))],)), "dgl_hybrid" in sys.modules)
"""


def write_packages(folder: Path, *, torch: str = "2.13.0+cpu", library: str | None = None, missing: str = "") -> Path:
    """Writes packages that look, to `startup`, like DGL and what it needs."""
    for name in {"dgl/graphbolt", "torch", "torchdata/datapipes", "pandas", "packaging"} - {missing}:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in ("dgl", "torch", "torchdata", "pandas", "packaging"):
        if (folder / name).is_dir():
            (folder / name / "__init__.py").write_text("")
    if (folder / "torch").is_dir():
        (folder / "torch" / "version.py").write_text(f"__version__ = '{torch}'\n")
    if library:
        (folder / "dgl" / "graphbolt" / library).write_text("")
    return folder


@pytest.mark.parametrize(
    ("torch", "library", "missing", "fails"),
    [
        ("2.2.1+cu121", "libgraphbolt_pytorch_2.2.1.so", "", False),
        ("2.2.1", "libgraphbolt_pytorch_2.2.1.dylib", "", False),
        ("2.2.1", "graphbolt_pytorch_2.2.1.dll", "", False),
        ("2.2.10", "libgraphbolt_pytorch_2.2.1.so", "", True),
        ("2.13.0+cpu", "libgraphbolt_pytorch_2.2.1.so", "", True),
        ("2.2.1", "libgraphbolt_pytorch_2.2.1.so", "torchdata/datapipes", True),
        ("2.2.1", "libgraphbolt_pytorch_2.2.1.so", "pandas", True),
        ("2.2.1", "libgraphbolt_pytorch_2.2.1.so", "packaging", True),
        ("2.2.1", "libgraphbolt_pytorch_2.2.1.so", "torch", False),  # nothing that we could mend
        ("2.13.0", None, "dgl/graphbolt", False),  # a DGL from before graphbolt
    ],
)
def test_acts_only_where_dgl_would_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str, library: str | None, missing: str, fails: bool
) -> None:
    (tmp_path / "dgl").mkdir()
    (tmp_path / "torchdata").mkdir()
    write_packages(tmp_path, torch=torch, library=library if missing != "dgl/graphbolt" else None, missing=missing)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    assert startup.dgl_would_fail() is fails


@pytest.mark.parametrize("variable", ["DGL_HYBRID_ENABLE", "DGL_HYBRID_SHM_PREFIX"])
def test_acts_where_it_is_asked_for(variable: str, tmp_path: Path) -> None:
    """With such a variable, `import dgl` brings dgl_hybrid also where it would do without."""
    site = write_packages(tmp_path, torch="2.2.1", library="libgraphbolt_pytorch_2.2.1.so")
    (site / "dgl" / "_ffi").mkdir()
    (site / "dgl" / "_ffi" / "libinfo.py").write_text('__version__ = "2.1.0"\n')
    line = next(line for line in PTH.read_text().splitlines() if line.startswith("import"))
    code = "import sys; exec(sys.argv[1])\nimport dgl\nprint('dgl_hybrid' in sys.modules)"
    # Not the plugin itself: a package of the same name that has nothing but what decides.
    stub = tmp_path / "dgl_hybrid" / "compat"
    stub.mkdir(parents=True)
    (stub.parent / "__init__.py").write_text("")
    (stub / "__init__.py").write_text("")
    shutil.copy(CHECKOUT / "dgl_hybrid" / "compat" / "startup.py", stub)
    (stub / "hook.py").write_text("class FINDER:\n    @staticmethod\n    def find_spec(name): return None\n")
    values = [("", "False\n"), ("{}", "True\n")]
    if variable == "DGL_HYBRID_ENABLE":
        values += [("0", "False\n"), ("off", "False\n")]
    for value, expected in values:
        ran = run_python(code, line, path=(tmp_path,), flags=("-S",), **{variable: value})
        assert ran.stdout == expected, ran.stderr


def test_no_dgl_no_action(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert startup.dgl_would_fail() is False
    assert startup.find_dgl() is None


def test_file_is_one_import_line_and_cheap() -> None:
    """Python runs only lines that begin with `import`; every interpreter of the environment pays for ours."""
    lines = [line for line in PTH.read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == 1
    assert lines[0].startswith("import sys;")
    ran = run_python(
        "import sys, time\nline = sys.argv[1]\nbefore = set(sys.modules)\nt = time.process_time()\nexec(line)\n"
        "print(time.process_time() - t < 0.005, sorted(set(sys.modules) - before))",
        lines[0],
        flags=("-S",),
    )
    assert ran.stdout == "True []\n", ran.stderr


@pytest.fixture(scope="module")
def bare_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the packages of this one, but without dgl_hybrid and without pip."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    site = Path(subprocess.check_output([str(folder / "bin" / "python"), "-c", PRINT_SITE], text=True).strip())
    # Links, not a path in a .pth file: the environment of the tests would bring its own dgl_hybrid along.
    for entry in SITE.iterdir():
        if "dgl_hybrid" not in entry.name and not entry.name.startswith(("__editable__", "__pycache__", "pip")):
            (site / entry.name).symlink_to(entry)
    return folder


PRINT_SITE = "import sysconfig; print(sysconfig.get_paths()['purelib'])"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of what is needed to install, because building writes beside it."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("setup.py", "README.md"):
        shutil.copy(CHECKOUT / name, folder)
    for name in ("dgl_hybrid", "patches"):
        shutil.copytree(CHECKOUT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def pip(environment: Path, *args: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(environment / "bin" / "python"),
        "--disable-pip-version-check",
    ]
    done = subprocess.run([*command, *args], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_install_use_and_uninstall(bare_venv: Path, source: Path, kind: str) -> None:
    """Either way of installing brings the file; `import dgl` works in scripts and children; uninstalling undoes it."""
    python = str(bare_venv / "bin" / "python")
    as_released = run_python("import dgl", python=python)
    needs_help = as_released.returncode != 0

    options = ("--no-deps", "--no-build-isolation", "--no-index", "--use-pep517")
    pip(bare_venv, "install", *options, *(["--editable"] if kind == "editable" else []), str(source))
    ran = run_python(GRAPH_IN_CHILD, python=python)
    assert (ran.returncode, ran.stdout) == (0, f"1 {needs_help}\n"), ran.stderr[-2000:]
    where = run_python("import dgl_hybrid.compat.fixes as f; print(f.patches_folder())", python=python).stdout.strip()
    assert Path(where).is_relative_to(source if kind == "editable" else bare_venv)
    assert len(list(Path(where).glob("*.patch"))) == len(list((CHECKOUT / "patches").glob("*.patch")))
    assert (
        run_python("import dgl_hybrid.compat as c; assert c.describe()['startup_hook']", python=python).returncode == 0
    )

    site = Path(subprocess.check_output([python, "-c", PRINT_SITE], text=True).strip())
    assert (site / PTH.name).read_text() == PTH.read_text()
    pip(bare_venv, "uninstall", "--yes", "dgl_hybrid")
    assert not (site / PTH.name).exists()

    # A file that outlives the package (deleted by hand, a broken environment) does nothing and says nothing.
    shutil.copy(PTH, site)
    try:
        silent = run_python("import json; print(1)", python=python, flags=("-W", "error"))
        assert (silent.stdout, silent.stderr) == ("1\n", "")
        again = run_python("import dgl", python=python)
        assert again.returncode == as_released.returncode
        assert again.stderr.splitlines()[-1:] == as_released.stderr.splitlines()[-1:]
    finally:
        (site / PTH.name).unlink()


@pytest.mark.slow
def test_an_install_names_all_that_it_writes(source: Path, tmp_path: Path) -> None:
    """Pips without `wheel`, older than 23.1, install this way, and remove what is named."""
    command = [sys.executable, "setup.py", "-q", "install", "--single-version-externally-managed"]
    options = ["--root", str(tmp_path / "root"), "--record", str(tmp_path / "record")]
    done = subprocess.run([*command, *options], cwd=source, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    named = {line.lstrip("/") for line in (tmp_path / "record").read_text().splitlines()}
    written = {str(path.relative_to(tmp_path / "root")) for path in (tmp_path / "root").rglob("*") if path.is_file()}
    assert {path for path in written if path.endswith((".pth", ".patch"))} > {
        path for path in written if path.endswith(".pth")
    }
    # A folder that is named is removed as a whole.
    assert {path for path in written if not any(path == name or path.startswith(f"{name}/") for name in named)} == set()


@pytest.mark.slow
def test_a_broken_package_does_not_break_dgl(bare_venv: Path, tmp_path: Path) -> None:
    """Whatever goes wrong in our code, DGL's own import decides; ours is one warning."""
    python = str(bare_venv / "bin" / "python")
    (tmp_path / "dgl_hybrid" / "compat").mkdir(parents=True)
    (tmp_path / "dgl_hybrid" / "compat" / "startup.py").write_text("1 / 0\n")
    line = next(line for line in PTH.read_text().splitlines() if line.startswith("import"))
    code = "import sys; exec(sys.argv[1]); import dgl"
    ran = run_python(code, line, path=(tmp_path,), python=python)
    assert "dgl_hybrid could not mend DGL: ZeroDivisionError" in ran.stderr
    assert ran.returncode == run_python("import dgl", python=python).returncode
