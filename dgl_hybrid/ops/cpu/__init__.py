# SPDX-License-Identifier: Apache-2.0
"""Message-passing kernels for CPUs: rows of the graph, one after another, with the row's sums held in vector registers.

The kernels are written in Python against a small builder (`ir.py`), which emits LLVM's assembly; llvmlite turns it into
code for the very machine at hand the first time an operation meets a new width (tens to hundreds of milliseconds), and
`ops/compiled_code.py` keeps it for later processes.

    backend -> launch -> tasks + threads          (which rows, which thread)
               launch -> compiler -> *_kernels -> ir + lanes + elementary   (which code)
"""
