# SPDX-License-Identifier: Apache-2.0
"""Builds and installs `dgl_hybrid`; the settings of the tools are in the dotfiles beside it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.develop import develop

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

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Names what an install has written: a pip that runs `setup.py install` (older than 23.1, without `wheel`)
        removes what is in this list, and nothing else.
        """
        found = list(super().get_outputs(include_bytecode))
        if self.editable_mode:
            return found
        folder = Path(self.build_lib, "dgl_hybrid", "patches")
        return [*found, str(Path(self.build_lib, STARTUP.name)), *(str(folder / patch.name) for patch in PATCHES)]

    def get_source_files(self) -> list[str]:
        """Names the files that a source distribution must hold."""
        return [*super().get_source_files(), *(str(patch.relative_to(ROOT)) for patch in (*PATCHES, STARTUP))]


class DevelopByWheel(develop):
    """Refuses how pips may install `--editable` (older than 23.1, or newer beside `wheel` and an old setuptools): by a
    link to the checkout, and no start-up hook.
    """

    def run(self) -> None:
        if hasattr(self, "install_for_development"):  # of a setuptools whose `develop` does not go by pip itself
            raise SystemExit(
                "dgl_hybrid: expected an install by a wheel, which brings the start-up hook (got setup.py develop); "
                "add --use-pep517 to pip install --editable, or update pip and setuptools"
            )
        super().run()


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
    package_data={
        "dgl_hybrid": ["py.typed"],
        "dgl_hybrid.ops": ["*.md"],
        "dgl_hybrid.ops.cuda": ["*.cu"],
        "dgl_hybrid.sampling": ["*.md"],
        "dgl_hybrid.training": ["*.md"],
    },
    cmdclass={"build_py": BuildWithCompat, "develop": DevelopByWheel},
    install_requires=[
        "dgl==2.1.*",
        "llvmlite>=0.45",  # whose pass manager has all passes that kernels take
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
        "torch>=2.6",  # whose hooks of all modules see keyword arguments
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
