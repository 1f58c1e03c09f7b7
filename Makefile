# Two commands need nothing but Python 3.11 or newer on the path: `make demo` and `make test`.
# Every target sets up what it needs; the environment is rebuilt when pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV ?= .venv
# torch_npu needs an environment of its own: with it, plain `import torch` fails where there is no Ascend driver.
NPU_VENV ?= .venv-npu
# More of pytest's options, such as PYTEST_ARGS="-k router -n 0".
PYTEST_ARGS ?=
# The field cases live beside the checkout where they are available at all.
CASES ?= ../shared/cases/run_cases.py

BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
NPU_STAMP := $(NPU_VENV)/.ready

# torch would load every installed device plug-in at import; one without its driver breaks `import torch`.
export TORCH_DEVICE_BACKEND_AUTOLOAD := 0
# Models are built from configurations: a hub access in a test or the demo is a mistake.
export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.PHONY: help setup browser demo docs test lint format types unit cases test-npu bench wheel hooks clean

help:
	@echo "make demo    set up, then fuse a Qwen3-MoE model, check it and time it"
	@echo "make test    set up, then lint, types, unit tests and, where available, the field cases"
	@echo "make lint | types | unit | cases    the parts of make test"
	@echo "make test-npu    tests with the real torch_npu, on an emulated CANN runtime; an environment of its own"
	@echo "make browser install Chromium for the tests of the HTML report (Debian, as root)"
	@echo "make docs    the documentation site, in site/"
	@echo "make format | bench | wheel | hooks | clean"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "moefuse needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

setup: $(STAMP)

# Debian's Chromium, for the tests of the HTML report; without it they are skipped, but fail in CI.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null \
	  || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium chromium-driver; }

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# Unit tests last: their closing line is then the last one.
test: lint types cases unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	$(BIN)/python -m pytest --numprocesses auto $(PYTEST_ARGS)

cases: $(STAMP)
	@if [ -f $(CASES) ]; then $(BIN)/python $(CASES) --backend moefuse; \
	else echo "cases: $(CASES) isn't here, skipped"; fi

$(NPU_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m venv $(NPU_VENV)
	$(NPU_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[npu-dev]'
	@touch $@

test-npu: $(NPU_STAMP)
	$(NPU_VENV)/bin/python -m pytest tests/npu $(PYTEST_ARGS)

docs: $(STAMP)
	$(BIN)/python docs/policy_page.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "site/index.html"

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	@set -e; $(BIN)/moefuse bench; $(BIN)/moefuse bench --model; for script in passes.py memory.py overhead.py "capture.py cost"; do \
	  echo "== $$script"; $(BIN)/python benchmarks/$$script; done

wheel: $(STAMP)
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

hooks: $(STAMP)
	$(BIN)/pre-commit install

clean:
	rm -rf build dist out site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
