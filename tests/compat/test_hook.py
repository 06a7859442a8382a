# SPDX-License-Identifier: Apache-2.0
"""The import hook in fresh processes: what it touches, what it says, and what it costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dgl_hybrid import compat
from dgl_hybrid.compat.versions import find_dgl, is_in
from dgl_hybrid.errors import CompatError
from tests.compat.processes import CHECKOUT, run_python


def fake_dgl(folder: Path, version: str | None) -> Path:
    """Writes an almost empty package `dgl` of that version; returns the folder to put in front of `sys.path`."""
    package = folder / "dgl"
    (package / "_ffi").mkdir(parents=True)
    (package / "__init__.py").write_text("from ._ffi.libinfo import __version__\n")
    (package / "_ffi" / "__init__.py").write_text("")
    (package / "_ffi" / "libinfo.py").write_text(f'__version__ = "{version}"\n' if version else "")
    return folder


def test_import_is_cheap_and_leaves_dgl_alone() -> None:
    """No DGL, PyTorch or NumPy before somebody asks; under a tenth of a second of imports of ours."""
    ran = run_python(
        "import sys, time; t = time.process_time(); import dgl_hybrid; t = time.process_time() - t\n"
        "heavy = {'dgl', 'torch', 'numpy', 'packaging', 'pathlib', 're', 'typing'} & set(sys.modules)\n"
        "import json; print(json.dumps([sorted(heavy), t]))",
        flags=("-S",),  # without site-packages, where other packages' .pth files import what they like
        path=(CHECKOUT,),
    )
    assert ran.returncode == 0, ran.stderr
    heavy, seconds = json.loads(ran.stdout)
    assert heavy == []
    assert seconds < 0.1


def test_mended_modules_say_so_and_files_stay(tmp_path: Path) -> None:
    """Tracebacks show the mended text under a name that tells; DGL's files and its bytecode cache are not written."""
    dgl = find_dgl()
    assert dgl is not None
    cache = dgl / "graphbolt" / "__pycache__" / "__init__.cpython-311.pyc"
    before = [(p, p.stat().st_mtime_ns) for p in (dgl / "graphbolt" / "__init__.py", cache) if p.exists()]
    ran = run_python(
        "import dgl_hybrid, dgl, inspect\n"
        "print(dgl.graphbolt.__getattr__.__code__.co_filename) if dgl.graphbolt._unusable_because else None\n"
        "assert 'mended' in dgl.partition.get_peak_mem.__code__.co_filename\n"
        "assert 'with open(\"/proc/self/status\"' in inspect.getsource(dgl.partition.get_peak_mem)\n"
        "states = {f['name']: f['state'] for f in dgl_hybrid.compat.describe()['fixes']}\n"
        "assert states['0002-graphbolt-optional'] == 'applied' and states['0009-sparse-library'] == 'waiting', states\n"
    )
    assert ran.returncode == 0, ran.stderr
    assert before == [(p, p.stat().st_mtime_ns) for p, _ in before]


def test_import_of_dgl_warns_of_nothing() -> None:
    ran = run_python("import dgl_hybrid, dgl, dgl.distributed, dgl.nn.pytorch", flags=("-W", "error"))
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout == ""


