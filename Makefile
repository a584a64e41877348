# One environment for both engines, the demo and the tests. On a machine without a GPU, point pip at PyTorch's CPU
# wheels first (for instance with PIP_EXTRA_INDEX_URL), or torch arrives with several GB of CUDA libraries.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SGLANG := .sglang
DEMO ?= probe-demo
TESTERS ?= 2

.PHONY: setup sglang demo test fast lint browser matrix faults healthy clean

setup: $(READY)

$(READY): constraints.txt setup.cfg setup.py hooks/start.pth pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "make setup needs Python 3.11 or newer (PYTHON=...)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch setuptools
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --requirement constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(READY)

# SGLang for its tests, over the environment and not in it: it pins older transformers. Some 100 MB; what it cannot have
# on a CPU (kernels, triton) tests/sglang_cpu stands in for.
sglang: $(SGLANG)/.ready

$(SGLANG)/.ready: $(READY) tests/sglang_cpu/requirements.txt
	rm -rf $(SGLANG)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-compile --target $(SGLANG) --requirement tests/sglang_cpu/requirements.txt
	touch $@

# The whole loop: make the small model, dump a rollout and an actor, compare, write the reports.
demo: setup
	$(BIN)/probe demo -o $(DEMO) --force

# Everything: style, types, every test (the slow ones start real engines and a browser), in two processes by default.
test: setup sglang browser lint
	$(BIN)/python -m pytest -m "slow or not slow" --numprocesses $(TESTERS) --dist loadfile

fast: setup
	$(BIN)/python -m pytest --numprocesses $(TESTERS) --dist loadfile

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Tests open the HTML report in a headless Chromium.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null || { \
	  echo "installing chromium (needed by the browser tests)"; \
	  SUDO=$$( [ "$$(id -u)" = 0 ] || echo sudo ); \
	  $$SUDO apt-get update -qq && $$SUDO apt-get install -y -qq chromium >/dev/null; }

# Every rollout setting against every actor setting on real engines, some 10 minutes; make test runs a part of it.
matrix: setup
	rm -rf probe-matrix
	$(BIN)/python tests/matrix.py probe-matrix --write docs/matrix.md

# Every fault of tests/faults at every place, in both dtypes, some 10 minutes; make test runs each of them once.
faults: setup
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m faults --jobs 2 --write docs/faults.md

# Every healthy pair of every model of tests/healthy.py, some 15 minutes; make test runs each model and each pair once.
healthy: setup
	OMP_NUM_THREADS=1 $(BIN)/python tests/healthy.py probe-healthy

clean:
	rm -rf $(VENV) $(SGLANG) $(DEMO) probe-matrix probe-healthy .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
