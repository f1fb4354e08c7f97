# SPDX-License-Identifier: Apache-2.0
# Needs python3 (3.11 or newer), make and a package index. Everything else goes into .venv.
#   make PY=/path/to/python setup     choose another interpreter

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
PEERS := build/peers
PY ?=
CANDIDATES := $(if $(PY),$(PY),python3 python3.13 python3.12 python3.11 python3.14)
# Debian's python3 comes without ensurepip, and then cannot make a venv.
SERVES := import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))

# The version that constraints.txt is made for; everything else there is the newest that fits.
TORCH := 2.13.0
# Threads of torch's that wait for a core take two thirds of the processor's time from small tests.
ONE_THREAD := OMP_NUM_THREADS=1
# Python 3.11 brings an older one, which knows no dependency groups.
PIP := pip>=25.1

.PHONY: help setup demo check fix test test-all soak soak-tests mutants browser bench bench-full bench-gpu bench-growth \
  bench-page docs docs-refresh release matrix constraints lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.installed ## make .venv with everything in it (done by the others when needed)

demo: $(VENV)/.installed ## train a classifier of handwritten digits with two workers
	$(BIN)/python examples/digits.py

check: $(VENV)/.installed ## lint, format, types, import layers, workflows
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --cache-dir .import_linter_cache
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

fix: $(VENV)/.installed ## repair what lint and format can repair
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: $(VENV)/.installed ## the tests, without the slow ones
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n 3 -m "not slow"

test-all: $(VENV)/.installed $(VENV)/.audited $(VENV)/.documented browser ## all tests, with the libraries and the browser they need; times: out/test-all.xml
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n 2 -m "not soak" --durations=30 --junitxml=out/test-all.xml

soak: $(VENV)/.installed ## random training programs beside one process: SECONDS=600 COUNT= SEED= SYNC= WORKERS=
	PYTHONPATH=tests $(BIN)/python -m soak $(if $(SECONDS)$(COUNT),,--seconds 600) \
	  $(if $(SECONDS),--seconds $(SECONDS)) $(if $(COUNT),--count $(COUNT)) \
	  $(if $(SEED),--seed $(SEED)) $(if $(SYNC),--sync $(SYNC)) $(if $(WORKERS),--workers $(WORKERS)) \
	  $(if $(PROGRAM),--program $(PROGRAM))

soak-tests: $(VENV)/.installed ## the seeds of random kills, and the long runs, that test-all leaves out
	$(BIN)/python -m pytest -q -m soak

mutants: $(VENV)/.installed ## random changes of a package's source, of which its tests should notice each: PACKAGE=sync COUNT=300 SEED= SECONDS=
	$(BIN)/python -m tests.random_mutants $(or $(PACKAGE),$(error PACKAGE=sync, data, checkpoint, recovery or audit)) \
	  $(if $(COUNT),--count $(COUNT)) $(if $(SEED),--seed $(SEED)) $(if $(SECONDS),--seconds $(SECONDS))

bench: $(VENV)/.installed $(PEERS)/.tried ## measure beside DDP and its peers, 10 minutes; fails when a ratio misses its goal
	$(BIN)/python -m benchmarks

release: $(VENV)/.releasing ## build sdist and wheel into dist/, check them, and try each in an empty environment
	rm -rf dist
	$(BIN)/python -m build --outdir dist > build/release.log 2>&1 || { cat build/release.log >&2; exit 1; }
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	$(BIN)/python -m release.try_distributions dist

matrix: $(VENV)/bin/python ## a part of the tests under other versions: CELL=torch2.14; without CELL the list of cells
	$(BIN)/python -m release.matrix $(if $(CELL),$(CELL),--list)

docs: $(VENV)/.documented ## write the documentation as a site to build/docs
	$(BIN)/python -m sphinx -b html --fail-on-warning --keep-going -q -E -d build/doctrees docs build/docs
	@echo "open build/docs/index.html"

docs-refresh: $(VENV)/.installed ## run the programs in docs and the notebook, and put their output into them
	$(BIN)/python docs/refresh.py
	$(BIN)/python docs/refresh_tour.py

bench-full: $(VENV)/.installed $(PEERS)/.tried ## the same with Ray Train, 1 to 8 workers, the loss over 65536 rows
	$(BIN)/python -m benchmarks --suite full

bench-gpu: $(VENV)/.installed $(PEERS)/.tried ## the same on the CUDA devices of this machine
	$(BIN)/python -m benchmarks --suite gpu

bench-growth: $(VENV)/.installed ## how costs grow with workers, model, data and time
	$(BIN)/python -m benchmarks growth

