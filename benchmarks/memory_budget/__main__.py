# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.memory_budget`."""

from __future__ import annotations

from benchmarks.memory_budget.run import main

if __name__ == "__main__":
    main()
