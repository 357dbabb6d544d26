# Everything a person or CI runs. Only python3 (3.10 or newer) and make are assumed: each target first brings its
# environment, .venv, up to date, which takes no time when pyproject.toml and constraints.txt have not changed.
#
#   make demo    train a small real model on this machine (2 ranks), about 3 minutes; pass options with ARGS="..."
#   make test    the test suite;  ARGS="tests/unit -k batch" for a part, ARGS=--wide for every row of the large tables;
#                in LANES=2 processes, each with its own pool of ranks (LANES=0: in this one, for a debugger)
#   make kernels the GPU kernels without a GPU: triton's interpreter and ahead-of-time builds, in .venv plus .venv-triton
#   make clients every client flow (Trainer, Accelerate, PEFT, TRL, Lightning) with pinned clients, in .venv-clients
#   make lint    ruff, import contracts, types
#   make bench   the figures of docs/performance.md, measured here
#   make docs    generate the config reference, check links and snippets

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
RANKS ?= 2
TRITON ?= triton==3.9.0
LANES ?= 2

# Compiled modules are kept, also where the caller's environment says otherwise (containers often do): the suite starts
# some hundred interpreters, each of which would compile the package again, and each lane all tests.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help demo test kernels clients lint bench docs format clean
.SECONDARY:

help:
	@sed -n 's/^#   //p' Makefile

# One stamp per set of extras: .venv/.installed-test is newer than what decides its content, or is made again.
$(VENV)/.installed-%: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the $* environment into $(VENV) (once; torch makes it take a few minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$*]"
	@touch $@

demo: $(VENV)/.installed-report
	$(BIN)/deepspeed --num_gpus $(RANKS) examples/quickstart/train.py --deepspeed \
	    --deepspeed_config examples/quickstart/ds_config.json $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n $(LANES) --dist worksteal $(ARGS)

# Beside the environment, not in it: torch's CPU wheels bring no triton, and all other tests run as users without it do.
.venv-triton/.installed: Makefile $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --target .venv-triton "$(TRITON)"
	@touch $@

kernels: .venv-triton/.installed
	PYTHONPATH=.venv-triton $(BIN)/python -m pytest -n $(LANES) -q $(wildcard tests/kernels/test_*_triton.py) $(ARGS)

# After the environment of the tests, whose torch it reads: a second copy would take a minute and a gigabyte.
clients: $(VENV)/.installed-test
	PYTHON=$(PYTHON) LANES=$(LANES) scripts/check_clients.sh $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check --no-cache .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix-only --quiet .

bench: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks $(ARGS)

docs: $(VENV)/.installed-test
	$(BIN)/python scripts/gen_config_docs.py
	$(BIN)/python -m pytest -q tests/architecture/test_docs.py

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache demo_out bench_out
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
