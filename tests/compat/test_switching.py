# SPDX-License-Identifier: Apache-2.0
"""Switching fixes on and off in loaded modules: what is swapped, what stays, what is refused."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from dgl_hybrid.compat import describe, repairs
from dgl_hybrid.compat.hook import FINDER
from dgl_hybrid.compat.patchfile import apply_patches, read_fix
from dgl_hybrid.compat.versions import find_dgl
from dgl_hybrid.errors import CompatError
from tests.compat.processes import CHECKOUT, run_python

STOCK = """import os

LIMIT = 1


def plain(a, b=1):
    return a + b


def untouched():
    return plain(1)


def outer():
    def inner():
        return 1

    return inner


def fails():
    raise ValueError


class Base:
    def name(self):
        return "base"


class Thing(Base):
    def method(self):
        return 1

    @property
    def size(self):
        return 1

    @staticmethod
    def still():
        return 1

    @classmethod
    def of(cls, *, k=1):
        return cls, k

    def name(self):
        return super().name()
"""
MENDED = (
    STOCK.replace("import os\n", "import os\nimport json\n")
    .replace("LIMIT = 1", "LIMIT = 2")
    .replace(
        "def plain(a, b=1):\n    return a + b", "def plain(a, b=LIMIT * 10, *, c=3):\n    return helper(a) + b + c"
    )
    .replace("        return 1\n\n    return inner", "        return 2\n\n    return inner")
    .replace("def fails():\n    raise ValueError", 'def fails():\n\n\n    raise ValueError("mended")')
    .replace("    def method(self):\n        return 1", "    def method(self):\n        return self.added()")
    .replace("    def size(self):\n        return 1", "    def size(self):\n        return 2")
    .replace("    def still():\n        return 1", "    def still():\n        return 2")
    .replace("*, k=1", "*, k=2")
    .replace(
        "return super().name()\n",
        "return super().name() + '!'\n\n    def added(self, n=2):\n        return (super().name(), n)\n",
    )
    + "\n\ndef helper(a):\n    return json.loads('100') + a\n"
)


@pytest.fixture
def thing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module `dgl_thing` with one fix that can be switched; the fixes of DGL itself are left alone."""
    (tmp_path / "dgl_thing.py").write_text(STOCK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("dgl_hybrid.compat.require_supported_dgl", lambda: None)
    use(monkeypatch, tmp_path, MENDED)
    sys.modules.pop("dgl_thing", None)  # that of the test before
    return importlib.import_module("dgl_thing")


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    yield
    repairs.switch_off()


def use(monkeypatch: pytest.MonkeyPatch, folder: Path, mended: str) -> None:
    """Makes `mended` what the one fix turns `STOCK` into."""
    header = "Fix: x.\nDGL: >=2.1\nReason: x\nUpstream: x\nTest: x\nWhen: enabled\n\n"
    names = "--- a/dgl_thing.py\n+++ b/dgl_thing.py\n"
    old, new = STOCK.splitlines(), mended.splitlines()
    body = [f"@@ -1,{len(old)} +1,{len(new)} @@", *(f"-{line}" for line in old), *(f"+{line}" for line in new)]
    path = folder / "0099-thing.patch"
    path.write_text(header + names + "\n".join(body) + "\n")
    fix = read_fix(path)
    monkeypatch.setattr(FINDER, "_switchable", {"dgl_thing": [(fix, fix.files[0])]})
    monkeypatch.setattr(FINDER, "_fixes", (fix,))


def contents(module: ModuleType) -> dict[str, object]:
    """Everything that a switch could change, and the identity of what it must not replace."""
    found: dict[str, object] = {}
    for owner in (module, module.Base, module.Thing):
        for name, value in vars(owner).items():
            if name.startswith("__"):
                continue
            function = inspect.unwrap(value) if callable(value) else getattr(value, "fget", None)
            function = getattr(value, "__func__", function)
            found[f"{owner.__name__}.{name}"] = (id(value), value if isinstance(value, int) else None)
            if inspect.isfunction(function):
                state = (function.__code__, function.__defaults__, function.__kwdefaults__)
                found[f"{owner.__name__}.{name}()"] = state
    return found


def test_swaps_code_in_place_and_back(thing: ModuleType) -> None:
    """Functions by name, methods, properties, nested functions, defaults, new names: on, and off as before."""
    by_name, bound, before = thing.plain, thing.Thing().method, contents(thing)
    assert (by_name(1), thing.untouched(), bound()) == (2, 2, 1)
    repairs.switch_on()
    assert repairs.is_on()
    assert (by_name(1), by_name(1, 0, c=0), thing.untouched()) == (114, 101, 114)
    assert bound() == ("base", 2)
    instance = thing.Thing()
    assert (instance.size, instance.still(), thing.Thing.of(), instance.name()) == (2, 2, (thing.Thing, 2), "base!")
    assert thing.outer()() == 2
    assert thing.LIMIT == 2
    assert instance.added.__qualname__ == "Thing.added"
    same = {name: value for name, value in contents(thing).items() if not name.endswith("()")}
    assert {name: value for name, value in same.items() if name in before and name != "dgl_thing.LIMIT"} == {
        name: value for name, value in before.items() if not name.endswith("()") and name != "dgl_thing.LIMIT"
    }
    repairs.switch_on()  # again: nothing more happens
    repairs.switch_off()
    assert not repairs.is_on()
    assert contents(thing) == before
    assert (by_name(1), bound(), hasattr(thing, "json"), hasattr(thing, "helper")) == (2, 1, False, False)
    repairs.switch_off()
    repairs.switch_on()
    assert by_name(1) == 114


def test_default_of_a_new_constant_is_what_it_was(thing: ModuleType) -> None:
    """Defaults are evaluated with the names that the module has while nothing is switched."""
    repairs.switch_on()
    assert thing.plain.__defaults__ == (10,)


def test_tracebacks_show_the_mended_lines(thing: ModuleType) -> None:
    repairs.switch_on()
    with pytest.raises(ValueError, match="mended") as caught:
        thing.fails()
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert last.line == 'raise ValueError("mended")'
    assert last.filename.endswith("dgl_thing.py (mended by dgl_hybrid, switched on)")


def test_functions_behind_wrappers_are_found(thing: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    original = thing.Thing.method

    @functools.wraps(original)
    def wrapper(self: object) -> object:
        return ["wrapped", original(self)]

    monkeypatch.setattr(thing.Thing, "method", wrapper)
    repairs.switch_on()
    assert thing.Thing().method() == ["wrapped", ("base", 2)]
    repairs.switch_off()
    assert thing.Thing().method() == ["wrapped", 1]


def test_a_replaced_function_is_refused_and_nothing_is_switched(
    thing: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thing.Thing, "method", lambda self: 3)
    before = contents(thing)
    with pytest.raises(CompatError, match=r"expected DGL's own Thing\.method in .*dgl_thing\.py \(got <function"):
        repairs.switch_on()
    assert contents(thing) == before
    assert not repairs.is_on()


def test_a_failing_change_takes_the_others_back(
    thing: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, tmp_path, MENDED + "\n\n1 / 0\n")
    before = contents(thing)
    with pytest.raises(ZeroDivisionError):
        repairs.switch_on()
    assert contents(thing) == before
    assert not repairs.is_on()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    @staticmethod\n    def still", "    @classmethod\n    def still", "may not change decorators"),
        ("        return cls, k", "        return super(), k", "closes over"),
        ("def untouched():\n    return plain(1)", "", r"may not remove \['untouched'\]"),
        ("class Base:\n", "class Base:\n    limit = 1\n\n", "cannot be switched on and off"),
    ],
)
def test_what_cannot_be_switched_is_refused(
    thing: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, message: str
) -> None:
    assert old in STOCK
    use(monkeypatch, tmp_path, STOCK.replace(old, new))
    with pytest.raises(CompatError, match=r"dgl_thing\.py.*" + message):
        repairs.switch_on()


