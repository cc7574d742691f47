# `make train` trains the quickstart. `make test` runs every check; of tests with many slow cases it runs some, which
# SAMPLE=NUMBER chooses, and all with ALL=1. `make matrix` runs every combination of what the tests have a selection of
# (with ONE_IN=20 a twentieth of them, which SAMPLE chooses), `make extras` what needs other people's packages (torch,
# lm-eval, datasets, s3fs, W&B...),
# `make chaos` runs long sequences of failures, kills runs of one process at 230 places and launched ones at 80, and
# compares them with ones that nobody disturbed.
# `make newest` runs a part of the tests on the newest JAX that installs, in a .venv-newest, so that what a release
# breaks is seen the day it comes.
# `make oldest` runs a part of them on the lowest versions that pyproject.toml allows, in a .venv-oldest. Of both
# ONE_IN=2 runs half, which SAMPLE chooses.
# `make parsers` measures which lines of each parser its tests reach, and whether they find bugs planted in it.
# `make docs` draws the pages of docs/ that follow from the code; `make site` builds docs/ as a site into build/site.
# `make audit` compares the lock with known vulnerabilities, where a service that lists them is reachable.
# `make packaging` installs the wheel into empty environments on two versions of Python, and does there what a new user
# does; `make release VERSION=X.Y.Z` sets the version, builds and checks what is uploaded.
# The others make .venv and install into it. With EXTRAS=test,plan-gpu,plan-tpu `make test` also holds what is compiled
# for absent GPUs with cuDNN and for absent TPUs to its figures: 2.3 GB more on the disk.
# The locked versions are tested on 3.11; else the newest supported interpreter that is there and runs (a shim may not).
SUPPORTED := python3.11 python3.14 python3.13 python3.12 python3 python
PYTHON ?= $(shell for python in $(SUPPORTED); do \
	if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$python; break; fi; done)
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements.lock
EXTRAS ?= test
# A process that aborts ends the run of the tests: with --dist loadgroup, pytest-xdist waits for the tests of a replaced
# one for ever.
PYTEST := pytest -n 2 --max-worker-restart=0
ONE_IN ?= 1
SAMPLE ?= 0
NEWEST_PYTHON ?= python3.13
NEWEST := .venv-newest
VERSION_TESTS := tests/core/test_parity_pipeline.py tests/core/test_xla_options.py tests/verification tests/hlo \
	tests/checkpoint
# What depends on JAX's primitives, on the text of XLA's programs, and on tarfile.
NEWEST_TESTS := $(VERSION_TESTS) tests/flax_modules/test_scanned_layers.py tests/losses/test_row_independence.py \
	tests/api/test_python_page.py tests/data/test_source_formats.py tests/planning/test_collectives.py

OLDEST := .venv-oldest
OLDEST_TESTS := $(VERSION_TESTS) tests/models tests/trackers tests/reports/test_report.py tests/interop \
	tests/data/test_source_formats.py tests/data/test_tokenizer.py tests/data/test_remote.py tests/test_parser_fuzz.py
AUDIT := .venv-audit

.PHONY: train test newest oldest audit parsers matrix extras chaos packaging release lint docs site clean

train: $(VENV)/.installed
	$(BIN)/jaxtrain train configs/quickstart.yaml

test: $(VENV)/.installed-test lint
	$(BIN)/$(PYTEST) --dist loadgroup $(if $(ALL),,--sampled --sample $(SAMPLE)) tests

newest: $(NEWEST)/.installed
	$(NEWEST)/bin/$(PYTEST) --dist loadgroup --sampled --one-in $(ONE_IN) --sample $(SAMPLE) \
		$(NEWEST_TESTS)

oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/$(PYTEST) --dist loadgroup --sampled --one-in $(ONE_IN) --sample $(SAMPLE) \
		$(OLDEST_TESTS)

audit:
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check pip-audit || true  # without an index
	$(AUDIT)/bin/python tests/support/audit_lock.py

parsers: $(VENV)/.installed-test
	$(BIN)/python benchmarks/parser_coverage.py

matrix: $(VENV)/.installed-test
	JAXTRAIN_TEST_DEVICES=16 $(BIN)/$(PYTEST) --dist loadgroup -m matrix --one-in $(ONE_IN) --sample $(SAMPLE) tests

extras: $(VENV)/.installed-extras
	$(BIN)/$(PYTEST) --dist loadgroup tests/interop tests/inference/test_generate_command.py tests/inference/test_harness.py \
		tests/data/test_source_formats.py tests/data/test_remote.py tests/checkpoint/test_durable.py \
		tests/trackers/test_trackers.py tests/api/test_data.py tests/api/test_data_processes.py \
		tests/api/test_notebook_kernel.py tests/test_notebooks.py tests/sync/test_peers.py tests/sync/test_torch_power_sgd.py \
		tests/islands/test_launch_islands.py \
		"tests/test_examples.py::test_the_quick_form_learns[hugging_face]"

chaos: $(VENV)/.installed-test
	$(BIN)/pytest -m chaos tests
	$(BIN)/python benchmarks/chaos.py --out benchmarks/results/cpu-chaos.json
	$(BIN)/python benchmarks/chaos_processes.py --out benchmarks/results/cpu-chaos-processes.json

packaging: $(VENV)/.installed-test
	$(BIN)/pytest -m packaging tests/packaging
	$(BIN)/python benchmarks/first_run.py --json benchmarks/results/cpu-first-run.json

release: $(VENV)/.installed-test
	$(BIN)/python tests/support/release.py "$(VERSION)"

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python jaxtrain
	$(BIN)/lint-imports --no-cache

docs: $(VENV)/.installed-test
	$(BIN)/python tests/support/draw_docs.py

site: docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer here; give one: make $(MAKECMDGOALS) PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml $(LOCK)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(LOCK) -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed pyproject.toml $(LOCK)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(LOCK) -e '.[$(EXTRAS)]'
	touch $@

$(VENV)/.installed-extras: $(VENV)/.installed-test pyproject.toml $(LOCK)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(LOCK) \
		-e '.[test,notebooks,peer,islands,lm-eval,hf,arrayrecord,s3-test,loaders-test,wandb,mlflow]'
	touch $@

# Without the lock, and past the upper bounds of pyproject.toml.
$(NEWEST)/.installed: pyproject.toml
	$(NEWEST_PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade -e '.[test]'
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade \
		jax jaxlib flax optax orbax-checkpoint chex numpy
	touch $@

# The lowest version of each direct dependency, with the newest of what those ask for.
$(OLDEST)/.installed: pyproject.toml
	$(PYTHON) -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python --resolution lowest-direct -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) $(NEWEST) $(OLDEST) $(AUDIT) build dist *.egg-info
