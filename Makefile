# Every target that needs Python first builds .venv, so each works as the first command on a fresh machine.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
# The pair of releases that the tests ran with; any pair that pyproject.toml allows may be put here.
TORCH ?= torch==2.14.1 torchvision==0.29.1
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# Test processes at a time: each needs up to 4 GiB, and trains networks on one core.
JOBS ?= 2
# Overrides for the demo's sweep, for example: make demo ARGS="fl.rounds=2"
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow lint typecheck bench ui gpu-check clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | awk -F '\t' '{printf "  make %-10s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python"; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than Python 3.11; set PYTHON="; exit 2; }
	@test -x $(PY) || "$(PYTHON)" -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $(STAMP)

install: $(STAMP) ## Build .venv with everything installed

demo: $(STAMP) ## Sweep five algorithms on real digits, private and not, and print the table (about a minute)
	$(VENV)/bin/fl-lightning sweep sweep=demo $(ARGS)

test: $(STAMP) ## Run the tests
	$(PY) -m pytest -n $(JOBS) --dist worksteal

test-slow: $(STAMP) ## Run the tests that take longer
	$(PY) -m pytest -m slow

lint: $(STAMP) ## Check style
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

typecheck: $(STAMP) ## Check types, strictly in the inner packages
	$(PY) -m mypy fl_lightning tune

bench: $(STAMP) ## Measure engines against a hand-written loop, as ratios
	$(PY) benchmarks/engines.py

ui: $(STAMP) ## Open MLflow on the local runs
	$(VENV)/bin/fl-lightning ui

gpu-check: ## Check the GPU path with the Python at hand: needs torch, lightning, numpy, torchvision, pydantic
	$(or $(wildcard $(PY)),$(PYTHON)) benchmarks/gpu_check.py

clean: ## Remove .venv and caches, keep mlruns
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
