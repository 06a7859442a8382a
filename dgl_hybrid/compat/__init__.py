# SPDX-License-Identifier: Apache-2.0
"""Makes DGL 2.1 import and work under current PyTorch, NumPy and setuptools.

`import dgl_hybrid` installs an import hook; when a module of DGL that has a fix in `patches/` is loaded, it gets the
mended source. DGL's files stay as they are. Scripts that import `dgl` first, and processes that they spawn, are served
by `dgl_hybrid_startup.pth`, which pip puts into `site-packages` with this package and which acts only where
`import dgl` would fail, where the environment variable `DGL_HYBRID_ENABLE` asks for the plugin, or in a job that
`dgl-hybrid launch` has started.

Fixes of how DistDGL behaves are switched on and off with the plugin (`dgl_hybrid.compat.repairs`).
"""

from __future__ import annotations

from dgl_hybrid.compat.hook import FINDER, CompatWarning, after_dgl_import, install

__all__ = [
    "CompatWarning",
    "after_dgl_import",
    "describe",
    "dgl_version_supported",
    "install",
    "require_supported_dgl",
]


def dgl_version_supported() -> bool:
    """Tells whether the installed DGL is one whose faults are known and mended; False when there is none."""
    from dgl_hybrid.compat.versions import SUPPORTED_DGL, dgl_version, is_in

    version = dgl_version()
    return version is not None and is_in(version, SUPPORTED_DGL)


def require_supported_dgl() -> None:
    """Checks that the installed DGL is a supported one.

    Raises:
        CompatError: naming the supported versions and what to do.
    """
    from dgl_hybrid.compat.versions import dgl_version, unsupported_message
    from dgl_hybrid.errors import CompatError

    if not dgl_version_supported():
        raise CompatError(unsupported_message(dgl_version()))


def describe() -> dict[str, object]:
    """Says which DGL, PyTorch and NumPy are here and what became of each fix, for `dgl-hybrid doctor`.

    Returns:
        JSON-like: `dgl`, `torch`, `numpy` (versions or None), `supported_dgl`, `dgl_supported`, `startup_hook` (is the
        `.pth` file at work in this process), `fixes`: a list of dicts `name, summary, reason, upstream, when, state`.
    """
    import sys
    from importlib import metadata

    from dgl_hybrid.compat.fixes import load_fixes
    from dgl_hybrid.compat.versions import SUPPORTED_DGL, dgl_version

    def installed(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    FINDER.prepare()
    return {
        "dgl": dgl_version(),
        "torch": installed("torch"),
        "numpy": installed("numpy"),
        "supported_dgl": SUPPORTED_DGL,
        "dgl_supported": dgl_version_supported(),
        "startup_hook": any(getattr(finder, "__name__", "") == "DglHybridStartup" for finder in sys.meta_path),
        "fixes": [
            {
                "name": fix.name,
                "summary": fix.summary,
                "reason": fix.reason,
                "upstream": fix.upstream,
                "when": fix.when,
                "state": FINDER.state(fix.name),
            }
            for fix in load_fixes()
        ],
    }
