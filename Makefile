# `make run` and `make test` work on a fresh machine that has only Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# A run ends with a worker that dies: another in its place would wait for tests that nobody sends.
WORKERS := -n 2 --dist loadscope --max-worker-restart 0

.PHONY: run test test-all lint docs clean

run: $(INSTALLED)  ## a first run on the embedded digits: train, search, rewrite, fine-tune, export, report
	$(BIN)/rankrl

test: $(INSTALLED)  ## all tests but the slow ones, one thread in each of two processes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WORKERS) -m "not slow"

test-all: $(INSTALLED)  ## the whole test suite with more examples of each property, and its slowest tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WORKERS) --hypothesis-profile=thorough --durations=20

lint: $(INSTALLED)  ## ruff, spelling and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell README.md CONTRIBUTING.md CHANGELOG.md docs/*.md rankrl decomposition pruning optim
	$(BIN)/mypy

docs: $(INSTALLED)  ## the pages with the reference of the API, in site/; a warning is an error
	$(BIN)/mkdocs build --quiet --strict

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,tpe,cmaes]"
	touch $@

clean:  ## remove the environment and caches
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis
