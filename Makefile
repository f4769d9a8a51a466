# radixserve: everything lives in .venv. PYTHON picks the interpreter, PIP_ARGS goes to pip, ARGS to the program that a target starts.
PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=
VENV := .venv
STAMP := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: install serve test check bench clean

install: $(STAMP)

# A half-made environment is removed, so that the next call starts afresh.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "radixserve needs Python >= 3.11, got '$$($(PYTHON) --version 2>&1)'; try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "could not make $(VENV); on Debian: apt-get install python3-venv" >&2; exit 1; }

$(STAMP): pyproject.toml constraints.txt | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[test]'
	@touch $@

serve: install
	$(VENV)/bin/radixserve serve $(ARGS)

test: install
	$(VENV)/bin/python -m pytest $(ARGS)

check: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: install
	$(VENV)/bin/python -m bench.compare $(ARGS)

clean:
	rm -rf $(VENV) build dist bench/out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
