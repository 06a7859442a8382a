# SPDX-License-Identifier: Apache-2.0
"""The ops on GPUs: one source of kernels, compiled at first use, launched through the CUDA driver.

From the bottom up: `message_passing.cu` holds the kernels and states their arguments; `nvrtc.py` compiles it,
`ops/compiled_code.py` keeps what was compiled, `driver.py` loads and launches; `layout.py` and `tasks.py` say which
thread does what; `backend.py` answers each op with kernels. `runtime.describe()` tells what of it this machine has.
"""
