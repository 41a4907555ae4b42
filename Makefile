# The two commands of a newcomer: make demo, make test.
SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install --constraint constraints.txt
CHECKED := gradcheck_dist tests benchmarks examples docs

.PHONY: help install demo test test-long test-torch test-dask clients lint types layers unit test-kernels library simulate matrix bench bench-gpu test-gpu test-elsewhere bench-quick screenshots notebooks docs clean

help:
	@echo "make demo     install and reproduce one real bug: gradcheck scenario ddp-accum"
	@echo "make test     everything that must hold: lint, types, layers, tests"
	@echo "make test-long  what takes long for what seldom breaks: restarts, notebooks, other sizes of scenarios, the trainer beside one process"
	@echo "make clients  trains with transformers, accelerate, Lightning, TRL, sentence-transformers, ignite, DeepSpeed, torchtitan, Megatron Core; takes 6 GB in $(VENV)/clients"
	@echo "make library  every scenario as a table, then again with another seed; make matrix  every correct configuration"
	@echo "make simulate  sixty random trainers of every family, judged without any process; then hundreds of real ones"
	@echo "make bench    overhead, trace, statistics, scale, start, screens, reports, many ranks, detection; what is kept already is left out"
	@echo "make bench-gpu  checks and times on a CUDA device;  make bench-quick  only shows that the benchmarks run"
	@echo "make test-gpu  the probes' tests with their tensors on a CUDA device, which all ranks share"
	@echo "make test-elsewhere  the same without a GPU: probes believe that the CPU's values lie on an accelerator"
	@echo "make test-dask  judging on a Dask cluster of two processes, byte for byte as without; fetches distributed"
	@echo "make test-kernels  the Triton kernel, interpreted and compiled; fetches triton (1 GB) into $(VENV)/triton"
	@echo "make test-torch TORCH=2.15.0  the tests under another torch; fetches it (5 GB) into $(VENV)/torch-2.15.0"
	@echo "make docs     the documentation site into site/;   make notebooks  run the example notebooks again"
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

# Runs the example notebooks again and keeps what they print.
notebooks: $(VENV)/.installed-dev
	$(BIN)/python examples/notebooks/run.py

docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet && echo "open site/index.html"

test: lint types layers unit

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check $(wildcard $(CHECKED))
	$(BIN)/ruff format --check $(wildcard $(CHECKED))

types: $(VENV)/.installed-dev
	$(BIN)/mypy

layers: $(VENV)/.installed-dev
	$(BIN)/lint-imports

# Two workers at any size of machine: each may have a job of four ranks. PYTEST_ARGS='-n 0' runs them one by one. One that
# crashes ends the run: the others would wait for its files for ever.
WORKERS := -n 2 --dist loadfile --max-worker-restart 0

unit: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(WORKERS) $(PYTEST_ARGS)

# Restarts, spawned ranks, notebooks, scenarios of other sizes, the trainer beside one process: .ci/run runs these behind make test.
test-long: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m long $(WORKERS) $(PYTEST_ARGS)

# The same under another torch: make test-torch TORCH=2.15.0. Five gigabytes where pip finds no build for CPU alone.
OTHER := $(VENV)/torch-$(TORCH)

$(OTHER)/.installed: pyproject.toml | $(BIN)/python
	@test -n "$(TORCH)" || { echo "which torch? make test-torch TORCH=2.15.0" >&2; exit 1; }
	@test -x $(OTHER)/bin/python || $(BIN)/python -m venv $(OTHER)
	@$(OTHER)/bin/python -m pip --disable-pip-version-check --quiet install "torch==$(TORCH)" --editable '.[dev]'
	@touch $@

test-torch: $(OTHER)/.installed
	$(OTHER)/bin/python -m pytest $(WORKERS) $(PYTEST_ARGS)
	$(OTHER)/bin/python -m pytest -m long $(WORKERS) $(PYTEST_ARGS)

