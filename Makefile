# Start with `make quickstart` and `make test`. Everything runs in .venv, which is created on demand.
SHELL := /bin/sh
VENV ?= .venv
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13 python3.10; do \
	$$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
# For two cores: one more worker than cores, because some tests wait for processes that they started.
WORKERS ?= 3
# Modules are compiled on first import: compiling all of them takes longer than the install.
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
export PYTHONDONTWRITEBYTECODE =

.PHONY: quickstart test browser test-ascend test-engines test-environments test-migration test-notebooks test-ray test-recorder test-slow dist test-dist lock lint format docs models bench clean

quickstart: $(VENV)/.core
	@PATH="$(CURDIR)/$(BIN):$$PATH" lockstep quickstart

# All parts run even if one fails. The linters run in parallel with the first tests; their output comes after them. So
# does the installation for test-ascend, which reports its failures itself.
# In a fresh clone all modules are compiled before the workers start, so that not every worker compiles them.
test:
	@$(MAKE) --no-print-directory -j2 $(VENV)/.test browser
	@failed=; \
	$(MAKE) --no-print-directory lint >$(VENV)/lint.log 2>&1 & lint=$$!; \
	VENV="$(VENV)" sh tools/test_ascend.sh prepare >/dev/null 2>&1 & ascend=$$!; \
	test -d tests/unit/__pycache__ || $(BIN)/python -m pytest --collect-only -q >/dev/null 2>&1; \
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "not slow" --durations=25 || failed="$$failed pytest"; \
	wait $$lint || failed="$$failed lint"; \
	cat $(VENV)/lint.log; \
	wait $$ascend; \
	$(MAKE) --no-print-directory test-ascend || failed="$$failed test-ascend"; \
	test -z "$$failed" || { echo "make test: FAILED:$$failed"; exit 1; }

# Tests the page of `lockstep compare` in a real browser.
browser:
	@sh tools/install_chromium.sh

# Needs a separate environment, so it is not part of `make test`.
test-ascend: $(VENV)/.test
	@VENV="$(VENV)" WORKERS="$(WORKERS)" sh tools/test_ascend.sh

# Compares migrated commands with their original trainers, in a separate environment.
test-migration: $(VENV)/.test
	@VENV="$(VENV)" sh tools/test_migration.sh

# Tests the recorder in old trainers, which need gigabytes: torch 2.5.1, verl 0.4.1 and TRL.
test-recorder: $(VENV)/.test
	@VENV="$(VENV)" sh tools/test_recorder.sh

# Not part of `make test`: a cluster and its actors take a minute of CPU time at each start.
test-ray: $(VENV)/.ray
	$(BIN)/python -m pytest -m ray

# Not part of `make test`: a serving engine takes gigabytes to install and minutes of CPU time at each start.
test-engines: $(VENV)/.test
	@VENV="$(VENV)" sh tools/test_engines.sh

# Not part of `make test`: the packages whose environments lockstep adapts take minutes to install and to import.
test-environments: $(VENV)/.test
	@VENV="$(VENV)" sh tools/test_environments.sh

# Not part of `make test`: the notebooks need a kernel.
test-notebooks: $(VENV)/.notebook
	$(BIN)/python -m pytest tests/e2e/test_notebooks.py

# Property tests run again with more examples.
test-slow: $(VENV)/.test
	LOCKSTEP_EXAMPLES=deep $(BIN)/python -m pytest -m "slow or hypothesis"
	@VENV="$(VENV)" WORKERS="$(WORKERS)" sh tools/test_ascend.sh tests/ascend -m slow

# The wheel is built from the sdist, so it proves that the sdist is complete.
dist: $(VENV)/.test
	rm -rf dist
	$(BIN)/uv build --quiet --out-dir dist
	@ls dist

# Not part of `make test`: each Python gets an environment of its own, with gigabytes of torch.
test-dist: dist
	@VENV="$(VENV)" sh tools/test_dist.sh

# After a change of pyproject.toml or of the constraints.
lock: $(VENV)/.test
	$(BIN)/python tools/lock.py

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Generates the generated pages, then builds the site in site/. A broken link or anchor is an error.
docs: $(VENV)/.docs
	$(BIN)/python tools/recipe_reference.py > docs/recipe.md
	$(BIN)/python tools/error_codes.py > docs/errors.md
	$(BIN)/python tools/architecture.py
	$(BIN)/python tools/migration_tables.py
	$(BIN)/python tools/environment_figures.py trajectory > docs/trajectory.svg
	$(BIN)/python tools/environment_figures.py timeline > docs/timeline.svg
	$(BIN)/python tools/vision_figure.py > docs/vision-tokens.svg
	$(BIN)/python tools/step_figure.py > docs/grpo-step.svg
	$(BIN)/python tools/site/build.py

models: $(VENV)/.test
	$(BIN)/python tools/models_table.py

bench: $(VENV)/.bench
	$(BIN)/python bench/sft.py
	$(BIN)/python bench/dpo.py
	$(BIN)/python bench/rollout.py
	$(BIN)/python bench/grpo_step.py
	$(BIN)/python bench/vision.py
	$(BIN)/python bench/parity.py

clean:
	rm -rf $(VENV) .venv-ascend .venv-peers .venv-recorder .venv-recorder-trl .venv-vllm .venv-environments .venv-openenv .pytest_cache .mypy_cache .ruff_cache

$(BIN)/pip:
	@test -n "$(PYTHON)" || { echo "no Python 3.10 to 3.13 found; install one or say: make PYTHON=/path/to/python3 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo "python cannot make a virtual environment (on Debian: apt install python3-venv)"; exit 1; }
	@$(BIN)/pip install --quiet --disable-pip-version-check pip==26.3 || echo "pip stays as it is; a newer one resolves faster"

CONSTRAINTS := constraints.txt constraints-common.txt

$(VENV)/.core: $(BIN)/pip pyproject.toml $(CONSTRAINTS)
	$(PIP_INSTALL) -e ".[serve]"
	@touch $@

$(VENV)/.test: $(BIN)/pip pyproject.toml $(CONSTRAINTS)
	$(PIP_INSTALL) -e ".[test,interpret]"
	@touch $@ $(VENV)/.core

# Includes the packages that Ray jobs need.
$(VENV)/.ray: $(VENV)/.test
	$(PIP_INSTALL) -e ".[ray]" "ray[default]"
	@touch $@

$(VENV)/.notebook: $(VENV)/.test
	$(PIP_INSTALL) -e ".[notebook]"
	@touch $@

$(VENV)/.docs: $(VENV)/.test
	$(PIP_INSTALL) -e ".[docs]"
	@touch $@

$(VENV)/.bench: $(VENV)/.test
	$(PIP_INSTALL) -e ".[bench]"
	@touch $@
