# Environment, ahead-of-time build and checks. `make build` then `make test` is all that a fresh machine needs;
# neither needs a GPU. The gpu-* targets and bench run on a machine with one, from prebuilt artifacts.

SM ?= sm_90a
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
GPU_PYTHON ?= $(PYTHON)
BIN := $(VENV)/bin
EVIDENCE := artifacts/evidence/$(SM).json

.PHONY: build test lint lock gpu-test gpu-sanitize bench wheel clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -e '.[build,bench,dev]' $(TORCH)
	touch $@

build: $(VENV)/.installed
	$(BIN)/python build_cutedsl.py build --gpu-arch $(SM)
	$(BIN)/python build_cutedsl.py verify --gpu-arch $(SM)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest tests/unit tests/aot

# After a deliberate change of kernels or tools: the hashes of every SM, to be committed.
lock: $(VENV)/.installed
	$(BIN)/python build_cutedsl.py build --gpu-arch all
	$(BIN)/python build_cutedsl.py lock

gpu-test:
	PYTHONPATH=. $(GPU_PYTHON) -m pytest tests/gpu --evidence $(EVIDENCE)

gpu-sanitize:
	for tool in memcheck racecheck synccheck initcheck; do for script in sanitize sanitize_indexer sanitize_paged; do \
	  PYTHONPATH=. compute-sanitizer --tool $$tool --report-api-errors no --error-exitcode 1 $(GPU_PYTHON) tests/gpu/$$script.py || exit 1; \
	done; done

bench:
	PYTHONPATH=. $(GPU_PYTHON) -m bench.run --all --append bench/results/h200.jsonl
	PYTHONPATH=. $(GPU_PYTHON) -m bench.plot

# The built sets go into the wheel; setuptools takes what is in the package.
wheel: build
	rm -rf qsa_cute/artifacts
	cp -r artifacts qsa_cute/artifacts
	$(BIN)/pip wheel --no-deps --wheel-dir dist . ; status=$$?; rm -rf qsa_cute/artifacts; exit $$status

clean: $(VENV)/.installed
	$(BIN)/python build_cutedsl.py clean
