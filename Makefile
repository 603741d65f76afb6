# Set-up and everyday commands. A fresh Debian machine needs python3.11 with venv and make, nothing else.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
# The CPU build; a plain "torch" would pull gigabytes of CUDA packages.
TORCH ?= torch==2.13.0

.PHONY: demo dev check test slow netns bench clean

demo: $(VENV)/.run
	$(BIN)/python examples/quickstart.py

$(VENV)/.run: setup.cfg
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $(TORCH)
	$(BIN)/pip install -q -e '.[examples]'
	touch $@

dev: $(VENV)/.dev

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/pip install -q -e '.[dev]'
	touch $@

check: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: dev
	$(BIN)/pytest -q

slow: dev
	$(BIN)/pytest -q -m slow

netns: dev
	tools/ci/netns.sh $(BIN)/pytest

bench: dev
	$(BIN)/python tools/bench/all.py

clean:
	rm -rf $(VENV) build dist *.egg-info
