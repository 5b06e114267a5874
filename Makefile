# The front door: every verb that people and CI use. `make help` lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup
ALONE  := $(BIN)/python -m pytest

# Tests start hundreds of processes, and each would compile Poise anew if Python were told to keep no bytecode.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup frameworks browser kubernetes demo quick test test-unit test-integration test-docs test-e2e test-ray test-kubernetes test-frameworks test-browser check fix format-check lint types imports bench lock clean

help:            ## list the verbs
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | while IFS="$$(printf '\t')" read -r verb text; do printf '  make %-17s %s\n' "$$verb" "$$text"; done

setup: $(READY)  ## a virtual environment in .venv with everything pinned

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

frameworks: $(READY)  ## PyTorch, Lightning and Transformers, for the tests of their adapters
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,frameworks]'

browser:         ## Chromium, for the tests that open reports (Debian's package, as root)
	@command -v chromium >/dev/null || { timeout 300 apt-get update -qq && DEBIAN_FRONTEND=noninteractive timeout 600 apt-get install -y -qq --no-install-recommends chromium; } >/dev/null

kubernetes:      ## etcd and a Kubernetes API server, for the tests of that back end (builds once; WITH="kube-scheduler …": more)
	@tests/kube/build $(WITH)

demo: $(READY)   ## the tour: several policies on a mixed cluster, a table, an HTML report
	$(BIN)/poise demo

quick: $(READY)  ## the inner loop, under a minute: format, lint, types, unit and property tests with few examples
	$(BIN)/ruff format --check --quiet
	$(BIN)/ruff check --quiet
	$(BIN)/mypy
	$(PYTEST) --quiet -p no:schemathesis --hypothesis-profile=quick -m 'not slow' tests/unit tests/property

# The daemons of Ray and Kubernetes take all the processors there are: beside them, tests of real processes would measure the load.
test: $(READY)   ## all tests: the tiers below
	@failed=; $(PYTEST) -m 'not ray and not kubernetes and not browser' || failed=1; \
	for marker in ray kubernetes browser; do $(ALONE) -m $$marker || failed=1; done; test -z "$$failed"

test-unit: $(READY)  ## unit and property tests, with all examples
	$(PYTEST) tests/unit tests/property

test-integration: $(READY)  ## parts together: command line, server, runner, worker; contracts; published numbers
	$(PYTEST) -m 'not docs and not frameworks and not ray and not kubernetes' tests/contract tests/golden tests/integration

test-docs: $(READY)  ## what the documents show is run and compared
	$(PYTEST) -m docs tests/golden

test-e2e: $(READY)  ## a real service with real jobs, crashes included
	$(PYTEST) -m 'not frameworks and not ray and not kubernetes' tests/e2e

test-ray: $(READY)  ## Poise on a Ray cluster of real daemons, and its examples
	$(ALONE) -m ray

test-kubernetes: $(READY)  ## Poise on a real Kubernetes API server with pretended nodes (`make kubernetes` gets it)
	$(ALONE) -m kubernetes

test-frameworks: $(READY)  ## training with PyTorch, Lightning and Transformers (`make frameworks` installs them)
	$(PYTEST) -m 'frameworks and not ray and not kubernetes' tests/integration tests/e2e

test-browser: $(READY)  ## reports in Chromium (`make browser` installs it)
	$(ALONE) -m browser

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

bench: $(READY)  ## speed: of the simulator, allocations, large reports, the service, and runs on other machines
	$(BIN)/python -m tests.bench.speed
	$(BIN)/python -m tests.bench.solve
	$(BIN)/python -m tests.bench.markets
	$(BIN)/python -m tests.bench.divided
	$(BIN)/python -m tests.bench.report
	$(BIN)/python -m tests.bench.live
	$(BIN)/python -m tests.bench.remote
	$(BIN)/python -m tests.bench.nodes
	$(BIN)/python -m tests.bench.kubernetes
	$(BIN)/python -m tests.bench.fidelity

# CUDA's packages are left out: torch pins them itself, and builds of torch without CUDA have none.
lock: $(READY)   ## pin what is installed now
	$(BIN)/python -m pip freeze --disable-pip-version-check --exclude-editable | grep -Ev '^(pip|triton|cuda-[a-z]+|nvidia-(c|n).*)==' | sed 's/+cpu$$//' > constraints.txt

clean:           ## forget the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
