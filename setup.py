# SPDX-License-Identifier: Apache-2.0
"""Builds and installs `dgl_hybrid`; the settings of the tools are in the dotfiles beside it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
STARTUP = ROOT / "dgl_hybrid" / "compat" / "dgl_hybrid_startup.pth"
PATCHES = sorted((ROOT / "patches").glob("*.patch"))


class BuildWithCompat(build_py):
    """Adds what makes DGL work: the fixes, and the `.pth` file for processes that import dgl first."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            # The folder whose content goes into the editable wheel, so pip knows the file and removes it on uninstall.
            # (The fixes are read from the checkout.)
            shutil.copy(STARTUP, self.get_finalized_command("install").install_lib)
            return
        shutil.copy(STARTUP, self.build_lib)  # top of the wheel = site-packages, where Python reads .pth files
        folder = Path(self.build_lib, "dgl_hybrid", "patches")
        folder.mkdir(parents=True, exist_ok=True)
        for patch in PATCHES:
            shutil.copy(patch, folder)

    def get_source_files(self) -> list[str]:
        """Names the files that a source distribution must hold."""
        return [*super().get_source_files(), *(str(patch.relative_to(ROOT)) for patch in (*PATCHES, STARTUP))]


def read_version() -> str:
    """Returns the version that the package states."""
    match = re.search(r'^__version__ = "(.+)"$', (ROOT / "dgl_hybrid" / "__init__.py").read_text("utf-8"), re.MULTILINE)
    assert match is not None
    return match[1]


setup(
    name="dgl_hybrid",
    version=read_version(),
    description="Hybrid cached and communicated dependencies for full-graph GNN training beside DGL and DistDGL",
    long_description=(ROOT / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    # Said although it is the default: an editable install is then a line in a .pth file, not an import hook.
    package_dir={"": "."},
    packages=find_packages(include=["dgl_hybrid", "dgl_hybrid.*"]),
    package_data={"dgl_hybrid": ["py.typed"], "dgl_hybrid.ops": ["*.md"], "dgl_hybrid.ops.cuda": ["*.cu"]},
    cmdclass={"build_py": BuildWithCompat},
    install_requires=[
        "dgl==2.1.*",
        "llvmlite",
        "matplotlib",
        "numpy",
        "ortools",
        "packaging",
        "pandas",
        "psutil",
        "pymetis>=2025.2",
        "rich",
        "safetensors",
        "scipy",
        "torch>=2.4",
        "tqdm",
    ],
    extras_require={
        # NVRTC and the disassembler compile and read the CUDA source in tests; no GPU is needed for that.
        "dev": [
            "mypy",
            "nvidia-cuda-cuobjdump",
            "nvidia-cuda-nvdisasm",
            "nvidia-cuda-nvrtc",
            "pytest",
            "pytest-xdist",
            "ruff",
        ],
        "ogb": ["ogb"],
    },
    entry_points={"console_scripts": ["dgl-hybrid = dgl_hybrid.cli.main:main"]},
    zip_safe=False,
)
