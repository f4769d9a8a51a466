# radixserve: everything lives in .venv. PYTHON picks the interpreter, PIP_ARGS goes to pip, ARGS to the program that a target starts.
# WORKERS: processes that run tests; 0 runs them in one, as a debugger wants it.
PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=
PLAN ?= quick
WORKERS ?= 2
VENV := .venv
PACKAGE := $(VENV)/.installed-package
EVERYTHING := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help install serve test soak check bench compat gpu-compile gpu-plan clean

help:
	@echo "make serve    install, and serve the default model on 127.0.0.1:30000   (ARGS=\"--port 8000\")"
	@echo "make test     the whole test suite, in two processes                (ARGS=tests/pure, WORKERS=0 for one)"
	@echo "make soak     64 clients against a tiny pool for ten minutes     (ARGS=\"--seconds 60\")"
	@echo "make check    ruff and mypy"
	@echo "make bench    re-use on against off, on this machine, as a report in bench/out/quick    (PLAN=full or PLAN=peers)"
	@echo "make compat   other people's tools against a real server, each in an environment of its own: minutes, 8 GB on the first run"
	@echo "make gpu-compile  FlashInfer's kernels through nvcc, no GPU needed: 170 MB to fetch, nine minutes of CPU"
	@echo "make gpu-plan     FlashInfer's planner, so compiled, plans the backend's steps"
	@echo "make install  $(VENV) with the package and all that tests and benchmarks need ('make serve' alone takes the package's own needs)"
	@echo "make clean    remove what was made here"

install: $(EVERYTHING)

# A half-made environment is removed, so that the next call starts afresh.
$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON): not found; radixserve needs Python >= 3.11, e.g. make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "radixserve needs Python >= 3.11, got '$$($(PYTHON) --version 2>&1)'; try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "could not make $(VENV); on Debian: apt-get install python3-venv" >&2; exit 1; }

# Two stamps: who only serves is spared what tests and benchmarks need, which is half of the whole.
$(PACKAGE): pyproject.toml constraints.txt Makefile | $(VENV)/bin/python
	@echo "installing into $(VENV): minutes on the first run, 1.3 GB with a CPU build of torch"
	@$(VENV)/bin/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e . || \
		{ echo "could not install: is the package index reachable? Options for pip go into PIP_ARGS" >&2; exit 1; }
	@touch $@

$(EVERYTHING): pyproject.toml constraints.txt Makefile | $(VENV)/bin/python
	@echo "installing into $(VENV), tests and benchmarks included: minutes on the first run, 2.7 GB with a CPU build of torch"
	@$(VENV)/bin/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[test,bench]' || \
		{ echo "could not install: is the package index reachable? Options for pip go into PIP_ARGS" >&2; exit 1; }
	@$(VENV)/bin/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt --no-deps flashinfer-python || \
		{ echo "could not install flashinfer-python, which tests of the GPU backend run on a CPU" >&2; exit 1; }
	@touch $(PACKAGE) $@

serve: $(PACKAGE)
	$(VENV)/bin/radixserve serve $(ARGS)

test: install
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

soak: install
	$(VENV)/bin/python -m tests.support.soak $(ARGS)

check: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: install
	$(VENV)/bin/python -m bench.experiment bench/plans/$(PLAN).toml $(ARGS)

compat: install
	$(VENV)/bin/python -m tests.compat.run $(ARGS)

GPU_COMPILE := bench/out/gpu-compile
# FlashInfer and what importing it needs are in $(VENV); versions that belong together, none of their dependencies
GPU_COMPILE_WHEELS := ninja \
	'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cccl==13.0.*'

$(GPU_COMPILE)/site/.installed: Makefile | install
	rm -rf $(GPU_COMPILE)/site
	$(VENV)/bin/python -m pip install --quiet $(PIP_ARGS) --no-deps --no-compile --target $(GPU_COMPILE)/site $(GPU_COMPILE_WHEELS)
	@touch $@

GPU_COMPILE_PYTHON := PYTHONPATH=$(CURDIR)/$(GPU_COMPILE)/site PATH="$(CURDIR)/$(GPU_COMPILE)/site/bin:$$PATH" $(VENV)/bin/python

gpu-compile: $(GPU_COMPILE)/site/.installed
	$(GPU_COMPILE_PYTHON) -m bench.gpu_compile $(ARGS)

gpu-plan: $(GPU_COMPILE)/site/.installed
	$(GPU_COMPILE_PYTHON) -m bench.gpu_plan $(ARGS)

clean:
	rm -rf $(VENV) .venv-compat build dist bench/out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
