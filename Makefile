# SPDX-License-Identifier: Apache-2.0
# Each target makes the environment (.venv) first when it is missing or setup.py has changed.

PYTHON ?= $(shell python3.11 -c "print('python3.11')" 2>/dev/null || echo python3)
BIN := .venv/bin
ENV := .venv/.installed
# `make bench BENCH=ops.cpu ARGS=--quick` runs benchmarks/ops/cpu.py. Without a name: the side-by-side, some ten minutes of it
# (`ARGS="--peers FOLDER"` adds SAR and PipeGCN); the full grid is `python -m benchmarks.systems`.
BENCH ?= systems
ARGS ?=
JOBS ?= auto

.PHONY: env demo test lint bench clean

env: $(ENV)

# An environment whose making was broken off, or that lacked Debian's python3.11-venv, has Python and no pip.
# The versions of .constraints.txt, setuptools included: hence no build isolation, which would fetch the newest.
$(ENV): setup.py .constraints.txt dgl_hybrid/compat/dgl_hybrid_startup.pth
	@$(PYTHON) -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))" || \
	    { echo "make env: expected Python 3.11 or 3.12 (got $$($(PYTHON) --version 2>&1)); name one: make env PYTHON=python3.11" >&2; exit 1; }
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint .constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --constraint .constraints.txt --use-pep517 --no-build-isolation --editable ".[dev]"
	@touch $@

demo: $(ENV)
	$(BIN)/dgl-hybrid demo $(ARGS)

# Each file in one process of several, as many as cores, long files first. `JOBS=0` runs all in one. Twice as many gained
# nothing (one run, 43 minutes, where another of older code had taken 33). Hundreds of processes are started: without
# files of bytecode each would compile our modules anew.
test: $(ENV)
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --numprocesses $(JOBS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(ENV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(ENV)
	@test -e benchmarks/$(subst .,/,$(BENCH))/__main__.py || test -e benchmarks/$(subst .,/,$(BENCH)).py || \
	    { echo "make bench: benchmarks.$(BENCH) is nothing to run; benchmarks/README.md lists what is: make bench BENCH=ops.cpu" >&2; exit 1; }
	$(BIN)/python -m benchmarks.$(BENCH) $(if $(filter systems,$(BENCH)),--quick --json) $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache demo_output
