# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# Needs Python >= 3.10 with pip and venv, git, make and a C compiler. Every target makes the environment that it needs
# (.venv, and .venvs/ for other versions) and rebuilds what has changed; `make help` lists the targets.
#
#   PYTHON=python3.12     the interpreter that .venv is made with
#   PYTEST_ARGS="-x -k n" more arguments for pytest

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash

PYTHON ?= python3
PYTEST_ARGS ?=
BENCH_ARGS ?=
DEMO_ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
SETUP := setup.py -q build_ext --inplace -j 2
NATIVE := setup.py $(shell find src -name '*.pyx' -o -name '*.pxd' -o -name '*.h')

# --- environments ---------------------------------------------------------------------------------------------------

# What the demo needs: the package in place, its compiler and transformers; no development tools.
$(VENV)/.demo: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed: make PYTHON=...")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt setuptools wheel cython
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[demo]'
	@touch $@

# The same environment with the development tools.
$(VENV)/.dev: $(VENV)/.demo
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

# The extensions, in place.
$(VENV)/.built: $(VENV)/.demo $(NATIVE)
	$(PY) $(SETUP)
	@touch $@

.PHONY: build
build: $(VENV)/.built ## build the extensions in place

# Valgrind where it is not installed: Debian's package, unpacked; nothing outside .venvs changes but the package lists.
VALGRIND := $(if $(shell command -v valgrind),,.venvs/valgrind/.ready)
.venvs/valgrind/.ready:
	@command -v apt-get > /dev/null && command -v dpkg-deb > /dev/null || { echo "valgrind is needed; install it" >&2; exit 1; }
	mkdir -p $(@D)
	cd $(@D) && { apt-get -q download valgrind || { apt-get -q update && apt-get -q download valgrind; }; }
	cd $(@D) && dpkg-deb -x valgrind_*.deb .
	@touch $@

# --- daily ----------------------------------------------------------------------------------------------------------

.PHONY: demo
demo: $(VENV)/.built ## ResNet-50 through IREE, compared with eager, crossing measured
	$(PY) -m iree_marshal demo $(DEMO_ARGS)

# In CI, where no check may be left out, valgrind must be there: it counts the instructions of the hot loops.
.PHONY: test
test: $(VENV)/.dev $(VENV)/.built $(if $(CI),$(VALGRIND)) ## the test suite; in CI also on the oldest supported runtime
	PATH="$$PATH:$(abspath .venvs/valgrind/usr/bin)" $(PY) -m pytest $(PYTEST_ARGS)
ifdef CI
	$(MAKE) compat COMPAT=$(firstword $(RELEASES)) COMPAT_PYTEST="$(CROSSING_PYTEST)"
endif

# One target per check, so that `make -k lint` reports all that is wrong at once.
CHECKS := ruff format cython types stubs spelling warnings

.PHONY: lint $(addprefix lint-,$(CHECKS))
lint: $(addprefix lint-,$(CHECKS)) ## format, lint, types, stubs, spelling, and a build with warnings as errors
$(addprefix lint-,$(CHECKS)): $(VENV)/.dev

lint-ruff:
	$(PY) -m ruff check --output-format concise .

lint-format:
	$(PY) -m ruff format --check .

lint-cython:
	PATH="$(abspath $(VENV)/bin):$$PATH" cython-lint src

lint-types:
	$(PY) -m mypy src/iree_marshal

# Every extension has a .pyi, and it says what the extension says.
STUBBED = $(subst /,.,$(patsubst src/%.pyx,%,$(shell find src -name '*.pyx')))
lint-stubs: $(VENV)/.built
	$(PY) -m mypy.stubtest --concise --ignore-disjoint-bases --allowlist .ci/stubtest-allowlist.txt \
	    --ignore-unused-allowlist $(STUBBED)

lint-spelling:
	$(PY) -m codespell_lib

lint-warnings:
	IREE_MARSHAL_WERROR=1 $(PY) setup.py -q build_ext -j 2 --build-lib build/werror

.PHONY: format
format: $(VENV)/.dev ## rewrite the Python sources as `make lint` wants them
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

