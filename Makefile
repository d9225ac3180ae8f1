# Every target does its own set-up in .venv; plain `make` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS := .venv-docs
LIBRARIES := .venv-integrations
# Without compiled files, each process that a test starts compiles the source again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test check coverage bench tour pages docs clean screenshots integrations

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 13

setup: $(STAMP) ## make .venv and install Paceline with everything to develop it

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup ## four strategies on real images, a killed worker, a killed run, a replay, a verdict; under a minute
	$(BIN)/python examples/demo.py

test: setup ## all tests: the fast ones on all cores, then those that start processes
	$(BIN)/python -m pytest -m "not real" -n auto --dist worksteal
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -m real -n 3 --dist worksteal

check: setup ## format, lint, types and the quick tests; under a minute
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not real and not long" -n auto --dist worksteal

coverage: setup ## lines and branches that the tests without processes run; fails below 90 % in core, codecs, transports
	$(BIN)/python -m pytest -m "not real" -n auto --dist worksteal --cov --cov-report=json:.coverage.json
	$(BIN)/python tools/check_coverage.py .coverage.json

bench: setup ## the figures of docs/measured.md, each beside its peer
	$(BIN)/python benchmarks/throughput.py --quick
	$(BIN)/python benchmarks/server_cost.py --quick
	$(BIN)/python benchmarks/startup.py --quick
	$(BIN)/python benchmarks/memory.py --quick
	$(BIN)/python benchmarks/simulator.py --quick

integrations: $(LIBRARIES)/.installed ## programs of Lightning, transformers, Accelerate and Ray, against the real packages; minutes
	OMP_WAIT_POLICY=PASSIVE $(LIBRARIES)/bin/python -m pytest tests/integrations -n 2
	OMP_WAIT_POLICY=PASSIVE $(LIBRARIES)/bin/python benchmarks/integrations.py

$(LIBRARIES)/.installed: pyproject.toml constraints.txt
	@test -x $(LIBRARIES)/bin/python || $(PYTHON) -m venv $(LIBRARIES)
	$(LIBRARIES)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[integrations]'
	@touch $@

tour: setup ## in step, free and local steps on a quadratic, under a virtual clock; seconds
	$(BIN)/python examples/tour.py

pages: setup ## make the generated parts of docs/architecture.md and docs/cli.md, and the pictures of strategies
	$(BIN)/python tools/generate_pages.py
	$(BIN)/python tools/strategy_figures.py
	$(BIN)/python tools/lines_to_adopt.py

docs: $(DOCS)/.installed ## the documentation as a site that opens offline: site/index.html
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --clean
	$(DOCS)/bin/python tools/check_site.py site
	@echo "open site/index.html; to search in it too: python3 -m http.server -d site"

# The site is made from the source's text: what builds it needs neither Paceline nor torch, so it has a place of its own.
$(DOCS)/.installed: pyproject.toml constraints.txt
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')" > $(DOCS)/needs.txt
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r $(DOCS)/needs.txt
	@touch $@
screenshots: setup ## the pictures of docs/figures, of real short runs in a real browser; needs Chromium
	$(BIN)/python tools/screenshots.py

clean: ## remove .venv and caches, never runs
	rm -rf $(VENV) $(DOCS) $(LIBRARIES) site .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.*
