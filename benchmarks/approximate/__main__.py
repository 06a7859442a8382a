# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.approximate`."""

from __future__ import annotations

from benchmarks.approximate.run import main

if __name__ == "__main__":
    main()
