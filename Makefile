# Commands of this repository. `make demo` and `make test` install what they need first.
#
#   VENV=path    environment to use (default .venv). If it exists, make installs missing packages only. It pins no version and
#                does not change torch. If it has olmo-lns from another clone, setup stops. REPOINT=1 installs this clone.
#   TORCH=spec   torch to install if it is missing (default torch==2.13.0). On Linux, PyPI's torch is a CUDA build of several
#                GB. A CPU build has some 200 MB: TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
#   PYTHON=path  interpreter for a new environment: Python 3.10 to 3.12 with OLMo, 3.10 or later without.
#   WORKERS=n    processes that run the tests (default 2, for two cores).
#   INSTALLER=pip         install with pip. The default is uv, which is several times faster but does not read pip's configuration,
#                         such as a private index (uv has UV_INDEX_URL). torch is always installed with pip.
#   FRAMEWORK=olmo-core   set up OLMo-core and torchtitan. They cannot be installed beside OLMo, so pass another VENV.
#   FRAMEWORK=no-olmo     set up everything but OLMo, for Python 3.13 and later. Pass another VENV.

VENV   ?= .venv
TORCH  ?= torch==2.13.0
FRAMEWORK   ?=
ifeq ($(FRAMEWORK),olmo-core)
EXTRAS ?= olmo-core,torchtitan,analysis,sft,test
PINS   := constraints-olmo-core.txt
PYTHONS := python3.11 python3.12 python3.13 python3.14 python3.10 python3
else ifeq ($(FRAMEWORK),no-olmo)
EXTRAS ?= megatron,analysis,study,eval,vision,test
PINS   := constraints-olmo-core.txt
PYTHONS := python3.14 python3.13 python3 python3.12 python3.11
else
EXTRAS ?= olmo,megatron,analysis,study,eval,test,dev
PINS   := constraints.txt
# ai2-olmo needs numpy<2, which has no wheel for Python 3.13.
PYTHONS := python3.11 python3.12 python3.10
endif
DOCS_VENV ?= .venv-docs
OLMO_CORE_VENV ?= .venv-olmo-core
NO_OLMO_VENV ?= .venv-no-olmo
WORKERS ?= 2
PYTHON ?= $(shell for p in $(PYTHONS); do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 && echo $$p && break; done)

PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.olmo-lns-setup
# pip does not compile the installed files (--no-compile), because most of the 20,000 files are never imported. Python compiles a
# file when it is first imported, and saves the result. With PYTHONDONTWRITEBYTECODE it would not save the result, and every test
# process would compile torch and OLMo again (docs/decisions.md).
unexport PYTHONDONTWRITEBYTECODE
PIP    := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile
INSTALLER ?= uv
ifeq ($(INSTALLER),uv)
INSTALL := $(PY) -m uv pip install --quiet --python $(PY)
else
INSTALL := $(PIP)
endif
# Each worker has one thread, because two workers with two threads each compete for two cores. A worker starts with half of the
# tests in their order, so that most files build their models once.
PYTEST := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -q
# Slow tests share launches within a file, so a file stays on one worker. tests/conftest.py puts files with slow tests first.
BY_FILE := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: FORCE check-origin release-check docs wheel setup setup-olmo-core demo test test-quick test-slow test-all test-exhaustive test-olmo-core test-torchtitan test-no-olmo test-gpu lint format clean

setup: check-origin $(STAMP)

# Prints the folder from which olmo-lns was installed, or nothing if it is not installed.
ORIGIN := import importlib.metadata as m, json; d = m.distribution("olmo-lns").read_text("direct_url.json"); \
	print(json.loads(d)["url"].replace("file://", "") if d else "a package index")

# An environment that another clone has installed would run that clone's code.
check-origin:
	@from=$$($(PY) -c '$(ORIGIN)' 2>/dev/null); if [ -n "$$from" ] && [ "$$from" != "$(CURDIR)" ] && [ "$$from" != "$(realpath .)" ] && [ -z "$(REPOINT)" ]; then \
		echo "make: $(VENV) has olmo-lns from $$from. This clone is $(CURDIR). Give another VENV=path, or REPOINT=1 to install" \
			"this clone instead." >&2; exit 1; fi

FORCE:

