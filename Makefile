# `make demo` and `make test` need Python 3.11+, Rust, g++ and make, and do the rest themselves.
# Everything Python lives in .venv at the root; stamps in it remember what is installed and built, so that
# a second run starts at once. `make help` lists the targets.

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
RANKS ?= 4
PYTEST ?=

VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
PY := $(BIN)/python
STAMPS := $(VENV)/.stamps
# Dependencies are installed anew when pyproject.toml changes; pip leaves alone what still fits.
DEPENDENCIES := $(shell cksum < pyproject.toml | cut -d ' ' -f 1)
DEV := $(STAMPS)/dev-$(DEPENDENCIES)
BENCH := $(STAMPS)/bench-$(DEPENDENCIES)
GPU_CHECK := $(STAMPS)/gpu-check-$(DEPENDENCIES)
BUILD := $(STAMPS)/build
WHEEL := dist/.built

RUST := Cargo.toml Cargo.lock $(shell find rust -name '*.rs' -o -name Cargo.toml) $(wildcard kernels/ptx/*.ptx)
PYTHON_SOURCES := $(shell find python/offbeat -name '*.py' -o -name '*.pyi' -o -name py.typed)
PYTHON_DIRS := $(wildcard python tests/python tests/gpu kernels examples benches)

# One interpreter for pyo3 in every build, or cargo and maturin would rebuild it in turns.
export PYO3_PYTHON := $(BIN)/python
# Torch's processes share few cores in tests and demo; more threads only fight.
export OMP_NUM_THREADS ?= 1

.PHONY: help ## show this list
help:
	@awk -F '## ' '/^\.PHONY: .*## / { sub(/\.PHONY: /, "", $$1); printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo ## trains a network on local ranks, beside torch's DDP: picture and traces in out/ (RANKS=4)
demo: build
	@$(PY) -m torch.distributed.run --standalone --nproc-per-node $(RANKS) examples/demo.py

.PHONY: test ## every test: Rust, Python
test: test-rust test-python

# Debug assertions and overflow checks are on in this profile, and it is optimized enough for the matrix of collectives.
# The extension module has no tests of its own, and would want a libpython to link to.
.PHONY: test-rust ## unit, property, loom and N-ranks-as-threads tests
test-rust: $(DEV)
	cargo test --workspace --exclude offbeat-python

.PHONY: test-python ## real processes under torchrun, and the wheel (PYTEST="-k name -x")
test-python: build wheel $(GPU_CHECK)
	$(PY) -m pytest $(PYTEST)

.PHONY: test-kernels ## the kernels for GPUs, without one: on the CPU, as PTX, faulty ones (minutes)
test-kernels: build $(GPU_CHECK)
	$(PY) -m pytest tests/python/single/test_kernels.py $(PYTEST)

.PHONY: kernels ## compile kernels/*.cu to the PTX that is embedded, and count what they cost
kernels: $(DEV) $(GPU_CHECK)
	$(PY) kernels/compile.py

.PHONY: gpu-check ## for whoever has a GPU: kernels, collectives and training on it, as one report to paste
gpu-check: build
	$(PY) -m benches.gpu_check

.PHONY: bench ## ours, gloo and OpenMPI in one run: table and plot in out/
bench: build $(BENCH)
	$(PY) -m benches.compare --update

.PHONY: convergence ## every algorithm on two real tasks, beside torch's DDP: table and plot in out/ (minutes)
convergence: build
	$(PY) -m benches.convergence --update

.PHONY: bench-rust ## criterion micro-benches
bench-rust:
	cargo bench --package offbeat-benches

.PHONY: lint ## what CI checks: rustfmt, clippy, ruff, mypy, stubs
lint: lint-rust lint-python

.PHONY: lint-rust ## rustfmt and clippy
lint-rust: $(DEV)
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings

.PHONY: lint-python ## ruff, mypy, and the stub against the module it describes
lint-python: build
	$(PY) -m ruff check $(PYTHON_DIRS)
	$(PY) -m ruff format --check $(PYTHON_DIRS)
	$(PY) -m mypy
	cd python && $(PY) -m mypy.stubtest offbeat._core --mypy-config-file ../pyproject.toml

.PHONY: format ## rewrite the sources in the house's style
format: $(DEV)
	cargo fmt --all
	$(PY) -m ruff check --fix $(PYTHON_DIRS)
	$(PY) -m ruff format $(PYTHON_DIRS)

.PHONY: build ## the extension module, in release, into .venv
build: $(BUILD)

.PHONY: wheel ## one abi3 wheel in dist/, for any Linux since glibc 2.17
wheel: $(WHEEL)

.PHONY: docs ## the Rust crates' documentation, in target/doc
docs: $(DEV)
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --document-private-items

.PHONY: clean ## remove what was built; .venv stays
clean:
	rm -rf dist out target python/offbeat/_core*.so $(BUILD)
	find python tests examples benches -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Offbeat needs Python 3.11 or later: try make PYTHON=python3.12")'
	@command -v cargo > /dev/null || { echo "Offbeat needs a Rust toolchain: see https://rustup.rs"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# pip cannot install the dependencies of a project without the project, so they are read from pyproject.toml here.
# A rule for each: one pattern rule with three targets would count all three as made when one is.
define install
	@echo "installing torch and the packages of '$(1)' into .venv (the first time takes a while)"
	@$(PY) -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	    print(*p["dependencies"], *p["optional-dependencies"]["$(1)"], sep="\n")' > $(VENV)/requirements.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --requirement $(VENV)/requirements.txt
	@mkdir -p $(STAMPS) && rm -f $(STAMPS)/$(1)-* && touch $@
endef
$(DEV): | $(BIN)/python
	$(call install,dev)
$(BENCH): | $(BIN)/python
	$(call install,bench)
$(GPU_CHECK): | $(BIN)/python
	$(call install,gpu-check)

# Editable: Python sources are used where they stand, and only a change in Rust needs a build.
$(BUILD): $(RUST) $(DEV) $(if $(wildcard python/offbeat/_core*.so),,missing-module)
	VIRTUAL_ENV=$(VENV) $(PY) -m maturin develop --release
	@touch $@

.PHONY: missing-module
missing-module:

# zig links against glibc 2.17 (manylinux2014), the oldest that Rust's standard library supports; maturin then
# checks the symbols and libraries against that policy. Flags for this machine's processor must not get in.
ifeq ($(shell uname),Linux)
PORTABLE := --zig --compatibility manylinux2014
endif
$(WHEEL): $(RUST) $(PYTHON_SOURCES) README.md LICENSE $(DEV)
	rm -rf dist
	VIRTUAL_ENV=$(VENV) PATH="$(BIN):$$PATH" RUSTFLAGS= $(PY) -m maturin build --release $(PORTABLE) --target-dir target/wheel --out dist
	@touch $@

Cargo.lock:
	cargo generate-lockfile
