# SPDX-License-Identifier: Apache-2.0
"""Runs a script as it is, then prints what the plugin has served: `counting.py script.py arguments`."""

import json
import runpy
import sys

import dgl_hybrid

del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
print("read counts", json.dumps(dgl_hybrid.read_counts()))
