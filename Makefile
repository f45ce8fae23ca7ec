# Two commands on a fresh machine: `make quickstart` and `make test`. Each makes its own .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: quickstart test test-all layouts lint types clean help

help:
	@echo "make quickstart  set up and train a small vision-language model on handwritten digits (a few minutes on 2 cores)"
	@echo "make test        set up and run style, type and unit tests"
	@echo "make test-all    the same with the slow tests: more kills, a longer soak"
	@echo "make layouts     every layout and memory form against one process, as a table"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 12) else "Tessera needs Python 3.11 or 3.12; say make PYTHON=/path/to/it")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

quickstart: $(READY)
	$(BIN)/python recipes/quickstart/run.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

test: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu"

test-all: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not gpu"

layouts: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.dist.layouts

clean:
	rm -rf $(VENV) build runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
