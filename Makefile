# The verbs of the project. `make show` and `make test` set up everything they need, in .venv, with pip.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
PIP := $(BIN)/pip --disable-pip-version-check --quiet

.PHONY: help show test check bench clean
help:  ## what one can do here
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

show: $(VENV)/.installed  ## the main job: every mechanism, its mathematics and its matrix
	@$(BIN)/heedful show

test: $(VENV)/.installed-dev check  ## all tests
	@echo "── tests"
	@$(BIN)/python -m pytest -n auto

check: $(VENV)/.installed-dev  ## style and types
	@echo "── style and types"
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

bench: $(VENV)/.installed-dev  ## the figures of README and docs, measured on this machine
	@$(BIN)/python benchmarks/contract.py
	@$(BIN)/python benchmarks/drop_in.py
	@$(BIN)/python benchmarks/window.py
	@$(BIN)/python benchmarks/adjoint.py
	@$(BIN)/python benchmarks/streaming.py
	@$(BIN)/python benchmarks/random_features.py
	@$(BIN)/python benchmarks/projections.py

clean:  ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/pip:
	@echo "── making a virtual environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "heedful needs Python 3.11 or newer; point to one with PYTHON=…"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "The venv module is missing; on Debian: apt-get install python3-venv"; exit 1; }

# The stamps are newer than what they were made from, so a second run does nothing.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/pip
	@echo "── installing heedful (torch is large: this takes a minute or two)"
	@$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "── installing what the tests need"
	@$(PIP) install -c constraints.txt -e '.[dev,kernels]'
	@touch $@
