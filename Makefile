# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` do all their own set-up. Everything they install goes into .venv; the compiled kernels lie
# beside the package's sources.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
PROJECTS ?=
PYTHONS ?= python3.10 python3.13
BIN := $(VENV)/bin
READY := $(VENV)/.ready
KERNELS := build/.kernels
OLDEST := .venv-oldest
FLOWER := .venv-flower
NVFLARE := .venv-nvflare
RAY := .venv-ray
CXX_FILES = $(shell find csrc tests -regex '.*\.\(h\|cpp\|cuh\|cu\)')

# The rooms of `make quick`.
QUICK := algorithms core data lightning metrics ops
# The workers divide the tests among themselves in runs of neighbours, so fixtures of a module are rarely made twice.
PYTEST = FL_LIGHTNING_TEST_KERNELS=built $(BIN)/python -m pytest -n auto --dist worksteal

# Small models run slower on several threads than on one; the tests use one process per core instead.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Where this is set, every process of the suite compiles all sources again: half of its start.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help
help:
	@echo 'make demo      federate hand-written digits with FedAvg and FedLF; writes a report, a picture and CSV logs to demo/'
	@echo 'make quick     the tests of single parts ($(QUICK)), without a Trainer: a minute'
	@echo 'make test      run the test suite on all cores, then lint and types'
	@echo 'make test-all  the same with the slow cases'
	@echo 'make check     lint, formatting and types only'
	@echo 'make format    reformat the code'
	@echo 'make kernels   build the compiled kernels, as far as a compiler is there; demo and test do it by themselves'
	@echo 'make test-oldest  the tests with every dependency at the oldest release that pyproject.toml allows'
	@echo 'make test-flower  the tests of federations on Flower, in an environment of their own: .venv and Flower'
	@echo 'make test-flower-all  the same with SuperLink and SuperNodes in processes of their own: kills, restarts, TLS'
	@echo 'make test-nvflare  the tests of federations on NVFlare, in an environment of their own'
	@echo 'make test-ray  the tests of clients on Ray, in an environment of their own'
	@echo 'make test-projects  install and federate the published projects of examples/projects (PROJECTS="graphs tabular")'
	@echo 'make docs      build the documentation site, build/site/html; make docs-links asks the addresses of other sites'
	@echo 'make bench     time rounds against a hand-written loop'
	@echo 'make mutants   changes code of FILES, or a random 2 % of what can be changed: which change does no test notice?'
	@echo 'make sanitize  10^5 random calls of the CPU kernels under sanitizers, in each instruction set (SANITIZE_CALLS)'
	@echo 'make dist      build and check what a release uploads, in dist/; make dist-cuda a wheel with CUDA kernels'
	@echo 'make dist-test install dist/ in new environments and run the op tests there (PYTHONS="python3.10 python3.13")'
	@echo 'make clean     delete what the other targets wrote; make distclean deletes .venv too'
	@echo
	@echo 'Variables: PYTHON (now $(PYTHON)), VENV (now $(VENV)), PYTEST_ARGS, PROJECTS, PYTHONS, FILES'

.PHONY: demo
demo: $(KERNELS)
	@$(BIN)/python examples/demo.py

.PHONY: quick
quick: $(KERNELS)
	$(PYTEST) -q -rfE -m 'not fit and not process and not slow' $(addprefix tests/,$(QUICK)) $(PYTEST_ARGS)

.PHONY: test
test: $(KERNELS)
	$(PYTEST) -m 'not slow' $(PYTEST_ARGS)
	@$(MAKE) --no-print-directory check

.PHONY: test-all
test-all: $(KERNELS)
	$(PYTEST) $(PYTEST_ARGS)
	@$(MAKE) --no-print-directory check

# The environment of PYTHON, by preference 3.10: most of the oldest releases know no later Python. Kernels need a later
# torch. Old releases use what new ones of others call outdated, so such warnings are no errors here.
.PHONY: test-oldest
test-oldest: $(OLDEST)/.ready
	$(OLDEST)/bin/python -m pytest -n auto --dist worksteal -m 'not slow' \
	  -W ignore::DeprecationWarning $(PYTEST_ARGS)