LATE = """
import sys
from dgl_hybrid.compat import describe, hook, repairs
from dgl_hybrid.errors import CompatError

# As where stock DGL can be imported: with what makes that possible here, and without what the repairs build on.
ours = (hook.FINDER, *(found for found in sys.meta_path if getattr(found, "__name__", "") == "DglHybridStartup"))
sys.meta_path[:] = [found for found in sys.meta_path if found not in ours]
others = hook.MendingFinder()
others.skip = {"0011", "0018", "0019"}
sys.meta_path.insert(0, others)
import dgl
sys.meta_path.remove(others)
hook.install()

states = {fix["name"][:4]: fix["state"] for fix in describe()["fixes"]}
assert states["0019"].startswith("too late"), states
initialize = dgl.distributed.initialize.__code__
try:
    repairs.switch_on()
except CompatError as error:
    print(error)
assert dgl.distributed.initialize.__code__ is initialize
assert not repairs.is_on()
"""


def test_a_dgl_that_was_imported_too_early_is_refused() -> None:
    """Mended functions were put in, which call what only the fixes made at import bring: a NameError in the job."""
    ran = run_python(LATE)
    assert ran.returncode == 0, ran.stderr
    assert "was loaded without the fixes that are made as DGL is imported" in ran.stdout
    assert "Import dgl_hybrid before dgl, or start the program with `dgl-hybrid run`" in ran.stdout


def test_another_file_is_refused_by_name(thing: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "dgl_thing.py").write_text(STOCK.replace("LIMIT = 1", "LIMIT = 3"))
    with pytest.raises(CompatError, match=r"0099-thing does not fit dgl_thing\.py:3: expected 'LIMIT = 1'"):
        repairs.switch_on()


