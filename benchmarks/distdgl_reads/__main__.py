# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.distdgl_reads`; apart from `run`, so that tests can import it."""

from __future__ import annotations

from benchmarks.distdgl_reads.run import main

if __name__ == "__main__":
    main()
