# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
#
# Each command sets up what it needs first (tools/setup.sh), so all work in a fresh clone.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.NOTPARALLEL:
unexport PYTHONPATH PYTHONHOME
export PYTHON CUDA

PY := .venv/bin/python
OLDEST := .venv-oldest/bin/python
# A worker traces and compiles on a core of its own and takes about 2 GB; 8 are as fast as more.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))
# More arguments for train.py or pytest: make train ARGS=--steps=20, make test ARGS="-k norm".
ARGS ?=

.PHONY: help setup train test test-slow test-oldest test-gpu lint format lock clean

help: ## list these commands
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/make \1~\2/p' Makefile | awk -F'~' '{printf "%-18s%s\n", $$1, $$2}'

setup: ## make .venv from the lock file, if it is not up to date
	@tools/setup.sh .venv newest

train: setup ## train the default model on real text
	$(PY) train.py $(ARGS)

test: lint ## lint, types, quick tests and doctests on the CPU
	$(PY) -m pytest -q -n $(WORKERS) $(ARGS)

test-slow: setup ## the tests that take long
	$(PY) -m pytest -q -n $(WORKERS) -m "slow and not gpu" $(ARGS)

test-oldest: ## the quick tests on the oldest JAX supported
	@tools/setup.sh .venv-oldest oldest
	$(OLDEST) -m pytest -q -n $(WORKERS) $(ARGS)

test-gpu: setup ## the tests that need a GPU; fails where there is none
	$(PY) -m pytest -q -m gpu $(ARGS)

lint: setup ## ruff and pyright, changing nothing
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m pyright --pythonpath $(PY)

format: setup ## put the code in the house format
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

lock: ## move the lock files to the newest releases (needs uv)
	uv lock --upgrade
	uv export -q --locked --no-hashes --no-annotate --no-emit-project --extra dev -o requirements.lock
	uv export -q --locked --no-hashes --no-annotate --no-emit-project --extra dev --extra cuda \
		-o requirements-cuda.lock

clean: ## remove the environments and every cache
	rm -rf .venv .venv-oldest .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
