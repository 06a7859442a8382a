# SPDX-License-Identifier: Apache-2.0
"""`python -m dgl_hybrid.cli`, as `torchrun -m` starts it."""

from __future__ import annotations

import sys

from dgl_hybrid.cli.main import main

sys.exit(main())