$(OLDEST)/.ready: pyproject.toml
	@echo 'Setting up $(OLDEST) (the first time: downloads an old PyTorch, a few minutes)'
	@$(PYTHON) -m venv --clear $(OLDEST)
	@$(OLDEST)/bin/python -m pip install --quiet uv
	@env -u FORCE_CUDA FL_LIGHTNING_NO_EXT=1 $(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python \
	  --resolution lowest-direct -e '.[test]'
	@touch $@

# Flower wants older releases of packages that others use, and NVFlare brings many of its own. Each has an environment,
# which sees the packages of VENV behind its own: they lie nearer.
.PHONY: test-flower
test-flower: $(FLOWER)/.ready $(KERNELS)
	$(FLOWER)/bin/python -m pytest -q -n auto --dist worksteal -m 'not slow' tests/federation/flower $(PYTEST_ARGS)

# One after the other: each test starts a SuperLink and SuperNodes, which start a process for every message.
.PHONY: test-flower-all
test-flower-all: test-flower
	$(FLOWER)/bin/python -m pytest -m slow tests/federation/flower $(PYTEST_ARGS)

.PHONY: test-nvflare
test-nvflare: $(NVFLARE)/.ready $(KERNELS)
	$(NVFLARE)/bin/python -m pytest -q -n auto --dist worksteal tests/federation/test_nvflare.py $(PYTEST_ARGS)

# One process: the cluster of the tests has two cores.
.PHONY: test-ray
test-ray: $(RAY)/.ready $(KERNELS)
	$(RAY)/bin/python -m pytest -q tests/federation/test_ray_executor.py $(PYTEST_ARGS)

$(FLOWER)/.ready $(NVFLARE)/.ready $(RAY)/.ready: .venv-%/.ready: $(READY)
	@echo 'Setting up .venv-$* (seconds)'
	@$(BIN)/python -m venv --without-pip --clear .venv-$*
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  >"$$(.venv-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/behind.pth"
	@$(BIN)/python -m pip --python .venv-$*/bin/python install --quiet "$$(sed -nE 's/^$* = \["(.*)"\]$$/\1/p' pyproject.toml)"
	@touch $@

# Each project's packages go into build/projects; all projects run, and a table says at the end what failed.
.PHONY: test-projects
test-projects: $(KERNELS)
	@$(BIN)/python tests/project/run_projects.py $(PROJECTS) -- $(PYTEST_ARGS)

.PHONY: check
check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo $(BIN)/clang-format csrc tests
	@$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/shellcheck .ci/run benchmarks/gpu.sh
	$(BIN)/mypy

.PHONY: format
format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CXX_FILES)

# Sphinx and the two notebooks' kernel are needed for nothing else, so they are installed when the site is first built.
$(VENV)/.docs: $(READY)
	@env -u FORCE_CUDA FL_LIGHTNING_NO_EXT=1 $(BIN)/python -m pip install -q -e '.[docs]'
	@touch $@

.PHONY: docs
docs: $(VENV)/.docs
	@$(BIN)/python docs/_site/build_site.py

.PHONY: docs-links
docs-links: $(VENV)/.docs
	@$(BIN)/python docs/_site/build_site.py --builder linkcheck

.PHONY: bench
bench: $(KERNELS)
	$(BIN)/python -m benchmarks.rounds

FILES ?=
.PHONY: mutants
mutants: $(KERNELS)
	@$(BIN)/python tests/mutants.py $(FILES)

# Needs a C++ compiler and nothing of .venv.
SANITIZE_CALLS ?= 100000
.PHONY: sanitize
sanitize:
	@$(PYTHON) tests/sanitize/sanitizers.py --calls $(SANITIZE_CALLS)

.PHONY: dist
dist: $(VENV)/.dist
	@$(BIN)/python release/wheels.py

.PHONY: dist-cuda
dist-cuda: $(VENV)/.dist
	@$(BIN)/python release/wheels.py --cuda --folder dist-cuda

.PHONY: dist-test
dist-test:
	@$(PYTHON) release/clean_environments.py $(PYTHONS)

$(VENV)/.dist: $(READY)
	@env -u FORCE_CUDA FL_LIGHTNING_NO_EXT=1 $(BIN)/python -m pip install --quiet -e '.[dist]'
	@touch $@

.PHONY: clean
clean:
	rm -rf fl_lightning/_C*.so fl_lightning/_built.txt build dist dist-cuda demo logs lightning_logs .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find fl_lightning tests benchmarks examples docs release -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: distclean
distclean: clean
	rm -rf $(VENV) $(OLDEST) $(FLOWER) $(NVFLARE) $(RAY)

# Made anew whenever pyproject.toml changes; a set-up that was interrupted goes on where it stopped. Python is there
# before pip is, so an environment counts as made once pip answers.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	@echo 'Setting up $(VENV) (the first time: downloads PyTorch, a few minutes)'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@env -u FORCE_CUDA FL_LIGHTNING_NO_EXT=1 $(BIN)/python -m pip install --progress-bar off -e '.[test,lint,mutants]' \
	  | sed -u -nE -e 's/^ *(Downloading|Using cached) ([^-]+-[^-]+)-[^ ]+\.whl( .*)?$$/  \2\3/p' -e 's/^Installing.*/Installing/p'
	@touch $@
	@echo 'Set up.'

.PHONY: kernels
kernels: $(KERNELS)

# Not through pip, which builds everything anew each time. Where something is missing, setup.py says it in one sentence,
# and all goes on in pure torch; a compiler that fails stops everything.
$(KERNELS): $(READY) build/.settings setup.py $(shell find csrc -type f ! -name '*.md')
	@echo 'Building the kernels (about a minute the first time)'
	@rm -f fl_lightning/_C*.so
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python setup.py build_ext --inplace --force >build/log 2>&1 || { \
	  grep -E '^fl-lightning: FORCE_CUDA|error:' build/log | head -n 5 || true; \
	  echo 'The kernels do not build: see build/log. With FL_LIGHTNING_NO_EXT=1 all goes on in pure torch.'; exit 1; }; \
	sed -nE "s/^fl-lightning: (.*)/  \1 ($$SECONDS s)/p" build/log
	@touch $@

# Changes when another build than the last one is asked for, or another compiler found.
build/.settings: always
	@mkdir -p build
	@{ echo $(abspath $(VENV)); command -v c++ nvcc || true; \
	  env | grep -E '^(FL_LIGHTNING_NO_EXT|FORCE_CUDA|TORCH_CUDA_ARCH_LIST|CUDA_HOME|CXX|DEBUG)=' | sort || true; } >$@.now
	@if cmp -s $@.now $@; then rm $@.now; else mv $@.now $@; fi

.PHONY: always
always:
