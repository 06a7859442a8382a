# SPDX-License-Identifier: Apache-2.0
"""The import hook: gives DGL's modules their mended source as they are loaded. DGL's files are never written.

Only what `import dgl_hybrid` needs is imported at the top: the hook is installed in every process of a run, DGL or not.
"""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader

TYPE_CHECKING = False  # not from typing: that import takes longer than the rest of this package
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.abc import Loader
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
        source = self.get_data(self.path).decode("utf-8").replace("\r\n", "\n")
        mended = self._finder.mend(self.name, source, enabled=False)
        if record:
            for fix, _ in self._patches:
                self._finder.record(fix.name, "in DGL's files already" if mended is source else "applied")
        return mended


class _NotingLoader:
    """Loads the package `dgl` by whichever loader found it, and tells the finder when it has run to its end."""

    def __init__(self, loader: Loader, finder: MendingFinder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader  # nobody else is to see this one
        self._loader.exec_module(module)
        self._finder.run_callbacks()


class MendingFinder:
    """Finds the modules of DGL that have a fix and hands them to `_MendedLoader`; leaves all others alone."""

    def __init__(self) -> None:
        self.skip: set[str] = set()
        """Numbers of fixes to leave out (`{"0003"}`), for the tests that show what each one mends."""
        self._fixes: tuple[Fix, ...] | None = None
        self._by_module: dict[str, list[tuple[Fix, FilePatch]]] = {}
        self._switchable: dict[str, list[tuple[Fix, FilePatch]]] = {}
        self._callbacks: list[Callable[[], None]] = []
        self._states: dict[str, str] = {}
        self._searching = False

    def record(self, fix_name: str, state: str) -> None:
        """Notes what became of a fix."""
        self._states[fix_name] = state

    def state(self, fix_name: str) -> str:
        """Returns what became of a fix.

        `applied`, `in DGL's files already`, `waiting` (not imported yet), `too late: …` or `left out`; of a fix that
        can be switched also `on` or `off`.
        """
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
        if not patches and fullname != "dgl":
            return None
        spec = self._find_elsewhere(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        if patches and spec.origin is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _MendedLoader(fullname, spec.origin, patches, self)
            spec.cached = None
        if fullname == "dgl":
            # Not a `Loader` by inheritance: importing importlib.abc would cost every process more than this module.
            spec.loader = _NotingLoader(spec.loader, self)  # type: ignore[assignment]
        return spec

    def call_after_dgl(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once, as soon as the package `dgl` has been imported: now, if it has."""
        spec = getattr(sys.modules.get("dgl"), "__spec__", None)
        if spec is not None and not getattr(spec, "_initializing", False):
            callback()
        else:
            self._callbacks.append(callback)

    def run_callbacks(self) -> None:
        """Calls what waits for `dgl`, in the order of registration, each once; the first exception is the caller's."""
        while self._callbacks:
            self._callbacks.pop(0)()

    @property
    def has_callbacks(self) -> bool:
        """Whether something waits for `dgl`."""
        return bool(self._callbacks)

    @staticmethod
    def has_mended(module: ModuleType) -> bool:
        """Tells whether a module that has fixes made at import was loaded with them."""
        return isinstance(module.__loader__, _MendedLoader)

    def switchable(self) -> dict[str, list[tuple[Fix, FilePatch]]]:
        """Returns the fixes that can be switched, by the name of the module that they mend."""
        self.prepare()
        return self._switchable

    def mend(self, module: str, source: str, *, enabled: bool) -> str:
        """Applies the fixes for one module to its text.

        Args:
            module: Its name.
            source: The text of its file.
            enabled: With the fixes that can be switched, or only with those made as DGL is imported.
        Returns:
            The mended text; `source` itself when all that is asked for is in it already.
        Raises:
            CompatError: when the text is neither the released one nor mended by hand.
        """
        from dgl_hybrid.compat.patchfile import apply_patches, take_out_patches
        from dgl_hybrid.errors import CompatError

        always = [(fix.name, patch) for fix, patch in self._by_module.get(module, [])]
        every = always + [(fix.name, patch) for fix, patch in self._switchable.get(module, [])]
        try:
            if enabled or len(every) == len(always):
                return apply_patches(source, every)
            return apply_patches(source, always) if always else source
        except CompatError:
            try:
                if enabled:  # mended by hand, without what can be switched
                    return apply_patches(take_out_patches(source, always), every)
                if apply_patches(source, every) is source:
                    return source  # mended by hand, with what could have been switched
            except CompatError:
                pass  # the first error says it better
            raise

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
            self.record(fix.name, "off" if fix.when == "enabled" else "waiting")
            for patch in fix.files:
                if fix.when == "enabled":
                    self._switchable.setdefault(patch.module, []).append((fix, patch))
                    continue
                self._by_module.setdefault(patch.module, []).append((fix, patch))
                loaded = sys.modules.get(patch.module)
                if loaded is not None and not self.has_mended(loaded):
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


def after_dgl_import(callback: Callable[[], None]) -> None:
    """Calls `callback` once, as soon as the top-level package `dgl` has been imported (at once if it already has).

    An exception of the callback is raised by the `import dgl` that set it off, or by this call.
    """
    install()
    FINDER.call_after_dgl(callback)


def waits_for_dgl() -> bool:
    """Tells whether something will be called by the `import dgl` that comes first."""
    return FINDER.has_callbacks
