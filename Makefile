# Every target sets up its own environment in .venv and needs nothing else but Python >= 3.11.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-network check format bench package clean

demo: $(STAMP)
	$(BIN)/fedvit compare local fedavg fedper fedperfix

test: $(STAMP)
	$(BIN)/pytest -n auto --ignore tests/network

test-network: $(STAMP)
	timeout 3000 $(BIN)/pytest -rR tests/network

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n auto --ignore tests/network

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python -m benchmarks

package: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --no-isolation

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
