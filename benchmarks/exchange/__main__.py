# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.exchange`; apart from `run`, so that spawned ranks can import it."""

from __future__ import annotations

from benchmarks.exchange.run import main

if __name__ == "__main__":
    main()
