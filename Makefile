# On a fresh machine that has python3 (3.11 or newer) and make:
#   make quickstart   makes the environment and trains the quickstart preset
#   make test         makes the environment with the dev extra and runs the tests
# Another interpreter: make test PYTHON=python3.12 (it gets an environment of its own).

PYTHON ?= python3
VENV := $(if $(filter python3,$(PYTHON)),.venv,.venv-$(notdir $(PYTHON)))
BIN := $(VENV)/bin

# What tests, lint and types need: exact versions with their hashes, made by `make lock`.
LOCK := .ci/requirements.lock
EXTRAS := sim serve hub pytorch fast tensorboard trackio tune wandb notebook docs dev

.PHONY: help install install-dev lock quickstart test test-slow regress soak lint types docs clean

help:
	@echo "make quickstart | test | regress | soak | install | lint | types | docs | lock | clean    (PYTHON=$(PYTHON), environment in $(VENV))"

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

# The lock file is complete, so pip looks for nothing else: neither dependencies, nor what builds the package.
$(VENV)/installed-dev: pyproject.toml $(LOCK) | $(BIN)/pip
	@echo "==> installing acrlpd with the simulators, the server, the metric writers and the development tools"
	@$(PIP) --require-hashes --no-deps --requirement $(LOCK)
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@ $(VENV)/installed-sim $(VENV)/installed

install: $(VENV)/installed
	@echo "==> $(BIN)/acrlpd is ready"

install-dev: $(VENV)/installed-dev

# Versions in the lock file stay as they are where pyproject.toml allows; make lock ARGS=--upgrade takes the newest.
lock: $(VENV)/installed-dev
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes $(ARGS) \
		--custom-compile-command 'make lock' $(addprefix --extra ,$(EXTRAS)) \
		--output-file $(LOCK) pyproject.toml .ci/no-deps.in
	@echo "==> $(LOCK) is made again; the next make test installs it"

quickstart: $(VENV)/installed-sim
	@echo "==> acrlpd train --config quickstart (an interrupted run goes on; remove checkpoints/quickstart to repeat it)"
	@MUJOCO_GL=disabled $(BIN)/acrlpd train --config quickstart --exp_name quickstart \
		$$(test ! -e checkpoints/quickstart/quickstart || echo --resume)

# Three workers for two cores: a test that waits for a process leaves its core to another test.
test: $(VENV)/installed-dev
	@echo "==> running the tests"
	@$(BIN)/python -m pytest -m "not slow" -n 3 --dist loadfile

test-slow: $(VENV)/installed-dev
	@$(BIN)/python -m pytest -m slow

# SCENARIOS="corridor pi0_images" compares some of the scenarios, and ARGS=--busy has wider bounds for what is noisy.
regress: $(VENV)/installed-dev
	@echo "==> comparing trainings with the baselines in benchmarks/regression"
	@MUJOCO_GL=disabled $(BIN)/acrlpd regress check $(ARGS) $(SCENARIOS)

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

# Pages, links and anchors are checked while the site is built; a warning is an error.
docs: $(VENV)/installed-dev
	@echo "==> mkdocs"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "==> build/site/index.html is ready; with the search: $(BIN)/python -m http.server --directory build/site"

clean:
	rm -rf .venv .venv-* build dist