# A cluster of worker processes: half a minute, most of it starts processes.
test-dask: $(VENV)/.installed-dev
	@$(PIP) --editable '.[dask]'
	$(BIN)/python -m pytest -m dask tests/stream $(PYTEST_ARGS)

# Other people's trainers, in an environment of their own. Older releases of one have each theirs inside of it.
CLIENTS := $(VENV)/clients
CLIENTS_PIP := -m pip --disable-pip-version-check --quiet install --constraint constraints.txt --editable

$(CLIENTS)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing clients into $(CLIENTS)" >&2
	@test -x $(CLIENTS)/bin/python || $(BIN)/python -m venv $(CLIENTS)
	@DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(CLIENTS)/bin/python $(CLIENTS_PIP) '.[clients]'
	@for release in 4.45.2 4.46.2 4.46.3; do \
	  $(BIN)/python -m venv $(CLIENTS)/transformers-$$release && \
	  $(CLIENTS)/transformers-$$release/bin/python $(CLIENTS_PIP) . "transformers==$$release" 'accelerate<1.2' || exit 1; done
	@touch $@

clients: $(CLIENTS)/.installed
	$(CLIENTS)/bin/python -m pytest -m clients tests/clients $(PYTEST_ARGS)

# Minutes on two cores, so not part of make test, which runs every scenario once and a dozen of the matrix.
library: $(VENV)/.installed-dev
	$(BIN)/gradcheck scenario --all
	$(BIN)/python -m pytest -m library tests/scenarios/test_library.py $(PYTEST_ARGS)

# The second: scripts of random pieces in real ranks, whose gradients are compared with one process's.
simulate: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m simulation tests/diagnosis $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m simulation tests/composed $(PYTEST_ARGS)

matrix: install
	$(BIN)/gradcheck matrix

# What is kept of this code is left out: BENCH_ARGS='--only trace start --again' measures parts anew, --list shows them.
bench: install
	$(BIN)/python benchmarks/book.py $(BENCH_ARGS)

# On a machine with a CUDA device and triton: is everything right there, and what does it cost.
bench-gpu: install
	$(BIN)/python benchmarks/bench_gpu.py
	$(BIN)/python benchmarks/page.py

# The probes' tests with their tensors on a GPU, which ranks share over nccl: tests/support/on_cuda.py says why some fail.
test-gpu: $(VENV)/.installed-dev
	GRADCHECK_TEST_DEVICE=cuda $(BIN)/python -m pytest -n 8 --dist loadfile tests/probes tests/verify $(PYTEST_ARGS)

# Without a GPU: probes believe that the CPU's values lie on an accelerator (tests/support/elsewhere.py says more).
test-elsewhere: $(VENV)/.installed-dev
	GRADCHECK_TEST_DEVICE=elsewhere $(BIN)/python -m pytest -n 2 --dist loadfile tests/probes $(PYTEST_ARGS)

screenshots: install
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	{ $(BIN)/gradcheck scenario ddp-accum --keep "$$folder/runs" >/dev/null || exit 1; } && \
	$(BIN)/python -m gradcheck_dist.tui.screenshot "$$folder/runs/sum-every-backward" weights 100x24 r r r \
	  > docs/weights-ddp-accum.svg && echo "wrote docs/weights-ddp-accum.svg"

# Only shows that the benchmarks run: no figure of a shared machine is worth an assertion.
bench-quick: install
	@for name in overhead trace kernels tui scale start scenario reports ranks detection library; do echo "== $$name"; $(BIN)/python benchmarks/bench_$$name.py --quick || exit 1; done
	$(BIN)/python benchmarks/bench_gpu.py --rehearse

# Beside the environment and not in it: with triton installed torch imports slower and compiles differently.
test-kernels: $(VENV)/.installed-dev
	@test -d $(VENV)/triton || $(PIP) --no-deps --target $(VENV)/triton 'triton>=3'
	PYTHONPATH=$(VENV)/triton $(BIN)/python -m pytest tests/stats $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find gradcheck_dist tests -name __pycache__ -type d -prune -exec rm -rf {} +
