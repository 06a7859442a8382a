# SPDX-License-Identifier: Apache-2.0
"""Turns a kernel's assembly into code of this process, once per kernel."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]

from dgl_hybrid.ops.cpu.host import new_target_machine
from dgl_hybrid.ops.cpu.memory import unmap_code_in

Kernel = Callable[[int], None]
"""Compiled code: takes the address of its arguments; other Python threads run meanwhile."""

_SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_kernels: dict[Hashable, Kernel] = {}
_lock = threading.Lock()
_num_given_back = 0
"""How many kernels there were when the compiler was last given back."""


def _renew_lock() -> None:
    """In a child made by fork: nobody there would release a lock that another thread of the parent held."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


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
    """How many kernels this process has compiled so far."""
    return len(_kernels)


def give_back_compiler() -> None:
    """Takes the compiler out of resident memory (some 60 MB a process), until the next kernel is compiled."""
    global _num_given_back
    if _num_given_back != len(_kernels):
        _num_given_back = len(_kernels)
        unmap_code_in(Path(llvm.__file__).parent)


def _compile(assembly: str) -> Kernel:
    linker = _linker()
    module = llvm.parse_assembly(assembly)
    module.triple, module.data_layout = linker.machine.triple, str(linker.machine.target_data)
    module.verify()
    # LLVM 22's pass breaks the form of the loops of such kernels, which its own check answers by ending the process.
    # Generating code does the same once more, without harm, and they are as fast.
    _optimise(module, linker.machine, reduces_strength="@llvm.x86.tile" not in assembly)
    # One engine has all kernels: a name must be new to it.
    name = module.get_function("kernel").name = f"kernel{len(_kernels)}"
    linker.engine.add_module(module)
    linker.engine.finalize_object()
    kernel = _SIGNATURE(linker.engine.get_function_address(name))
    linker.engine.remove_module(module)  # the code stays, what it was made from need not
    module.close()
    return kernel


@dataclass(frozen=True)
class _Linker:
    """What makes and holds the code of all kernels, for the life of the process."""

    machine: Any
    engine: Any


@functools.cache
def _linker() -> _Linker:
    machine = new_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine._owned = True  # by nobody: its code must outlive this object while the interpreter shuts down
    return _Linker(machine, engine)


def _optimise(module: Any, machine: Any, *, reduces_strength: bool) -> None:
    """Registers for variables, common subexpressions, invariants out of loops; the loops are as they should be."""
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    passes = llvm.create_new_module_pass_manager()
    passes.add_sroa_pass()
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    passes.add_loop_rotate_pass()
    passes.add_new_gvn_pass()
    if reduces_strength:
        passes.add_loop_strength_reduce_pass()
    passes.add_simplify_cfg_pass()
    passes.run(module, builder)
