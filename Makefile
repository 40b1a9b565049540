# On a fresh machine that has python3 (3.11 or newer) and make:
#   make quickstart   makes the environment and runs the embedded main job
#   make test         makes the environment with the dev extra and runs the tests
# Another interpreter: make test PYTHON=python3.12 (it gets an environment of its own).

PYTHON ?= python3
VENV := $(if $(filter python3,$(PYTHON)),.venv,.venv-$(notdir $(PYTHON)))
BIN := $(VENV)/bin

.PHONY: help install install-dev quickstart test test-slow soak lint types clean

help:
	@echo "make quickstart | test | soak | install | lint | types | clean    (PYTHON=$(PYTHON), environment in $(VENV))"

# pip comes last: an environment that was interrupted, or lacks python3-venv, has none and is made again.
$(BIN)/pip:
	@echo "==> making the environment $(VENV) with $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "acrlpd needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV)

# The stamps make a second call free, and let it work offline.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

$(VENV)/installed: pyproject.toml | $(BIN)/pip
	@echo "==> installing acrlpd"
	@$(PIP) --editable .
	@touch $@

$(VENV)/installed-sim: pyproject.toml | $(BIN)/pip
	@echo "==> installing acrlpd with the simulators"
	@$(PIP) --editable '.[sim]'
	@touch $@ $(VENV)/installed

# openpi-client asks for numpy 1 but works with numpy 2: only without its dependencies can it be tested with.
$(VENV)/installed-dev: pyproject.toml | $(BIN)/pip
	@echo "==> installing acrlpd with the simulators, the server, the metric writers and the development tools"
	@$(PIP) --editable '.[sim,serve,hub,tensorboard,wandb,dev]'
	@$(PIP) --no-deps openpi-client
	@touch $@ $(VENV)/installed-sim $(VENV)/installed

install: $(VENV)/installed
	@echo "==> $(BIN)/acrlpd is ready"

install-dev: $(VENV)/installed-dev

quickstart: $(VENV)/installed-sim
	@echo "==> acrlpd train --config quickstart (an interrupted run goes on; remove checkpoints/quickstart to repeat it)"
	@MUJOCO_GL=disabled $(BIN)/acrlpd train --config quickstart --exp_name quickstart \
		$$(test ! -e checkpoints/quickstart/quickstart || echo --resume)

test: $(VENV)/installed-dev
	@echo "==> running the tests"
	@$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

test-slow: $(VENV)/installed-dev
	@$(BIN)/python -m pytest -m slow

# TRIALS="kills disk" runs some of the trials.
soak: $(VENV)/installed-dev
	@echo "==> running the soak, which takes about an hour"
	@$(BIN)/python benchmarks/soak/run.py $(TRIALS)

lint: $(VENV)/installed-dev
	@echo "==> ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "==> lint-imports"
	@$(BIN)/lint-imports --no-logo --no-cache

types: $(VENV)/installed-dev
	@echo "==> mypy"
	@$(BIN)/mypy

clean:
	rm -rf .venv .venv-* build dist
