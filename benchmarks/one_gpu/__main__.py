# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.one_gpu`."""

from __future__ import annotations

import sys

from benchmarks.one_gpu.run import main

if __name__ == "__main__":
    sys.exit(main())
