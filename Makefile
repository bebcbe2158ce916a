# Every target builds what it needs in .venv, also on a fresh machine. `make` alone lists the targets.
#
#   core  -> the library alone                 (demo)
#   dev   -> core + test and lint tools, files (lint, bench)
#   docs  -> core + Sphinx                     (docs)
#   torch -> dev + PyTorch's CPU build, if any (test)

# The first Python that really runs (a name on the PATH may be a shim that does not), is 3.11 or newer, can make
# environments. Another one: make test PYTHON=/path/to/python
PYTHON ?= $(shell for python in python3.11 python3.12 python3; do \
	"$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& { echo "$$python"; break; }; done)

# The CPU build carries the local version +cpu, so this pin can never bring in a CUDA build of several gigabytes.
TORCH ?= torch==2.13.0+cpu

# Tests that run at the same time; parts of the suite wait for processes of their own.
TEST_PROCESSES ?= 2

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check install -qq -c constraints.txt

# Stamps live inside the environment and carry its place: delete, copy or move it, and it is installed anew.
STAMPS := $(VENV)/.stamps/$(firstword $(shell pwd | cksum))
CORE := $(STAMPS)/core
DEV := $(STAMPS)/dev
FOR_DOCS := $(STAMPS)/docs
WITH_TORCH := $(STAMPS)/torch
MADE_HERE := $(VENV)/.stamps/made-by-make

# Flower wants older versions than constraints.txt has, so it gets an environment and constraints of its own.
FLOWER_VENV := build/flower-venv
WITH_FLOWER := $(FLOWER_VENV)/.stamp-$(firstword $(shell pwd | cksum))
FLOWER_TESTS := tests/integration/flower

.DEFAULT_GOAL := help
.PHONY: help demo federation-demo test test-all test-flower test-flower-all lint docs bench clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    fit a small federation and show the result"
	@echo "make federation-demo  a server and four sites as processes, over TLS; one is killed (up to three minutes)"
	@echo "make test    run the tests"
	@echo "make test-all  run those that take long as well"
	@echo "make test-flower  run those that need Flower: real processes, over TLS (test-flower-all: also those that take long)"
	@echo "make lint    ruff and mypy"
	@echo "make docs    build the documentation site in build/docs"
	@echo "make bench   run the benchmarks"
	@echo "make clean   remove caches, build outputs and the environment (.venv), but no runs/"

demo: $(CORE)
	@$(VENV)/bin/partsong demo

federation-demo: $(WITH_FLOWER)
	@$(FLOWER_VENV)/bin/partsong federation demo

test: $(WITH_TORCH)
	$(RUN) -m pytest tests -m "not slow" --numprocesses $(TEST_PROCESSES) --dist worksteal

test-all: $(WITH_TORCH)
	$(RUN) -m pytest tests --numprocesses $(TEST_PROCESSES) --dist worksteal

test-flower: $(WITH_FLOWER)
	$(FLOWER_VENV)/bin/python -m pytest $(FLOWER_TESTS) -m "not slow"

test-flower-all: $(WITH_FLOWER)
	$(FLOWER_VENV)/bin/python -m pytest $(FLOWER_TESTS)

lint: $(DEV)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

docs: $(FOR_DOCS)
	$(RUN) docs/check.py
	$(RUN) -m sphinx -W --keep-going -n -q -d build/doctrees docs build/docs
	@echo "The site: build/docs/index.html"

bench: $(DEV)
	$(RUN) -m benchmarks

clean:
	@if [ -e $(MADE_HERE) ]; then rm -rf $(VENV); \
	elif [ -d $(VENV) ]; then rm -rf $(VENV)/.stamps; echo "$(VENV) was not made by make: left alone."; fi
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -path ./.git -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

# An environment made by hand is kept when it runs and is new enough; pip then brings it to the pinned versions.
$(CORE): pyproject.toml constraints.txt
	@if $(RUN) -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
		echo "== Using the environment in $(VENV)"; \
	else \
		python="$(PYTHON)"; \
		if [ -z "$$python" ]; then \
			echo "No Python 3.11 or newer (with venv) was found; name one: make $(MAKECMDGOALS) PYTHON=/path/to/python" >&2; \
			exit 1; \
		fi; \
		echo "== Making the environment $(VENV) with $$python (a few seconds)"; \
		"$$python" -m venv --clear $(VENV) && mkdir -p $(STAMPS) && touch $(MADE_HERE); \
	fi
	@echo "== Installing partsong and its dependencies (about a minute with a good connection)"
	@$(PIP) -e .
	@mkdir -p $(STAMPS) && touch $@

$(DEV): $(CORE)
	@echo "== Installing the tools for tests and lint (about a minute)"
	@$(PIP) -e ".[dev,io]"
	@touch $@

$(FOR_DOCS): $(CORE)
	@echo "== Installing Sphinx (a few seconds)"
	@$(PIP) -e ".[docs]"
	@touch $@

# Optional: the tests that need PyTorch skip themselves without it. So a failure is told, leaves no stamp, and is tried
# again next time; a PyTorch that is there already is kept.
$(WITH_TORCH): $(DEV)
	@if $(RUN) -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; then \
		touch $@; \
	elif ! $(RUN) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then \
		echo "== PyTorch is pinned for Python 3.11 only: left out, its tests will be skipped"; \
	else \
		echo "== Installing $(TORCH) (about 200 MB, a minute)"; \
		if $(PIP) "$(TORCH)"; then touch $@; \
		else echo "== $(TORCH) could not be installed: left out, its tests will be skipped"; fi; \
	fi

$(WITH_FLOWER): pyproject.toml constraints-flower.txt
	@python="$(PYTHON)"; \
	if [ -z "$$python" ]; then \
		echo "No Python 3.11 or newer (with venv) was found; name one: make $(MAKECMDGOALS) PYTHON=/path/to/python" >&2; \
		exit 1; \
	fi; \
	echo "== Making the environment $(FLOWER_VENV) with Flower (about a minute with a good connection)"; \
	"$$python" -m venv --clear $(FLOWER_VENV)
	@$(FLOWER_VENV)/bin/python -m pip --disable-pip-version-check install -qq -c constraints-flower.txt \
		-e ".[flower,privacy]" hypothesis pytest pytest-xdist
	@touch $@
