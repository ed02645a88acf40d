# Every target sets up its own environment in .venv and needs nothing else but Python >= 3.11.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := .venv-extras

.PHONY: demo test test-other-processor test-network test-extras lint check format docs bench fuzz package clean

demo: $(STAMP)
	$(BIN)/fedvit compare local fedavg fedper fedperfix

test: $(STAMP)
	$(BIN)/pytest -n auto --ignore tests/network

test-network: $(STAMP)
	timeout 3000 $(BIN)/pytest -n auto -rR tests/network

# Packages too heavy for .venv, or at odds with it, are tried in an environment of their own, on top of .venv's packages.
test-extras: $(EXTRAS)/.installed
	$(EXTRAS)/bin/python -m pytest tests/extras

$(EXTRAS)/.installed: $(STAMP)
	$(PYTHON) -m venv --clear $(EXTRAS)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	  > $$($(EXTRAS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth
	$(EXTRAS)/bin/pip install --quiet --disable-pip-version-check --editable ".[mlflow,wandb]"
	touch $@

# Other instructions round differently, as other processors do: what must hold up to rounding is tried with them too.
test-other-processor: $(STAMP)
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 $(BIN)/pytest -n auto tests/identities tests/parity

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

check: lint test

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python -m benchmarks

# A million changed messages and files for every decoder: hours.
fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz

package: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --no-isolation

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(EXTRAS) build dist site .mypy_cache .ruff_cache .pytest_cache
