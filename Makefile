# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` do all their own set-up. Everything they install goes into .venv.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CXX_FILES = $(shell find csrc tests -regex '.*\.\(h\|cpp\|cuh\|cu\)')

# Small models run slower on several threads than on one, and the tests compare timings.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help
help:
	@echo 'make demo      federate hand-written digits with FedAvg and FedLF; writes a picture and CSV logs to demo/'
	@echo 'make test      run the test suite, then lint and types'
	@echo 'make test-all  the same with the slow cases'
	@echo 'make check     lint, formatting and types only'
	@echo 'make format    reformat the code'
	@echo 'make bench     time rounds against a hand-written loop'
	@echo 'make clean     delete what the other targets wrote; make distclean deletes .venv too'
	@echo
	@echo 'Variables: PYTHON (now $(PYTHON)), VENV (now $(VENV)), PYTEST_ARGS'

.PHONY: demo
demo: $(READY)
	@$(BIN)/python examples/demo.py

.PHONY: test
test: $(READY)
	$(BIN)/python -m pytest -m 'not slow' $(PYTEST_ARGS)
	@$(MAKE) --no-print-directory check

.PHONY: test-all
test-all: $(READY)
	$(BIN)/python -m pytest $(PYTEST_ARGS)
	@$(MAKE) --no-print-directory check

.PHONY: check
check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/mypy

.PHONY: format
format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

.PHONY: bench
bench: $(READY)
	$(BIN)/python -m benchmarks.rounds

.PHONY: clean
clean:
	rm -rf build dist demo logs lightning_logs .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find fl_lightning tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: distclean
distclean: clean
	rm -rf $(VENV)

# Made anew whenever pyproject.toml changes; a set-up that was interrupted goes on where it stopped.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	@echo 'Setting up $(VENV) (the first time: downloads PyTorch, a few minutes)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --progress-bar off -e '.[test,lint]' \
	  | sed -u -nE -e 's/^ *(Downloading|Using cached) ([^-]+-[^-]+)-[^ ]+\.whl( .*)?$$/  \2\3/p' -e 's/^Installing.*/Installing/p'
	@touch $@
	@echo 'Set up.'