@pytest.mark.parametrize("version", ["2.0.0", "2.4.0", "0.9.1", "nonsense"])
def test_unknown_dgl_gets_a_clear_warning(tmp_path: Path, version: str) -> None:
    """The warning names both versions and what to do, once; DGL is imported as it is."""
    ran = run_python(
        "import dgl_hybrid, dgl\nprint(dgl.__version__, dgl_hybrid.compat.dgl_version_supported())\n"
        "states = {f['state'] for f in dgl_hybrid.compat.describe()['fixes']}; assert states == {'left out'}, states\n"
        "try: dgl_hybrid.compat.require_supported_dgl()\n"
        "except Exception as error: print(type(error).__name__, error)",
        path=(fake_dgl(tmp_path, version),),
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(f"{version} False\nCompatError expected DGL >=2.1,<2.2 (got {version})")
    assert ran.stderr.count("CompatWarning") == 1
    assert f"expected DGL >=2.1,<2.2 (got {version})" in ran.stderr
    assert "pip install 'dgl==2.1.*'" in ran.stderr


def test_missing_dgl_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgl_hybrid.compat.versions.find_dgl", lambda: None)
    assert not compat.dgl_version_supported()
    with pytest.raises(CompatError, match=r"expected DGL >=2\.1,<2\.2 \(got none\)\. Install it: pip install"):
        compat.require_supported_dgl()


def test_changed_dgl_gets_a_clear_error(tmp_path: Path) -> None:
    """A file that is neither DGL's nor the mended one is not patched by guess."""
    fake_dgl(tmp_path, "2.1.0")
    (tmp_path / "dgl" / "partition.py").write_text("import os\n")
    ran = run_python("import dgl_hybrid, dgl.partition", path=(tmp_path,))
    assert ran.returncode != 0
    assert "CompatError: 0005-close-files does not fit dgl/partition.py" in ran.stderr
    assert "reinstall it" in ran.stderr


def test_files_mended_by_hand_are_recognised(tmp_path: Path) -> None:
    dgl = find_dgl()
    assert dgl is not None
    fake_dgl(tmp_path, "2.1.0")
    text = (dgl / "partition.py").read_text()
    start = text.index("def get_peak_mem")
    end = text.index("def metis_partition_assignment")
    mended = text[:start] + text[start:end].replace(
        '    for line in open("/proc/self/status", "r"):\n'
        '        if "VmPeak" in line:\n'
        '            mem = re.findall(r"\\d+", line)[0]\n'
        "            return int(mem) / 1024 / 1024\n",
        '    with open("/proc/self/status", "r") as status:\n'
        "        for line in status:\n"
        '            if "VmPeak" in line:\n'
        '                mem = re.findall(r"\\d+", line)[0]\n'
        "                return int(mem) / 1024 / 1024\n",
    )
    (tmp_path / "dgl" / "partition.py").write_text(mended + text[end:])
    ran = run_python(
        "import dgl_hybrid\n"
        "try: import dgl.partition\n"
        "except ImportError: pass  # the rest of DGL is not there\n"
        "print({f['name']: f['state'] for f in dgl_hybrid.compat.describe()['fixes']}['0005-close-files'])",
        path=(tmp_path,),
    )
    assert ran.stdout == "in DGL's files already\n", ran.stderr


def test_dgl_imported_first_is_reported(tmp_path: Path) -> None:
    """Where DGL imports without help, what was loaded before dgl_hybrid cannot be mended any more; that is said."""
    fake_dgl(tmp_path, "2.1.0")
    (tmp_path / "dgl" / "partition.py").write_text("")
    ran = run_python(
        "import dgl.partition, dgl_hybrid\n"
        "print({f['name']: f['state'] for f in dgl_hybrid.compat.describe()['fixes']}['0005-close-files'])",
        path=(tmp_path,),
    )
    assert ran.stdout == "too late: dgl was imported before dgl_hybrid\n", ran.stderr


def test_spawned_processes_are_mended() -> None:
    """A spawned child gets the same DGL, although it imports dgl (through the pickled graph) and never dgl_hybrid."""
    ran = run_python(
        "import dgl_hybrid, dgl, torch.multiprocessing as mp\n"
        "if __name__ == '__main__':\n"
        "    with mp.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.apply(len, ([dgl.graph(([0, 1], [1, 2]))],)))\n"
    )
    assert (ran.returncode, ran.stdout) == (0, "1\n"), ran.stderr[-2000:]


AFTER = """
import sys
from dgl_hybrid.compat import after_dgl_import
seen = []
def note(name):
    spec = sys.modules["dgl"].__spec__
    seen.append((name, hasattr(sys.modules["dgl"], "last"), type(spec.loader).__name__))
after_dgl_import(lambda: note("first"))
after_dgl_import(lambda: note("second"))
assert seen == []
import dgl._ffi
assert dgl.__loader__ is dgl.__spec__.loader
after_dgl_import(lambda: note("late"))
import dgl
print(seen)
"""


def test_callback_runs_once_when_dgl_is_there(tmp_path: Path) -> None:
    """At the end of dgl's own code, in order, also when a submodule is asked for; afterwards at once."""
    fake_dgl(tmp_path, "2.1.0")
    (tmp_path / "dgl" / "__init__.py").write_text("from ._ffi.libinfo import __version__\nlast = 1\n")
    ran = run_python(AFTER, path=(tmp_path,))
    assert ran.returncode == 0, ran.stderr
    loader = "'SourceFileLoader'"
    assert ran.stdout == f"[('first', True, {loader}), ('second', True, {loader}), ('late', True, {loader})]\n"


def test_callback_waits_for_an_import_that_ends_well(tmp_path: Path) -> None:
    """Its own exception is raised by the import that set it off."""
    fake_dgl(tmp_path, "2.1.0")
    (tmp_path / "dgl" / "__init__.py").write_text("import os\n1 / int(os.environ['GOOD'])\n")
    ran = run_python(
        "import os, dgl_hybrid.compat as compat\n"
        "def fail(): raise ValueError('from the callback')\n"
        "compat.after_dgl_import(lambda: print('called'))\n"
        "compat.after_dgl_import(fail)\n"
        "for good in '01':\n"
        "    os.environ['GOOD'] = good\n"
        "    try: import dgl\n"
        "    except Exception as error: print(type(error).__name__, error)\n",
        path=(tmp_path,),
    )
    assert ran.stdout == "ZeroDivisionError division by zero\ncalled\nValueError from the callback\n", ran.stderr


def test_versions() -> None:
    assert is_in("2.1.0", ">=2.1,<2.2")
    assert is_in("2.1.0+cu121", ">=2.1,<2.2")
    assert not is_in("2.2.1", ">=2.1,<2.2")
    assert not is_in("nonsense", ">=2.1,<2.2")


def test_describe_is_json() -> None:
    described = compat.describe()
    assert json.loads(json.dumps(described)) == described
    assert described["dgl_supported"] is True
    assert described["torch"]


def test_unknown_names_of_the_package_raise() -> None:
    import dgl_hybrid

    with pytest.raises(AttributeError, match="has no attribute 'partition_graf'"):
        _ = dgl_hybrid.partition_graf  # type: ignore[attr-defined]
    assert set(dgl_hybrid.__all__) <= set(dir(dgl_hybrid))


def test_packages_are_reached_by_their_names() -> None:
    """Without an import of their own; named by `dir`, and loaded only then."""
    ran = run_python(
        "import sys, dgl_hybrid\n"
        "assert {'planner', 'partition', 'launch'} <= set(dir(dgl_hybrid)) and 'dgl' not in sys.modules\n"
        "print(dgl_hybrid.planner.load_plan.__name__, dgl_hybrid.planner is sys.modules['dgl_hybrid.planner'])\n",
        path=(CHECKOUT,),
    )
    assert ran.stdout == "load_plan True\n", ran.stderr[-2000:]
