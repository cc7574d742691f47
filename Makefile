# `make train` trains the quickstart, `make test` runs every check, `make matrix` every combination of what the tests
# have a selection of, `make extras` what needs other people's packages (torch, lm-eval, datasets, s3fs, W&B...),
# `make chaos` runs long sequences of failures, and kills runs of one process at a hundred places and of several at two
# dozen, and compares them with ones that nobody disturbed.
# All make .venv and install into it. With EXTRAS=test,plan-gpu,plan-tpu `make test` also holds what is compiled for
# absent GPUs with cuDNN and for absent TPUs to its figures: 2.3 GB more on the disk.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements.lock
EXTRAS ?= test

.PHONY: train test matrix extras chaos lint docs clean

train: $(VENV)/.installed
	$(BIN)/jaxtrain train configs/quickstart.yaml

test: $(VENV)/.installed-test lint
	$(BIN)/pytest -n 2 --dist loadgroup tests

matrix: $(VENV)/.installed-test
	JAXTRAIN_TEST_DEVICES=16 $(BIN)/pytest -n 2 -m matrix tests

extras: $(VENV)/.installed-extras
	$(BIN)/pytest -n 2 tests/interop tests/inference/test_generate_command.py tests/inference/test_harness.py \
		tests/data/test_source_formats.py tests/data/test_remote.py tests/checkpoint/test_durable.py \
		tests/trackers/test_trackers.py

chaos: $(VENV)/.installed-test
	$(BIN)/pytest -m chaos tests
	$(BIN)/python benchmarks/chaos.py
	$(BIN)/python benchmarks/chaos_processes.py

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python jaxtrain
	$(BIN)/lint-imports --no-cache

docs: $(VENV)/.installed-test
	$(BIN)/python tests/support/draw_docs.py

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml $(LOCK)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(LOCK) -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed pyproject.toml $(LOCK)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(LOCK) -e '.[$(EXTRAS)]'
	touch $@

$(VENV)/.installed-extras: $(VENV)/.installed-test pyproject.toml $(LOCK)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(LOCK) \
		-e '.[test,peer,lm-eval,hf,arrayrecord,s3-test,wandb,mlflow]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
