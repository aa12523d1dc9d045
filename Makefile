# Each target makes its own virtual environment when there is none. PYTHON chooses the interpreter.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-fast sweep bench lint types imports check clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(READY)  ## explain and run a small BERT through the whole road
	$(BIN)/python examples/demo.py

test: $(READY) lint types imports  ## everything that CI runs
	$(BIN)/python -m pytest -m 'not sweep and not gpu'

test-fast: $(READY)  ## the tests without real models
	$(BIN)/python -m pytest -m 'not sweep and not gpu and not models' -q

sweep: $(READY)  ## the heavier sweeps
	$(BIN)/python -m pytest -m sweep

bench: $(READY)  ## ratios within one run, on this machine
	$(BIN)/python benchmarks/host_replay.py
	$(BIN)/python benchmarks/compile_time.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

check: lint types imports

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
