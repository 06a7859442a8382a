# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.planner`."""

from __future__ import annotations

from benchmarks.planner.run import main

if __name__ == "__main__":
    main()