def test_a_file_mended_by_hand_is_left_alone(thing: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "dgl_thing.py").write_text(MENDED)
    before = contents(thing)
    repairs.switch_on()
    assert contents(thing) == before
    assert FINDER.state("0099-thing") == "in DGL's files already"


def test_fixes_of_dgl_switch_on_and_off() -> None:
    """In a process of its own; modules that nobody imported yet are imported; the state is told."""
    ran = run_python(
        "import dgl_hybrid, sys\n"
        "from dgl_hybrid.compat import describe, repairs\n"
        "def states(): return {f['state'] for f in describe()['fixes'] if f['when'] == 'enabled'}\n"
        "assert states() == {'off'}\n"
        "repairs.switch_on()\n"
        "assert states() == {'on'}, states()\n"
        "import dgl\n"
        "from dgl.distributed.kvstore import KVClient\n"
        "assert hasattr(KVClient, '_fence') and 'switched on' in KVClient.push.__code__.co_filename\n"
        "repairs.switch_off()\n"
        "assert states() == {'off'}\n"
        "assert not hasattr(KVClient, '_fence') and 'mended' not in KVClient.push.__code__.co_filename\n"
    )
    assert ran.returncode == 0, ran.stderr[-2000:]


def test_files_with_all_fixes_by_hand_are_recognised() -> None:
    """Also where fixes of both kinds change one file: importing it leaves it as it is."""
    dgl = find_dgl()
    assert dgl is not None
    both = set(FINDER.switchable()) & set(FINDER._by_module)
    assert both
    for name in both:
        patches = [*FINDER._by_module[name], *FINDER._switchable[name]]
        released = (dgl.parent / patches[0][1].path).read_text("utf-8")
        by_hand = apply_patches(released, [(fix.name, patch) for fix, patch in patches])
        assert by_hand not in (released, FINDER.mend(name, released, enabled=False))
        assert FINDER.mend(name, by_hand, enabled=False) is by_hand
        assert FINDER.mend(name, by_hand, enabled=True) is by_hand
        # Of the first kind alone, as for a DGL that is to work without this package: the others are added in memory.
        first_kind = FINDER.mend(name, released, enabled=False)
        assert FINDER.mend(name, first_kind, enabled=False) is first_kind
        assert FINDER.mend(name, first_kind, enabled=True) == by_hand
        with pytest.raises(CompatError, match="does not fit dgl/"):
            FINDER.mend(name, "\n" + first_kind, enabled=True)


ORPHAN = """
import os, sys
from dgl_hybrid.compat import repairs
if sys.argv[1] == "on": repairs.switch_on()
from dgl.distributed.dist_context import CustomPool
if __name__ == "__main__":
    os.environ["DGL_DIST_MODE"] = "standalone"
    pool = CustomPool(1, ("", 1, 0, "sampler", 1, 0))
    pool.set_collate_fn(len, "loader")
    pool.submit_task("loader", [1, 2, 3])
    assert pool.get_result("loader") == 3
    print(pool.process_list[0].pid, flush=True)
    if sys.argv[2] == "orphan": os._exit(0)
    pool.set_collate_fn(len, "other")
    pool.submit_task("other", [1])
    pool.submit_task("other", 0)  # no length: fails
    print(pool.get_result("other"))
    try: pool.get_result("other", timeout=30)
    except Exception as error: print(type(error).__name__, error)
"""


def run_pool(tmp_path: Path, switch: str, case: str) -> list[str]:
    """Runs a sampler pool without servers."""
    script = tmp_path / "pool.py"  # a file: spawned processes import it
    script.write_text(ORPHAN)
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    out = tmp_path / "out.txt"  # not a pipe: an orphan would keep it open
    # A sampler that fails says so while its trainer prints: in one file the two may share a line.
    with out.open("w") as file, (tmp_path / "err.txt").open("w") as errors:
        command = [sys.executable, str(script), switch, case]
        subprocess.run(command, stdout=file, stderr=errors, env=environment, timeout=600, check=True)
    return out.read_text().splitlines()


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_samplers_of_a_killed_trainer_end(tmp_path: Path) -> None:
    """They look for their trainer whenever they had nothing to do for five seconds."""
    pids = {switch: int(run_pool(tmp_path, switch, "orphan")[0]) for switch in ("on", "off")}
    try:
        deadline = time.monotonic() + 60
        while is_there(pids["on"]) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not is_there(pids["on"])
        assert is_there(pids["off"]), "DGL ends them itself now: remove this part of 0015"
    finally:
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_batch_that_came_before_the_failure_is_received(tmp_path: Path) -> None:
    lines = run_pool(tmp_path, "on", "failure")
    assert "1" in lines
    assert any(line.startswith("DGLError A sampler process failed:") for line in lines)


def test_every_switchable_fix_is_described() -> None:
    switchable = [fix for fix in describe()["fixes"] if fix["when"] == "enabled"]  # type: ignore[attr-defined]
    assert [fix["name"][:4] for fix in switchable][:2] == ["0012", "0013"]
