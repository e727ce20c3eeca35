# Every target sets up what it needs in .venv; nothing has to be installed first but Python >= 3.11.
#   make PYTHON=/path/to/python3.12 demo    another Python
#   make test JOBS=4 ARGS="-k split -x"     more processes, pytest's own options

VENV := .venv
CONSTRAINTS := constraints.txt
# The newest PyTorch that is supported, and the Triton that it asks for.
NEWEST := .venv-newest
NEWEST_TORCH := 2.15.0
NEWEST_TRITON := 3.9.0
RUN := $(VENV)/bin/python
# --no-compile: byte code is made on first import, and only for what is imported; half a minute less. So it must be
# kept, whatever the environment says (many container images forbid it): else each process compiles torch again, 6 s.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(RUN) -m pip install -qq --no-compile --no-input --disable-pip-version-check -c $(CONSTRAINTS)
CODE := README.md $(wildcard mla_compile tests examples benchmarks docs stress)
JOBS ?= 2
ARGS ?=

NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p $(NEW_ENOUGH) && { echo $$p; break; }; done)

# Neighbouring tests stay in one process, so they share what their file compiled; an idle process takes over some.
PYTEST := $(RUN) -m pytest -q -n $(JOBS) --dist worksteal

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test test-long test-gpu test-newest test-server test-parallel test-ray load test-all matrix lint format \
	docs audit release-check hooks clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/.runtime ## generate text with the shipped model, with and without speculation
	@$(VENV)/bin/mla-compile demo $(ARGS)

test: $(VENV)/.dev ## run the quick tests that need no GPU, less than five minutes
	@$(PYTEST) -m "not gpu and not slow and not long" --ignore=tests/serving --ignore=tests/parallel $(ARGS)

test-long: $(VENV)/.dev ## run those of them that take a second or more, with all that Inductor compiles
	@$(PYTEST) -m "long and not gpu and not slow" --ignore=tests/serving --ignore=tests/parallel $(ARGS)

test-gpu: $(VENV)/.dev ## run the tests that need a GPU, spread over all GPUs (JOBS=8 for each), then those that need two
	@$(PYTEST) -p tests.gpu_spread -m gpu --ignore=tests/serving --ignore=tests/test_gpu_parallel.py $(ARGS)
	@$(RUN) -m pytest -q tests/test_gpu_parallel.py

test-newest: $(NEWEST)/constraints.txt ## run `make test` with the newest PyTorch, installed apart (its build is 5.5 GB)
	@$(MAKE) --no-print-directory VENV=$(NEWEST) CONSTRAINTS=$< test

test-server: $(VENV)/.dev ## run the tests of the server, with real processes and a browser
	@$(PYTEST) -m "not slow and not load" tests/serving $(ARGS)

load: $(VENV)/.dev ## serve 200 streams for a minute, and 2,000 malformed requests: ARGS="-k streams", LOAD_SECONDS=300
	@$(PYTEST) -m load tests/serving $(ARGS)

# Three at a time, as many of them wait for processes that end late.
test-parallel: $(VENV)/.dev ## run the tests of processes that share a model
	@$(RUN) -m pytest -q -n 3 --dist worksteal -m "not slow" tests/parallel $(ARGS)

test-ray: $(VENV)/.ray ## run the tests of replicas and of Ray Data, with Ray (its packages are 400 MB)
	@$(RUN) -m pytest -q -m "not slow" tests/integrations/ray $(ARGS)

test-all: $(VENV)/.dev ## run every test that this machine can run
	@$(PYTEST) $(ARGS)

matrix: $(VENV)/.created ## run a few tests with each Python, torch and transformers, each installed apart: ARGS="--torch 2.13.0"
	@$(RUN) -m tests.matrix $(ARGS)

lint: $(VENV)/.dev ## check style and types (ruff, mypy --strict)
	@$(RUN) -m ruff check $(CODE)
	@$(RUN) -m ruff format --check $(CODE)
	@$(RUN) -m mypy

format: $(VENV)/.dev ## rewrite the code to the project's style
	@$(RUN) -m ruff check --fix --exit-zero $(CODE)
	@$(RUN) -m ruff format $(CODE)

docs: $(VENV)/.docs ## build the documentation in site/, every warning an error; nothing is downloaded for it
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict $(ARGS)
	@echo "open site/index.html"

# Not in .ci/run: it asks the advisory service of PyPI, which CI cannot reach.
audit: $(VENV)/.release ## look for known vulnerabilities of the pinned versions and of all that is installed (network)
	@$(RUN) -m pip_audit --requirement $(CONSTRAINTS) --no-deps --disable-pip $(ARGS)
	@$(RUN) -m pip_audit --skip-editable $(ARGS)

release-check: $(VENV)/.release ## build the wheel and the sdist, and run the demo from each in a new environment, offline
	@$(RUN) -m tests.release

hooks: $(VENV)/.dev ## check each commit with pre-commit from now on
	@$(RUN) -m pre_commit install

clean: ## delete the environment and everything else that can be made again
	rm -rf $(VENV) $(NEWEST) .venv-matrix build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- the environment: empty files in .venv say what is installed, so that a second call is instant

$(VENV)/.created:
	@"$(PYTHON)" $(NEW_ENOUGH) || { echo "mla-compile needs Python 3.11 or newer: install one," \
		"or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(RUN) || "$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); \
		echo "'$(PYTHON) -m venv' failed (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@touch $@

$(NEWEST)/constraints.txt: constraints.txt Makefile
	@mkdir -p $(@D)
	@sed 's/^torch==.*/torch==$(NEWEST_TORCH)/; s/^triton==.*/triton==$(NEWEST_TRITON)/' $< >$@

# PyTorch alone and first, at its pinned version: left to the other packages, pip would take the newest build.
$(VENV)/.torch: $(CONSTRAINTS) | $(VENV)/.created
	@echo "installing PyTorch in $(VENV): half a minute, or a few minutes where pip brings the CUDA build ..."
	@$(PIP) torch
	@touch $@

$(VENV)/.runtime: pyproject.toml $(VENV)/.torch
	@echo "installing mla-compile and what it needs: half a minute ..."
	@$(PIP) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	@echo "installing mla-compile with its test and lint tools: half a minute ..."
	@$(PIP) -e '.[dev]'
	@$(PIP) --no-deps speculators # its heads are a reference; what it depends on trains them
	@touch $(VENV)/.runtime $@

$(VENV)/.release: pyproject.toml $(VENV)/.runtime
	@echo "installing what builds and audits a release: a quarter of a minute ..."
	@$(PIP) -e '.[release]'
	@touch $@

$(VENV)/.ray: pyproject.toml $(VENV)/.dev
	@echo "installing Ray: a minute ..."
	@$(PIP) -e '.[ray]'
	@touch $@

# The sources are read, not imported: pages need neither PyTorch nor this package installed, only what the extra names.
DOCS := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])
$(VENV)/.docs: pyproject.toml $(CONSTRAINTS) | $(VENV)/.created
	@echo "installing what builds the documentation in $(VENV): a quarter of a minute ..."
	@$(PIP) $$($(RUN) -c '$(DOCS)')
	@touch $@
