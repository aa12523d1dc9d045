# Each target makes its own virtual environment when there is none. PYTHON chooses the interpreter.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Releases of torch that `make test-versions` runs the contract on, each in an environment of its own (several GB) in VERSIONS.
TORCH ?= 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
VERSIONS ?= $(VENV)-versions
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Pythons, with their headers, that `make wheels` builds for.
PYTHONS ?= python3.10 python3.11 python3.12 python3.13 python3.14
# What PyGraph needs of torch: its graphs, its scheduler, its dispatcher, its allocator's interface, and whole programs.
CONTRACT := tests/test_compat.py tests/test_backend.py tests/test_programs.py tests/frontend tests/inductor tests/runtime/host \
	tests/runtime/test_region.py tests/runtime/cuda/test_build.py tests/training/test_step.py tests/training/test_standins.py \
	tests/property/test_placed_programs.py tests/property/test_region_replays.py

# Inductor compiles kernels without vector instructions in two thirds of the time, and a replay calls them in the same way.
# `make test-all` has them with. The two do not share a cache of Inductor's: its key does not tell them apart.
SCALAR := ATEN_CPU_CAPABILITY=default TORCHINDUCTOR_CACHE_DIR=$(or $(TMPDIR),/tmp)/torchinductor-scalar

.DEFAULT_GOAL := help
.PHONY: help demo test pytest test-fast test-all test-versions $(TORCH) test-clients test-gpu test-multi-gpu \
	bench bench-gpu results docs operators wheels wheels-check sanitize fuzz mutants locked requirements lint \
	types imports check clean

help:  ## this list
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

locked:  ## the environment by .ci/requirements.txt, whose packages are known by hash, on Python 3.11 (hosted CI)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes --extra-index-url $(TORCH_INDEX) --requirement .ci/requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(READY)

requirements: $(READY)  ## .ci/requirements.txt from pyproject.toml and constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt pip-tools
	$(BIN)/pip-compile --quiet --no-header --generate-hashes --allow-unsafe --strip-extras --no-emit-find-links --no-emit-index-url \
		--extra-index-url $(TORCH_INDEX) --extra dev --extra docs --constraint constraints.txt --output-file .ci/requirements.txt pyproject.toml

docs: $(READY)  ## the site of docs/, README and the API, in site/; broken links are errors
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/mkdocs build --strict

demo: $(READY)  ## explain a small BERT, check it against eager, time it: a minute
	$(BIN)/python examples/demo.py

test: $(READY)  ## what CI runs, lint and types too: about 6 minutes on two idle cores
	$(MAKE) --jobs 2 check pytest

pytest: $(READY)  ## the tests alone
	$(SCALAR) $(BIN)/python -m pytest -m 'not gpu and not sweep and not clients' --ignore tests/gpu -n 2 --dist loadfile --no-loadscope-reorder

test-fast: $(READY)  ## the tests without real models
	$(SCALAR) $(BIN)/python -m pytest -m 'not gpu and not models and not sweep and not clients' -q

test-all: test  ## the same, and what takes long: every workload of the suite, more real models, errors at every line of a capture
	$(BIN)/python -m pytest -m 'sweep and not gpu' -n 2 --dist loadfile

test-versions: $(TORCH)  ## the contract tests on each release of torch in TORCH

$(TORCH): %: $(VERSIONS)/%/.ready
	$(VERSIONS)/$@/bin/python -m pytest -q -m 'not gpu and not models and not sweep' -n 2 --dist loadfile $(CONTRACT)

$(VERSIONS)/%/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	sed -E '/^(torch|nvidia-|cuda-)/d' constraints.txt > $(@D)/constraints.txt  # each release has CUDA libraries of its own
	$(@D)/bin/python -m pip install --quiet --constraint $(@D)/constraints.txt torch==$* --editable '.[dev]'
	touch $@

test-clients: $(READY)  ## programs of transformers, diffusers, Lightning, accelerate, peft and torchao, on the CPU
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[clients]'
	$(BIN)/python -m pytest -m clients

test-gpu: $(READY)  ## the driver contract, programs and a wide sweep of models, on a CUDA device
	$(BIN)/python -m pip install --quiet --constraint constraints.txt timm torchvision
	$(BIN)/python -m pytest -m gpu

test-multi-gpu: $(READY)  ## programs of several processes, on as many CUDA devices as there are; NVLink multicast stays off
	NCCL_NVLS_ENABLE=0 $(BIN)/python -m pytest -m gpu tests/gpu/test_ranks.py

operators: $(READY)  ## the table of torch's operators that graphs are verified by
	$(BIN)/python -W ignore tools/operators.py

wheels: $(READY)  ## the source distribution and a wheel for each Python in PYTHONS, in dist/: native halves for each release in TORCH
	$(BIN)/python tools/wheels.py $(TORCH:%=--torch %) $(PYTHONS:%=--python %)

wheels-check: $(READY)  ## install each wheel beside each release that it is for, without a compiler, and replay on the host driver
	$(BIN)/python tools/check_wheels.py $(PYTHONS:%=--python %) dist

sanitize: $(READY)  ## tests of the native halves, compiled with the sanitizers of addresses and of undefined behaviour
	CXX=$(CURDIR)/tools/sanitized-c++ TORCHINDUCTOR_CACHE_DIR=$(or $(TMPDIR),/tmp)/torchinductor-sanitized ATEN_CPU_CAPABILITY=default \
		LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so) $$(c++ -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
		$(BIN)/python -m pytest -q -m 'not gpu and not sweep' tests/runtime/host tests/graph/test_reading.py tests/graph/test_loop.py tests/property/test_eager_programs.py

fuzz: $(READY)  ## texts of graphs and of launch programs, mutated: each is read back, or refused by a ParseError
	$(BIN)/python tools/fuzz.py $(FUZZ)

mutants: $(READY)  ## guards made false, one at a time: the tests of each must fail
	$(SCALAR) $(BIN)/python tools/mutants.py

bench: $(READY)  ## the suite in small, and the compiler, as ratios within one run
	$(BIN)/python -m benchmarks --sides default,pygraph --out bench-results
	$(BIN)/python benchmarks/compile_time.py
	$(BIN)/python benchmarks/warm_start.py

bench-gpu: $(READY)  ## the suite, side by side with eager, Inductor's modes and CUDA graphs by hand, on a CUDA device
	$(BIN)/python -m pip install --quiet --constraint constraints.txt timm torchvision
	$(BIN)/python -m benchmarks --out bench-results
	$(BIN)/python benchmarks/new_sizes.py --out bench-results/new-sizes.json
	$(BIN)/python benchmarks/replay_time.py --out bench-results/replay-time.json
	$(BIN)/python benchmarks/warm_start.py --device cuda --out bench-results/warm-start.json
	$(BIN)/python benchmarks/sizes.py --device cuda --out bench-results/sizes.json

results: $(READY)  ## docs/results.md, docs/timeline.svg and the README's table, from benchmarks/results
	$(BIN)/python -m benchmarks.page

lint: $(READY)  ## style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## mypy, strict
	$(BIN)/mypy

imports: $(READY)  ## the contract of who may import whom
	$(BIN)/lint-imports

check: lint types imports  ## all three

clean:  ## remove environments, builds and caches
	rm -rf $(VENV) $(VERSIONS) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