bench-page: $(VENV)/.installed $(PEERS)/.tried ## put the latest results and their plot into docs/
	$(PEERS)/bin/python -m benchmarks.plot || echo "no plot: the peers, which draw it, are not there"
	$(BIN)/python -m benchmarks page

# Packages that lockstep is measured against have no place in .venv. They need not be had.
$(PEERS)/.tried: benchmarks/peers.txt constraints.txt pyproject.toml $(VENV)/bin/python
	@echo "installing the peers into $(PEERS)"
	@$(BIN)/python -m venv $(PEERS)
	@$(PEERS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt \
	  'torch==$(TORCH)' -r benchmarks/peers.txt -e '.[ray]' \
	  || echo "could not install the peers: their rows will say so"
	@touch $@

# A local suffix (+cpu) names one builder's wheel, and the CUDA packages come with another's.
constraints: $(VENV)/bin/python ## rewrite constraints.txt from a fresh installation of everything
	rm -rf build/constraints
	$(BIN)/python -m venv build/constraints
	build/constraints/bin/pip install --quiet '$(PIP)'
	build/constraints/bin/pip install --quiet 'torch==$(TORCH)' -e '.[all]' \
	  --group audited --group docs --group dev --group release
	{ echo "# Made by 'make constraints': .[all] and the groups, with torch $(TORCH), Python 3.11, Linux."; \
	  build/constraints/bin/pip freeze --all --exclude pip --exclude-editable \
	    | sed -E 's/^(torch==[^+]*)\+.*/\1/' | grep -vE '^(nvidia-|cuda-|triton==)'; } > build/constraints.txt
	mv build/constraints.txt constraints.txt
	rm -rf build/constraints

# `===`: the wheel of the index, and not one that was built here and bears a suffix.
lock: $(VENV)/.releasing ## write examples/requirements.txt anew: the demo's packages, with the hashes of their files
	printf '%s\n' 'torch===$(TORCH)' scikit-learn | $(BIN)/uv pip compile --quiet --universal --system-certs \
	  --python-version 3.11 --generate-hashes --no-annotate --custom-compile-command 'make lock' \
	  -c constraints.txt -o examples/requirements.txt - pyproject.toml --extra ray > /dev/null

clean: ## remove .venv, caches and results
	rm -rf $(VENV) out build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Scripts of these libraries are audited by the long tests.
$(VENV)/.audited: $(VENV)/.installed
	@echo "installing the libraries whose scripts are audited"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --group audited
	@touch $@

# The documentation's site is built with these.
$(VENV)/.documented: $(VENV)/.installed
	@echo "installing what builds the site"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --group docs
	@touch $@

# What builds and checks a release.
$(VENV)/.releasing: $(VENV)/.installed
	@echo "installing what builds a release"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --group release
	@mkdir -p build
	@touch $@

# The audit's page is looked at in a real browser.
browser:
	@command -v $${CHROMIUM:-chromium chromium-browser google-chrome google-chrome-stable} > /dev/null \
	  || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq chromium > /dev/null; } \
	  || { echo "install Chromium (Debian: apt-get install chromium), or say CHROMIUM=/path/to/it" >&2; exit 1; }

# Of what pip says: files of 10 MB and more, and that it unpacks them.
SHOW_LARGE := while read -r word file size unit rest; do case "$$word $$file $$size$$unit" in \
  Downloading\ *\ \([0-9][0-9]*MB*) echo "  $${file\#\#*/} $$size $$unit" ;; \
  Installing\ collected*) echo "  unpacking" ;; esac; done

# The stamp is written last, so an interrupted installation is resumed by the next call.
$(VENV)/.installed: pyproject.toml constraints.txt $(VENV)/bin/python
	@echo "installing into $(VENV): 2.3 GB with a CPU build of torch, some minutes the first time; the large ones:"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(PIP)'
	@$(BIN)/python -m pip install --progress-bar off --disable-pip-version-check -c constraints.txt \
	  -e '.[all]' --group dev | $(SHOW_LARGE)
	@touch $@

$(VENV)/bin/python:
	@for candidate in $(CANDIDATES); do \
	  if "$$candidate" -c '$(SERVES)' 2>/dev/null; then \
	    echo "making $(VENV) with $$("$$candidate" -V) ($$candidate)"; \
	    exec "$$candidate" -m venv $(VENV); \
	  fi; \
	done; \
	echo "No Python 3.11 or newer with the venv module among: $(CANDIDATES)" >&2; \
	echo "Install one (on Debian and Ubuntu also its python3-venv package), or say where it is:" >&2; \
	echo "    make PY=/path/to/python3.12 setup" >&2; \
	exit 1
