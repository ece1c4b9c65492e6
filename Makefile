# Everything a checkout needs: `make serve` runs the demo service, `make test` is the whole check.
# A second run is quick: what is installed is remembered by a hash of pyproject.toml and constraints.txt.

HOST ?= 127.0.0.1
PORT ?= 8000
VENV ?= .venv
# Options of the example, such as ARGS="--recipe tools".
ARGS ?=
# Processes that run tests side by side.
WORKERS ?= 2
# What is handed to `pip install` for torch; a user with a GPU may name another build or index:
#   make serve TORCH="torch==2.13.0 --index-url ..."
TORCH ?= $(shell grep '^torch==' constraints.txt)
# The first interpreter that is new enough.
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help print-python setup setup-dev demo serve example dashboards test test-slow test-gpu test-clients format clean

# The checkout's place counts too: the package is installed in editable mode, which points to it. So what another
# checkout installed in the same environment is not what it was once this one has.
LOCK := $(shell { cat pyproject.toml constraints.txt; echo '$(TORCH)'; pwd; } | sha256sum | cut -c1-16)
SERVE_INSTALLED := $(VENV)/.installed-serve-$(LOCK)
DEV_INSTALLED := $(VENV)/.installed-dev-$(LOCK)
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
# torch is left to TORCH; everything else has exactly one version.
CONSTRAINTS := $(VENV)/constraints.txt
# Other people's clients need versions that contradict ours: they have an environment of their own.
CLIENTS_VENV ?= .venv-clients
CLIENTS_PINS := tests/clients/requirements.txt
CLIENTS_INSTALLED := $(CLIENTS_VENV)/.installed-$(shell sha256sum < $(CLIENTS_PINS) | cut -c1-16)
NODE := tests/clients/node
NODE_INSTALLED := $(NODE)/node_modules/.installed-$(shell sha256sum < $(NODE)/package-lock.json | cut -c1-16)

define install
@rm -f $(VENV)/.installed-*
@grep -v '^torch==' constraints.txt > $(CONSTRAINTS)
@echo '==> Installing $(TORCH)'
@$(PIP) install -c $(CONSTRAINTS) $(TORCH)
@echo '==> Installing Roundhouse and what it depends on'
@$(PIP) install -c $(CONSTRAINTS) -e '.[$(1)]'
endef

help: ## show this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

$(VENV)/bin/python:
	@test -n '$(PYTHON)' || { echo 'Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11'; exit 1; }
	@echo "==> Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(SERVE_INSTALLED): | $(VENV)/bin/python
	$(call install,demo)
	@touch $@

$(DEV_INSTALLED): | $(VENV)/bin/python
	$(call install,dev)
	@touch $(SERVE_INSTALLED) $@

$(CLIENTS_INSTALLED):
	@test -n '$(PYTHON)' || { echo 'Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11'; exit 1; }
	@echo '==> Installing the clients of $(CLIENTS_PINS)'
	@$(PYTHON) -m venv --clear $(CLIENTS_VENV)
	@$(CLIENTS_VENV)/bin/python -m pip --disable-pip-version-check install --no-deps -r $(CLIENTS_PINS)
	@touch $@

$(NODE_INSTALLED):
	@if command -v npm >/dev/null; then echo '==> Installing openai-node'; npm --prefix $(NODE) ci && touch $@; \
		else echo '==> npm is not here: openai-node is left out'; fi

print-python:
	@echo $(PYTHON)

setup: $(SERVE_INSTALLED) ## create .venv and install what the service and the snippets of the README need

setup-dev: $(DEV_INSTALLED) ## the same, and what the tests need

demo: setup ## put the demo model and the demo checkpoints into .cache
	@$(VENV)/bin/python cluster/prepare_demo.py

serve: demo ## run the demo service on HOST:PORT; Ctrl-C ends it
	@echo '==> Starting the service'
	@exec $(VENV)/bin/python -m serve_app up --config config.yaml --host $(HOST) --port $(PORT)

example: demo ## train a checkpoint and sample it through the service that runs on HOST:PORT
	@$(VENV)/bin/python cluster/examples/train_checkpoint.py --url http://$(HOST):$(PORT)/v1 $(ARGS)

dashboards: setup ## show the service that runs on PORT in Prometheus and Grafana, where they are installed; Ctrl-C ends them
	@exec $(VENV)/bin/python cluster/watch/start.py --port $(PORT)

# Tests share the machine's cores among many threads and processes: waiting threads must sleep, not spin.
test test-slow test-gpu test-clients: export OMP_WAIT_POLICY = passive
test test-slow: export OMP_NUM_THREADS = 1
test test-slow test-gpu test-clients: export HF_HUB_OFFLINE = 1
test test-slow test-gpu test-clients: export RAY_USAGE_STATS_ENABLED = 0

test: setup-dev demo ## format, lint, import contracts, types and all tests but the slow ones
	@echo '==> Format'
	@$(VENV)/bin/ruff format --check .
	@echo '==> Lint'
	@$(VENV)/bin/ruff check .
	@echo '==> Import contracts'
	@$(VENV)/bin/lint-imports
	@echo '==> Types'
	@$(VENV)/bin/mypy
	@$(VENV)/bin/mypy cluster/*.py cluster/examples/*.py cluster/watch/*.py
	@echo '==> Tests'
	@$(VENV)/bin/python -m pytest -n $(WORKERS)

test-slow: setup-dev demo ## the slow tests
	@$(VENV)/bin/python -m pytest -n $(WORKERS) -m 'slow and not gpu and not alone'
	@$(VENV)/bin/python -m pytest -m 'slow and alone'

test-gpu: setup-dev demo ## the tests of the CUDA path, on a CUDA device
	@$(VENV)/bin/python -m pytest -m 'gpu or slow or not slow' tests/engines/gpu

test-clients: setup-dev demo $(CLIENTS_INSTALLED) $(NODE_INSTALLED) ## other people's clients against the demo service
	@CLIENTS_VENV=$(CLIENTS_VENV) $(VENV)/bin/python -m pytest --capture=no -m clients tests/clients

format: setup-dev ## format and sort imports
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix --quiet .

clean: ## remove .venv, .venv-clients and the tools' caches; .cache with models and checkpoints stays
	@rm -rf $(VENV) $(CLIENTS_VENV) $(NODE)/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