.PHONY: bench
bench: $(VENV)/.dev $(VENV)/.built ## every benchmark beside its baselines, into benchmarks/results/
	$(PY) -m benchmarks $(BENCH_ARGS)
	$(MAKE) --no-print-directory numbers

.PHONY: numbers
numbers: $(VENV)/.dev $(VENV)/.built ## plots and the README's tables from what lies in benchmarks/results/
	$(PY) benchmarks/plots.py $(wildcard benchmarks/results/cpu.json benchmarks/results/cuda.json)
	$(PY) docs/make_numbers.py

.PHONY: instructions
instructions: $(VENV)/.dev $(VENV)/.built $(VALGRIND) ## count the instructions of the hot loops anew, for the tests to hold
	PATH="$$PATH:$(abspath .venvs/valgrind/usr/bin)" $(PY) benchmarks/instructions.py

# --- other runtimes -------------------------------------------------------------------------------------------------

# The releases of iree-base-runtime on PyPI that are supported, oldest first. COMPAT="3.4.0 3.13.0" picks.
RELEASES := 3.4.0 3.5.0 3.6.0 3.7.0 3.8.0 3.9.0 3.10.0 3.11.0 3.12.0 3.13.0
COMPAT ?= $(RELEASES)

# What depends on the compiler's Python API or on the pinned compiler's output is tested with that compiler only.
COMPAT_IGNORED := compile_* demo* turbine* packaging* docs* bench*
COMPAT_PYTEST := $(foreach name,$(COMPAT_IGNORED),--ignore-glob='*/test_$(name).py')

# What CI runs on the oldest release: the crossing and Executor, without what starts processes or trains models.
CROSSING := values arrays lifetime cases agreement selfcheck paths portable programs element_types impostors signature \
    executor_calls executor_results executor_known executor_submit executor_shared executor_load executor_memory
CROSSING_PYTEST := $(CROSSING:%=tests/test_%.py)

.PHONY: compat
compat: $(addprefix compat-,$(COMPAT)) ## the suite on every supported runtime; COMPAT="3.4.0 3.13.0" picks

compat-%: $(VENV)/.dev $(VENV)/.built .venvs/runtime-%/.ready
	@echo "== iree-base-runtime $*"
	.venvs/runtime-$*/bin/python -m pytest $(COMPAT_PYTEST) $(PYTEST_ARGS)

# Runtime and compiler of one release (an old runtime loads no program of a newer compiler), over all else of .venv:
# the .pth file puts .venv's packages, this one included, behind the environment's own. It comes last: pip would take
# what it sees there for installed.
.PRECIOUS: .venvs/runtime-%/.ready
.venvs/runtime-%/.ready: $(VENV)/.dev
	rm -rf $(@D)
	$(PY) -m venv $(@D)
	$(@D)/bin/python -m pip install -q --disable-pip-version-check --no-deps \
	    iree-base-runtime==$* iree-base-compiler==$*
	@$(call site_of,$(PY)); $(call site_of,$(@D)/bin/python,own); \
	    echo "import site; site.addsitedir('$$site')" > "$$own/development.pth"
	@touch $@

site_of = $(or $(2),site)="$$($(1) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

# --- instrumented runs ----------------------------------------------------------------------------------------------

# A copy per kind of build: objects with and without instruments must not meet.
define copy_tree
	mkdir -p $(1)
	rm -rf $(1)/tests $(1)/src/iree_marshal
	cp -r --parents src/iree_marshal tests setup.py pyproject.toml README.md LICENSE $(1)/
	find $(1)/src -name '*.so' -delete
endef

.PHONY: asan
asan: $(VENV)/.dev ## the suite under AddressSanitizer (gcc)
	$(call copy_tree,build/asan)
	cd build/asan && IREE_MARSHAL_SANITIZE=address $(abspath $(PY)) $(SETUP)
	cd build/asan && PYTHONPATH=src PYTHONMALLOC=malloc \
	    LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
	    ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 \
	    $(abspath $(PY)) -m pytest $(COMPAT_PYTEST) $(PYTEST_ARGS)

