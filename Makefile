# The front door: every verb that people and CI use. `make help` lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup frameworks browser demo test check fix format-check lint types imports bench lock clean

help:            ## list the verbs
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | while IFS="$$(printf '\t')" read -r verb text; do printf '  make %-13s %s\n' "$$verb" "$$text"; done

setup: $(READY)  ## a virtual environment in .venv with everything pinned

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

frameworks: $(READY)  ## PyTorch, Lightning and Transformers, for the tests of their adapters
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,frameworks]'

browser:         ## Chromium, for the tests that open reports (Debian's package, as root)
	@command -v chromium >/dev/null || { timeout 300 apt-get update -qq && DEBIAN_FRONTEND=noninteractive timeout 600 apt-get install -y -qq --no-install-recommends chromium; } >/dev/null

demo: $(READY)   ## the tour: several policies on a mixed cluster, a table, an HTML report
	$(BIN)/poise demo

test: $(READY)   ## all tests
	$(PYTEST) -n 2

check: format-check lint types imports test  ## the whole truth before a commit: format, lint, types, imports, tests

format-check: $(READY)
	$(BIN)/ruff format --check

lint: $(READY)
	$(BIN)/ruff check

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

fix: $(READY)    ## format, and mend what the linter can
	$(BIN)/ruff check --fix --quiet || true
	$(BIN)/ruff format --quiet

bench: $(READY)  ## speed: of the simulator, of allocations, and until a large report is open
	$(BIN)/python -m tests.bench.speed
	$(BIN)/python -m tests.bench.solve
	$(BIN)/python -m tests.bench.markets
	$(BIN)/python -m tests.bench.divided
	$(BIN)/python -m tests.bench.report
	$(BIN)/python -m tests.bench.live

lock: $(READY)   ## pin what is installed now
	$(BIN)/python -m pip freeze --disable-pip-version-check --exclude-editable | grep -v '^pip==' | sed 's/+cpu$$//' > constraints.txt

clean:           ## forget the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
