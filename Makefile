# recavsr. Every target makes the environment it needs in .venv, says what it does, and is quick the second time.
#
#   make demo    a small clip, drawn here, degraded, upscaled: demo_out/demo_before_after.{mp4,png}
#   make test    the test suite
#   make check   lint, format, types
#   make bench   speed and memory of this machine, as JSON under benchmarks/results/
#   make clean   removes what the targets made
#
# Variables: PYTHON (an interpreter of version 3.11 to 3.13), VENV, TORCH_INDEX (an extra package index to take
# PyTorch from, for example the CPU wheels of pytorch.org; none by default), JOBS (test processes).

VENV ?= .venv
JOBS ?= 2
TORCH_INDEX ?=
SUPPORTED := import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for candidate in python3.11 python3.12 python3.13 python3; do \
	if $$candidate -c '$(SUPPORTED)' 2>/dev/null; then echo $$candidate; break; fi; done)
BIN := $(VENV)/bin

# With an NVIDIA GPU pip may take the newest CUDA build; without one the pinned version, which has a CPU build.
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo yes)
CONSTRAINT := $(if $(HAS_GPU),,-c constraints/ci.txt)
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --quiet \
	$(CONSTRAINT) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: demo test check bench clean
.DEFAULT_GOAL := demo

demo: $(VENV)/core.stamp
	@echo "== demo: draw a clip, degrade it, upscale it"
	$(BIN)/recavsr demo --output demo_out

test: $(VENV)/dev.stamp
	@echo "== test: pytest in $(JOBS) processes"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

check: $(VENV)/dev.stamp
	@echo "== check: lint, format, types"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/core.stamp
	@echo "== bench: speed and memory of nano on this machine"
	$(BIN)/recavsr bench

clean:
	rm -rf $(VENV) demo_out build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.11, 3.12 or 3.13 with venv found: install one, or name it with PYTHON=..." >&2; exit 1; }
	@echo "== set-up: $(VENV) from $(PYTHON)"
	$(PYTHON) -m venv $(VENV)

$(VENV)/core.stamp: pyproject.toml constraints/ci.txt | $(BIN)/python
	@echo "== set-up: recavsr and its core dependencies ($(if $(HAS_GPU),NVIDIA GPU found: CUDA build of PyTorch,no NVIDIA GPU: pinned PyTorch)), once"
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/dev.stamp: pyproject.toml constraints/ci.txt | $(BIN)/python
	@echo "== set-up: recavsr with its development dependencies ($(if $(HAS_GPU),NVIDIA GPU found: CUDA build of PyTorch,no NVIDIA GPU: pinned PyTorch)), once"
	$(PIP_INSTALL) -e '.[dev]'
	@touch $(VENV)/core.stamp $@
