# One command each; `make demo` and `make test` set up what they need.
#
#   VENV=path    environment to use (default .venv). One that exists already is kept as it is:
#                only what is missing is installed, nothing is pinned, torch is not touched.
#   TORCH=spec   torch to install where there is none (default torch==2.13.0).
#   PYTHON=path  interpreter for a new environment (3.10 to 3.12).

VENV   ?= .venv
TORCH  ?= torch==2.13.0
EXTRAS ?= olmo,megatron,analysis,study,eval,test,dev
WORKERS ?= 2
PYTHON ?= $(shell for p in python3.11 python3.12 python3.10 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1 && echo $$p && break; done)

PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.olmo-lns-setup
# Two workers on two cores: one thread each, or they fight.
PYTEST := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -q

.PHONY: setup demo test test-slow test-gpu lint format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@if [ ! -x $(PY) ]; then \
		if [ -z "$(PYTHON)" ]; then echo "make: no Python 3.10, 3.11 or 3.12 found (ai2-olmo needs numpy<2); install one or set PYTHON=" >&2; exit 1; fi; \
		echo "Creating $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV) && touch $(VENV)/.olmo-lns-owned; fi
	@$(PY) -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' \
		|| $(PY) -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(PY) -m pip install --quiet --disable-pip-version-check \
		$$([ -f $(VENV)/.olmo-lns-owned ] && echo "-c constraints.txt") -e ".[$(EXTRAS)]"
	@touch $@

demo: setup
	$(VENV)/bin/olmo-lns demo $(ARGS)

test: setup
	$(PYTEST) -n $(WORKERS) -m "not slow" $(ARGS)

test-slow: setup
	$(PYTEST) -m slow $(ARGS)

# On a machine with a GPU; elsewhere every one of them is skipped with its reason.
test-gpu: setup
	$(PYTEST) -m gpu $(ARGS)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
