# Environment, ahead-of-time build and checks. `make build` then `make test` is all that a fresh machine needs;
# neither needs a GPU. The gpu-* targets and bench run on a machine with one, from prebuilt artifacts. SM is one target or
# several: make wheel SM="sm_90a sm_80".

SM ?= sm_90a
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
# The environment's Python where there is one.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(abspath $(BIN)/python),$(PYTHON))
.DEFAULT_GOAL := build
ARCH := $(foreach sm,$(SM),--gpu-arch $(sm))
EVIDENCE := artifacts/evidence/$(firstword $(SM)).json

.PHONY: build test lint lock gpu-test gpu-sanitize gpu-soak bench wheel doctor clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -e '.[build,bench,dev]' $(TORCH)
	touch $@

build: $(VENV)/.installed
	$(BIN)/python build_cutedsl.py build $(ARCH)
	$(BIN)/python build_cutedsl.py verify $(ARCH)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -n 2 tests/unit tests/aot

# After a deliberate change of kernels or tools: the hashes of every SM, to be committed.
lock: $(VENV)/.installed
	$(BIN)/python build_cutedsl.py build --gpu-arch all
	$(BIN)/python build_cutedsl.py lock

gpu-test:
	PYTHONPATH=. $(GPU_PYTHON) -m pytest tests/gpu --evidence $(EVIDENCE)

gpu-sanitize:
	@command -v compute-sanitizer >/dev/null || { \
	  echo "compute-sanitizer is not on the path; it comes with the CUDA toolkit: PATH=/usr/local/cuda/bin:\$$PATH make gpu-sanitize" >&2; exit 1; }
	for tool in memcheck racecheck synccheck initcheck; do for script in sanitize sanitize_indexer sanitize_metrale sanitize_kpool sanitize_paged; do \
	  PYTHONPATH=. compute-sanitizer --tool $$tool --report-api-errors no --error-exitcode 1 $(GPU_PYTHON) tests/gpu/$$script.py || exit 1; \
	done; done

gpu-soak:
	PYTHONPATH=. $(GPU_PYTHON) -m pytest tests/gpu/soak.py tests/gpu/soak_hosts.py

bench:
	PYTHONPATH=. $(GPU_PYTHON) -m bench.run --all --append bench/results/h200.jsonl
	PYTHONPATH=. $(GPU_PYTHON) -m bench.plot
	PYTHONPATH=. $(GPU_PYTHON) -m bench.targets

# dist/qsa_cute-*.whl with the sets of $(SM), for machines that have no compiler.
wheel: build
	$(BIN)/python build_cutedsl.py wheel $(ARCH)

# What this machine has and what each GPU can use; `python -m qsa_cute doctor --check` tries it.
doctor:
	PYTHONPATH=. $(GPU_PYTHON) -m qsa_cute doctor

clean: $(VENV)/.installed
	$(BIN)/python build_cutedsl.py clean
