# Every target sets up what it needs: a virtual environment in .venv, installed anew
# only when pyproject.toml has changed.

PYTHON ?= python3
WORKERS ?= 2

BIN := .venv/bin
INSTALLED := .venv/.installed

export TF_CPP_MIN_LOG_LEVEL ?= 2

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow test-all fuzz bench bench-codec bench-peers bench-on-device wheel lint format clean

help:
	@echo "make demo      train a small network stock and compressed, compare, plot (minutes)"
	@echo "make test      the tests, without the slow ones"
	@echo "make test-all  all tests"
	@echo "make fuzz      the native kernels under sanitizers, for ten minutes"
	@echo "make bench     measure VGG16, ResNet50, MobileNetV2, DenseNet121; update README.md"
	@echo "make bench-codec  throughput of the codec against copies; update docs/codec.png"
	@echo "make bench-on-device  training files in LiteRT; update docs/on-device.md"
	@echo "make bench-peers  every way of training in less memory; update docs/benchmarks.md (hours)"
	@echo "make wheel     a wheel with the native kernels compiled for this platform, in dist/"
	@echo "make lint      ruff check and ruff format --check"
	@echo "make format    let ruff repair what it can"
	@echo "make clean     remove .venv, caches and out/"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' must be Python 3.10 or newer (found:" \
	    "$$($(PYTHON) --version 2>/dev/null || echo none))." \
	    "Choose another with: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' comes without the venv module." \
	    "On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@# One broken off half-way has no pip: start over.
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -e '.[dev]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/python -m examples.demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow" $(PYTEST_ARGS)

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) -m slow $(PYTEST_ARGS)

test-all: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

fuzz: $(INSTALLED)
	@seed=$${BITTRAIN_FUZZ_SEED:-$$(date +%s)}; echo "seed $$seed"; \
	BITTRAIN_FUZZ_SECONDS=$${BITTRAIN_FUZZ_SECONDS:-600} BITTRAIN_FUZZ_SEED=$$seed \
	  $(BIN)/python -m pytest -s tests/test_native_fuzz.py -k sanitizers

bench-codec: $(INSTALLED)
	$(BIN)/python -m benchmarks.codec --output docs/codec.png --overwrite

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.models

bench-on-device: $(INSTALLED)
	$(BIN)/python -m benchmarks.on_device

bench-peers: $(INSTALLED)
	$(BIN)/python -m benchmarks.peers

wheel: $(INSTALLED)
	$(BIN)/python -m pip wheel --disable-pip-version-check --quiet \
	  --no-build-isolation --no-deps --wheel-dir dist .
	@ls dist/*.whl

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .pytest_cache .ruff_cache out build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
