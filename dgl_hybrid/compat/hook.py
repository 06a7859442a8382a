# SPDX-License-Identifier: Apache-2.0
"""The import hook: gives DGL's modules their mended source as they are loaded. DGL's files are never written.

Only what `import dgl_hybrid` needs is imported at the top: the hook is installed in every process of a run, DGL or not.
"""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader

TYPE_CHECKING = False  # not from typing: that import takes longer than the rest of this package
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType

    from dgl_hybrid.compat.patchfile import FilePatch, Fix


class CompatWarning(UserWarning):
    """DGL is there, but the fixes for it cannot be applied."""


class _MendedLoader(SourceFileLoader):
    """Loads one module of DGL from its file, with the fixes applied to the text in memory."""

    def __init__(
        self, fullname: str, path: str, patches: Sequence[tuple[Fix, FilePatch]], finder: MendingFinder
    ) -> None:
        super().__init__(fullname, path)
        self._patches = patches
        self._finder = finder

    def get_source(self, fullname: str) -> str:
        """Returns the mended text (tracebacks and `inspect` show this, not the file)."""
        return self._mend(record=False)

    def get_code(self, fullname: str) -> CodeType:
        """Compiles the mended text. Never reads or writes the bytecode cache: that belongs to the unmended file."""
        # Another file name than the file's own, or tracebacks would show the unmended lines at the mended line numbers.
        return compile(self._mend(record=True), f"{self.path} (mended by dgl_hybrid)", "exec", dont_inherit=True)

    def _mend(self, *, record: bool) -> str:
        from dgl_hybrid.compat.patchfile import apply_patches

        source = self.get_data(self.path).decode("utf-8").replace("\r\n", "\n")
        mended = apply_patches(source, [(fix.name, patch) for fix, patch in self._patches])
        if record:
            for fix, _ in self._patches:
                self._finder.record(fix.name, "in DGL's files already" if mended is source else "applied")
        return mended


class MendingFinder:
    """Finds the modules of DGL that have a fix and hands them to `_MendedLoader`; leaves all others alone."""

    def __init__(self) -> None:
        self.skip: set[str] = set()
        """Numbers of fixes to leave out (`{"0003"}`), for the tests that show what each one mends."""
        self._fixes: tuple[Fix, ...] | None = None
        self._by_module: dict[str, list[tuple[Fix, FilePatch]]] = {}
        self._states: dict[str, str] = {}
        self._searching = False

    def record(self, fix_name: str, state: str) -> None:
        """Notes what became of a fix."""
        self._states[fix_name] = state

    def state(self, fix_name: str) -> str:
        """Returns `applied`, `in DGL's files already`, `waiting` (not imported yet), `too late: …` or `left out`."""
        return self._states.get(fix_name, "left out")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Answers for modules of DGL that have a fix; None for all others."""
        if fullname != "dgl" and not fullname.startswith("dgl."):
            return None
        if self._searching:
            return None
        self.prepare()
        patches = self._by_module.get(fullname)
        if not patches:
            return None
        spec = self._find_elsewhere(fullname, path, target)
        if spec is None or spec.origin is None or not isinstance(spec.loader, SourceFileLoader):
            return spec
        spec.loader = _MendedLoader(fullname, spec.origin, patches, self)
        spec.cached = None
        return spec

    def prepare(self) -> None:
        """Reads the fixes for the installed DGL, once; warns when that DGL is not a supported one."""
        if self._fixes is not None:
            return
        from dgl_hybrid.compat.fixes import load_fixes
        from dgl_hybrid.compat.versions import SUPPORTED_DGL, dgl_version, is_in, unsupported_message

        self._fixes = ()
        version = dgl_version()
        if version is None:
            return  # Python's own "No module named 'dgl'" says it
        if not is_in(version, SUPPORTED_DGL):
            import warnings

            warnings.warn(unsupported_message(version), CompatWarning, stacklevel=2)
            return
        self._fixes = tuple(fix for fix in load_fixes() if is_in(version, fix.dgl) and fix.name[:4] not in self.skip)
        for fix in self._fixes:
            self.record(fix.name, "waiting")
            for patch in fix.files:
                self._by_module.setdefault(patch.module, []).append((fix, patch))
                loaded = sys.modules.get(patch.module)
                if loaded is not None and not isinstance(loaded.__loader__, _MendedLoader):
                    self.record(fix.name, "too late: dgl was imported before dgl_hybrid")

    def _find_elsewhere(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        self._searching = True
        try:
            for finder in sys.meta_path:
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    return spec
        finally:
            self._searching = False
        return None


FINDER = MendingFinder()
"""The one finder of this process."""


def install() -> None:
    """Puts the finder in front of Python's own, once. Cheap: reads nothing until `dgl` is imported."""
    if FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)
