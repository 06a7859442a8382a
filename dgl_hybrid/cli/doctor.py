# SPDX-License-Identifier: Apache-2.0
"""`dgl-hybrid doctor`: versions, active fixes, cores, memory, devices, what compiles the kernels."""

from __future__ import annotations

import argparse
import json
import os

import psutil

from dgl_hybrid.errors import HybridError

_STATES = {"off": "off (applied while the plugin is on)", "waiting": "waiting (for the module to be imported)"}
"""Of fixes, as the table says them: neither is a fault."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds this command's options."""
    parser.add_argument("--json", action="store_true", help="end with one JSON object on the last line of stdout")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def run(args: argparse.Namespace) -> int:
    """Prints what is installed and what this machine offers.

    Raises:
        HybridError: DGL cannot be imported, or what it needs.
    """
    _check_imports()
    import torch
    from rich.table import Table

    from dgl_hybrid.cli.common import versions
    from dgl_hybrid.cli.tables import format_bytes, make_console
    from dgl_hybrid.compat import describe
    from dgl_hybrid.launch.local import LOOPBACK

    found = describe()
    facts: dict[str, object] = {
        **versions(),
        "dgl_supported": found["dgl_supported"],
        "startup_hook": found["startup_hook"],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": format_bytes(psutil.virtual_memory().total),
        "cuda_devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "backends": [
            name
            for name, is_there in (
                ("gloo", torch.distributed.is_gloo_available()),
                ("nccl", torch.distributed.is_nccl_available()),
            )
            if is_there
        ],
        "loopback": LOOPBACK,
        "cpu_kernels": cpu_kernels(),
        "cuda_kernels": cuda_kernels(),
        "fixes": {fix["name"]: fix["state"] for fix in found["fixes"]},  # type: ignore[attr-defined]
    }
    table = Table("what", "found", title="dgl_hybrid doctor", title_justify="left")
    for name, value in facts.items():
        if isinstance(value, dict):
            shown = "\n".join(f"{fix}: {_STATES.get(state, state)}" for fix, state in value.items())
        else:
            shown = ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
        table.add_row(name, shown)
    make_console().print(table)
    if args.json:
        print(json.dumps(facts))
    return 0


def _check_imports() -> None:
    """Before anything of ours that imports DGL: what hinders it is what this command is asked for."""
    try:
        import dgl  # noqa: F401
    except Exception as error:
        from importlib.metadata import PackageNotFoundError, version

        from dgl_hybrid.compat.versions import SUPPORTED_DGL

        found = []
        for name in ("dgl", "torch", "numpy"):
            try:
                found.append(f"{name} {version(name)}")
            except PackageNotFoundError:
                found.append(f"no {name}")
        raise HybridError(
            f"dgl cannot be imported: {type(error).__name__}: {str(error).rstrip('.')}. Installed: {', '.join(found)}; "
            f"dgl_hybrid is for DGL {SUPPORTED_DGL}"
        ) from error


def cpu_kernels() -> str:
    """Says what compiles the message passing on CPU."""
    from llvmlite import __version__, binding  # type: ignore[import-untyped]

    from dgl_hybrid.ops.cpu.host import vector_unit

    llvm = ".".join(map(str, binding.llvm_version_info))
    return f"LLVM {llvm} (llvmlite {__version__}), vectors of {8 * vector_unit().register_bytes} bits"


def cuda_kernels() -> str:
    """Says what compiles and runs the message passing on CUDA, or what is missing."""
    from dgl_hybrid.ops.cuda.runtime import describe

    status = describe()
    if status.nvrtc_version is None:
        return f"none: {status.nvrtc_problem}"
    compiler = f"NVRTC {status.nvrtc_version}"
    if not status.usable:
        return f"{compiler} compiles, nothing runs: {status.driver_problem or 'no GPU that it knows'}"
    return f"{compiler} for {', '.join(f'{gpu.name} ({gpu.arch})' for gpu in status.gpus)}"
