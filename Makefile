# `make train` trains the quickstart, `make test` runs every check, `make matrix` every combination of what the tests
# have a selection of. All make .venv and install into it.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements.lock

.PHONY: train test matrix lint clean

train: $(VENV)/.installed
	$(BIN)/jaxtrain train configs/quickstart.yaml

test: $(VENV)/.installed-test lint
	$(BIN)/pytest -n 2 --dist loadgroup tests

matrix: $(VENV)/.installed-test
	JAXTRAIN_TEST_DEVICES=16 $(BIN)/pytest -n 2 -m matrix tests

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python jaxtrain
	$(BIN)/lint-imports --no-cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml $(LOCK)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(LOCK) -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed pyproject.toml $(LOCK)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(LOCK) -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
