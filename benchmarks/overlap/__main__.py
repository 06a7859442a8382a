# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.overlap`."""

from __future__ import annotations

from benchmarks.overlap.run import main

if __name__ == "__main__":
    main()