# The CUDA extension is loaded on machines with a GPU only, and counts there only.
.PHONY: coverage
coverage: $(VENV)/.dev ## line coverage, Python (at least 95 %) and Cython (at least 90 %)
	$(call copy_tree,build/coverage)
	cd build/coverage && IREE_MARSHAL_LINETRACE=1 $(abspath $(PY)) $(SETUP)
	cd build/coverage && rm -f .coverage* && \
	    PYTHONPATH=src $(abspath $(PY)) -m coverage run -m pytest $(TRACED_PYTEST) $(PYTEST_ARGS)
	cd build/coverage && $(abspath $(PY)) -m coverage combine -q
	cd build/coverage && status=0; \
	    $(abspath $(PY)) -m coverage report --include='*.py' --fail-under=95 || status=1; \
	    $(abspath $(PY)) -m coverage report --include='*.pyx' --fail-under=90 || status=1; exit $$status

# The distributions are built from the tree itself, not from a copy of it.
TRACED_PYTEST := --ignore-glob='*/test_packaging*.py'

# --- releases -------------------------------------------------------------------------------------------------------

PYTHONS ?= 3.10 3.11 3.12 3.13
# The first that runs: on the path (pyenv leaves names there that do not), or one of pyenv's.
find_python = $$(for python in python$(1) $$(ls -d ~/.pyenv/versions/$(1).*/bin/python$(1) 2>/dev/null); do \
    $$python -c 'import venv' 2>/dev/null && echo $$python && break; done)

VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' src/iree_marshal/__init__.py)
SDIST = dist/iree_marshal-$(VERSION).tar.gz

.PHONY: sdist
sdist: $(VENV)/.dev ## the source distribution, into dist/
	$(PY) -m build --no-isolation --sdist

.PHONY: wheel
wheel: sdist ## manylinux wheels for every CPython 3.10 to 3.13 found, into wheelhouse/; one is tested
	@mkdir -p wheelhouse; rm -f wheelhouse/*.whl
	@for version in $(PYTHONS); do \
	    if [ -z "$(call find_python,$$version)" ]; then echo "== CPython $$version: not found, no wheel"; continue; fi; \
	    echo "== CPython $$version"; $(MAKE) --no-print-directory wheel-with-$$version || exit; \
	done
	@ls -l wheelhouse
	$(MAKE) --no-print-directory wheel-test

wheel-with-%:
	test -x .venvs/wheel-$*/bin/python || "$(call find_python,$*)" -m venv .venvs/wheel-$*
	.venvs/wheel-$*/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt setuptools wheel cython
	rm -rf build/wheel-$*
	.venvs/wheel-$*/bin/python -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation \
	    -w build/wheel-$* $(SDIST)
	PATH="$(abspath $(VENV)/bin):$$PATH" $(PY) -m auditwheel repair -w wheelhouse build/wheel-$*/*.whl

# A clean environment: torch and pytest from .venv, this package from its wheel only, no compiler within reach.
.PHONY: wheel-test
wheel-test: $(VENV)/.dev
	rm -rf .venvs/wheel-test build/wheel-test
	$(PY) -m venv .venvs/wheel-test
	.venvs/wheel-test/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-index \
	    --find-links wheelhouse iree_marshal
	@$(call site_of,$(PY)); $(call site_of,.venvs/wheel-test/bin/python,own); echo "$$site" > "$$own/development.pth"
	mkdir -p build/wheel-test && cp -r tests pyproject.toml build/wheel-test/
	cd build/wheel-test && PATH=$(abspath .venvs/wheel-test/bin) $(abspath .venvs/wheel-test)/bin/python -c \
	    'import iree_marshal as im, sys; print(im.__file__); sys.exit("wheel-test" not in im.__file__)'
	cd build/wheel-test && PATH=$(abspath .venvs/wheel-test/bin) $(abspath .venvs/wheel-test)/bin/python \
	    -m pytest $(COMPAT_PYTEST) $(PYTEST_ARGS)

# --- housekeeping ---------------------------------------------------------------------------------------------------

.PHONY: clean
clean: ## remove builds and reports; environments stay (rm -rf .venv .venvs)
	rm -rf build dist wheelhouse htmlcov .coverage .mypy_cache .pytest_cache .ruff_cache src/*.egg-info
	find src -name '*.so' -delete
	rm -f $(VENV)/.built

.PHONY: help
help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do \
	    printf '  make %-12s %s\n' "$$name" "$$text"; done
