# The two commands of a newcomer: make demo, make test.
SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install --constraint constraints.txt
CHECKED := gradcheck_dist tests benchmarks examples docs

.PHONY: help install demo test lint types layers unit bench clean

help:
	@echo "make demo     install and reproduce one real bug: gradcheck scenario ddp-accum"
	@echo "make test     everything that must hold: lint, types, layers, tests"
	@echo "make bench    probe overhead, trace cost, wall time of a scenario"
	@echo "make install  only install into $(VENV);   make clean  remove $(VENV) and caches"

install: $(VENV)/.installed

$(BIN)/python:
	@for python in "$(PYTHON)" python3 python3.14 python3.13 python3.12 python3.11; do \
	  if [ -n "$$python" ] && "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "creating $(VENV) with $$("$$python" --version)" >&2; exec "$$python" -m venv $(VENV); fi; done; \
	echo "no Python 3.11 or newer found. Install one, or name it: make install PYTHON=/path/to/python3.12" >&2; exit 1

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing gradcheck into $(VENV) (the first time loads torch: some minutes)" >&2
	@$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing what the tests need" >&2
	@$(PIP) --editable '.[dev]'
	@touch $@

demo: install
	@$(BIN)/gradcheck scenario ddp-accum

test: lint types layers unit

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check $(wildcard $(CHECKED))
	$(BIN)/ruff format --check $(wildcard $(CHECKED))

types: $(VENV)/.installed-dev
	$(BIN)/mypy

layers: $(VENV)/.installed-dev
	$(BIN)/lint-imports

unit: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

bench: install
	@for script in benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find gradcheck_dist tests -name __pycache__ -type d -prune -exec rm -rf {} +
