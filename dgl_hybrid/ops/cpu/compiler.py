# SPDX-License-Identifier: Apache-2.0
"""Turns a kernel's assembly into code of this process, once per kernel; see `ops/compiled_code.py` for what is kept."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]

from dgl_hybrid.ops.compiled_code import CodeCache, code_key, default_folder
from dgl_hybrid.ops.cpu.host import CODE_LEVEL, host_features, new_target_machine
from dgl_hybrid.ops.cpu.memory import unmap_code_in

Kernel = Callable[[int], None]
"""Compiled code: takes the address of its arguments; other Python threads run meanwhile."""

_SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_kernels: dict[Hashable, Kernel] = {}
_lock = threading.RLock()
_num_given_back = 0
"""How many kernels there were when the compiler was last given back."""


if hasattr(os, "register_at_fork"):
    # A fork waits for whoever compiles: in the child nobody would release this lock, nor those of llvmlite and LLVM.
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def compile_kernel(key: Hashable, emit: Callable[[], str]) -> Kernel:
    """Returns the kernel of that key; on the first call compiles the assembly that `emit` returns."""
    kernel = _kernels.get(key)
    if kernel is None:
        with _lock:
            kernel = _kernels.get(key)
            if kernel is None:
                kernel = _kernels[key] = _compile(emit())
    return kernel


def num_compiled_kernels() -> int:
    """How many kernels this process has compiled, or found compiled, so far."""
    return len(_kernels)


def give_back_compiler() -> None:
    """Takes the compiler out of resident memory (some 60 MB a process), until the next kernel is compiled."""
    global _num_given_back
    if _num_given_back != len(_kernels):
        _num_given_back = len(_kernels)
        unmap_code_in(Path(llvm.__file__).parent)


def _compile(assembly: str) -> Kernel:
    linker = _linker()
    passes: Sequence[str] = _PASSES
    if "@llvm.x86.tile" in assembly:
        # LLVM 22's pass breaks the form of the loops of such kernels, which its own check answers by ending the
        # process. Generating code does the same once more, without harm, and they are as fast.
        passes = tuple(name for name in passes if name != "loop_strength_reduce")
    key = code_key(assembly, *passes, linker.target)
    name = f"kernel_{key}"
    if not linker.engine.get_function_address(name):  # else two specialisations came to the same assembly
        code = linker.cache.load_or_compile(key, lambda: _machine_code(assembly, name, passes, linker.machine))
        linker.engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        linker.engine.finalize_object()
    return _SIGNATURE(linker.engine.get_function_address(name))


@dataclass(frozen=True)
class _Linker:
    """What makes and holds the code of all kernels, for the life of the process."""

    machine: Any
    engine: Any
    target: str
    """Whatever else decides the code of some assembly: the compiler, and the processor with all it offers."""
    cache: CodeCache


@functools.cache
def _linker() -> _Linker:
    machine = new_target_machine()
    levels = f"{_PASS_LEVEL} {CODE_LEVEL}"
    target = f"LLVM {llvm.llvm_version_info} {levels} {machine.triple} {llvm.get_host_cpu_name()} {host_features()}"
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine._owned = True  # by nobody: its code must outlive this object while the interpreter shuts down
    return _Linker(machine, engine, target, CodeCache(default_folder("kernels"), "o"))


_PASSES = (
    "sroa",
    "instruction_combine",
    "simplify_cfg",
    "loop_rotate",
    "new_gvn",
    "loop_strength_reduce",
    "simplify_cfg",
)
"""Registers for variables, common subexpressions, invariants out of loops; the loops are as they should be."""
_PASS_LEVEL = 2


def _machine_code(assembly: str, name: str, passes: Sequence[str], machine: Any) -> bytes:
    """An object file whose one function has that name."""
    module = llvm.parse_assembly(assembly)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    module.verify()
    module.get_function("kernel").name = name
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=_PASS_LEVEL))
    manager = llvm.create_new_module_pass_manager()
    for one in passes:
        getattr(manager, f"add_{one}_pass")()
    manager.run(module, builder)
    code: bytes = machine.emit_object(module)
    module.close()
    return code
