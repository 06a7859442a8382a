# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.systems`; apart from `run`, so that tests can import it."""

from __future__ import annotations

from benchmarks.systems.run import main

if __name__ == "__main__":
    main()