# The .pth file is the one file of the package that an editable installation copies.
$(STAMP): pyproject.toml $(PINS) olmo_lns/integrations/olmo_lns_autoload.pth $(if $(REPOINT),FORCE) | check-origin
	@if [ ! -x $(PY) ]; then \
		if [ -z "$(PYTHON)" ]; then echo "make: none of $(PYTHONS) was found. Install one of them, or set PYTHON=path." >&2; exit 1; fi; \
		echo "Creating $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV) && touch $(VENV)/.olmo-lns-owned; fi
	@$(PY) -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' \
		|| { echo "Installing $(TORCH) into $(VENV): some 200 MB for a CPU build, several GB for CUDA"; \
		$(PIP) $(foreach word,$(TORCH),"$(word)"); }
	@echo "Installing olmo-lns from this clone (editable) with its extras $(EXTRAS) into $(VENV) with $(INSTALLER). The first time this takes a minute or more and prints nothing."
	@$(if $(filter uv,$(INSTALLER)),$(PIP) uv)
	@$(INSTALL) \
		$$([ -f $(VENV)/.olmo-lns-owned ] && echo "-c $(PINS)") -e ".[$(EXTRAS)]"
	@touch $@
	@echo "$(VENV) is ready: $(VENV)/bin/olmo-lns --help"

# dist/olmo_lns-VERSION-py3-none-any.whl, to be installed into any environment.
wheel:
	$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls dist/*.whl

demo: setup
	$(VENV)/bin/olmo-lns demo $(ARGS)

test: setup
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "not slow and not gpu" $(ARGS)

# About a minute: the formula, the norms, the saved scheme, and OLMo's models.
QUICK := tests/schemes/test_factor.py tests/norm/test_values.py tests/integrations/olmo/test_checkpoint.py \
	tests/integrations/olmo/test_model.py tests/integrations/olmo/test_initialization.py
SETUP ?= setup
test-quick: $(SETUP)
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "not slow and not gpu" $(QUICK) $(ARGS)

test-slow: setup
	$(PYTEST) $(BY_FILE) -m "slow and not exhaustive and not gpu" $(ARGS)

# `test` and `test-slow` in one run, so that each worker imports the frameworks once.
test-all: setup
	$(PYTEST) $(BY_FILE) -m "not exhaustive and not gpu" $(ARGS)

# Tests that repeat the claims of other tests in more layouts. Run them before a release. The public host runs them once a week.
test-exhaustive: setup
	$(PYTEST) $(BY_FILE) -m "exhaustive and not gpu" $(ARGS)

# The tests of the OLMo-core integration, in a separate environment. MARK="slow or not slow" runs all of them. The tests that
# need TRL or PEFT run here, too, because TRL needs datasets>=4 and OLMo datasets<4. They have the mark trl; `make test` runs
# the others of their files.
MARK ?= not slow or trl
CORE_WORKERS ?= $(WORKERS)
setup-olmo-core:
	$(MAKE) setup FRAMEWORK=olmo-core VENV=$(OLMO_CORE_VENV)

test-olmo-core: setup-olmo-core
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(OLMO_CORE_VENV)/bin/python -m pytest -q -n $(CORE_WORKERS) --dist worksteal -m "$(MARK)" -k "olmo_core or trl" \
		tests/recipes tests/integrations/transformers/test_training.py tests/integrations/transformers/test_names.py \
		tests/integrations/transformers/test_refusals.py tests/integrations/transformers/test_stock.py tests/integrations/olmo_core tests/export/test_olmo_core.py $(ARGS)

# The tests that do not need OLMo, on the newest Python: make test-no-olmo PYTHON=python3.13
test-no-olmo:
	$(MAKE) setup FRAMEWORK=no-olmo VENV=$(NO_OLMO_VENV)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(NO_OLMO_VENV)/bin/python -m pytest -q -n $(WORKERS) --dist worksteal \
		-m "not slow and not gpu" $(ARGS)

# torchtitan, in OLMo-core's environment. TORCHTITAN_SRC=path tests a checkout and installs what it requires.
TORCHTITAN := $(abspath $(TORCHTITAN_SRC))
test-torchtitan: setup-olmo-core
	$(if $(TORCHTITAN),$(OLMO_CORE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $(TORCHTITAN)/requirements.txt)
	PYTHONPATH=$(TORCHTITAN) TORCHTITAN_SRC=$(TORCHTITAN) OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(OLMO_CORE_VENV)/bin/python \
		-m pytest -q -n $(CORE_WORKERS) --dist loadfile -m "$(MARK)" tests/integrations/torchtitan $(ARGS)

# The tests that need a GPU. Without a GPU they are skipped with the reason.
test-gpu: $(SETUP)
	$(PYTEST) -m gpu $(ARGS)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# Build the wheel, check its files, install it into bare environments and use it there.
release-check: setup
	PY=$(PY) bash scripts/release_check.sh

# Build the documentation site in build/site, in a separate environment. A broken link is an error.
docs:
	@[ -x $(DOCS_VENV)/bin/mkdocs ] || { echo "Installing mkdocs into $(DOCS_VENV)"; $(PYTHON) -m venv $(DOCS_VENV) && \
		$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		"mkdocs-material>=9.5,<10" "mkdocstrings[python]>=0.26,<2"; }
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet && echo "build/site/index.html"

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
