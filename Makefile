# Every target does its own set-up in .venv; plain `make` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench tour screenshots clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 13

setup: $(STAMP) ## make .venv and install Paceline with everything to develop it

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup ## the same model alone, in step and free, on real images; two minutes
	$(BIN)/python examples/demo.py

test: setup ## all tests: the fast ones on all cores, then those that start processes
	$(BIN)/python -m pytest -m "not real" -n auto --dist worksteal
	$(BIN)/python -m pytest -m real -n 2 --dist worksteal

check: setup ## format, lint, types and the fast tests; under a minute
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not real" -n auto --dist worksteal

bench: setup ## the measured figures of the README, each beside its peer
	$(BIN)/python benchmarks/throughput.py --quick
	$(BIN)/python benchmarks/server_cost.py --quick
	$(BIN)/python benchmarks/startup.py --quick
	$(BIN)/python benchmarks/memory.py --quick
	$(BIN)/python benchmarks/simulator.py --quick

tour: setup ## in step, free and local steps on a quadratic, under a virtual clock; seconds
	$(BIN)/python examples/tour.py

screenshots: setup ## the pictures of docs/figures, of real short runs in a real browser; needs Chromium
	$(BIN)/python tools/screenshots.py

clean: ## remove .venv and caches, never runs
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
