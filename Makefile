# PYTHON chooses the interpreter. Each has an environment of its own: .venv for python3,
# .venv-3.13 for PYTHON=python3.13. ARGS is added to the command, e.g. ARGS=tests/bounds_test.py.
PYTHON ?= python3
ARGS ?=
DEMO = -m experiments.stuck_replica --directory runs/demo --seeds 3 --steps 80 --eval-every 20 --resume

# Where PYTHON does not run (a version manager's shim), its name tells the version, so that an
# environment that exists already goes on working.
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
ifeq ($(VERSION),)
VERSION := $(patsubst python%,%,$(notdir $(PYTHON)))
endif
VENV := $(if $(filter python3,$(PYTHON)),.venv,.venv-$(VERSION))
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed-$(VERSION)

.PHONY: help demo test test-all test-long lint format setup clean
.DEFAULT_GOAL := help

help:  ## list the commands
	@sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F '|' '{printf "%-16s %s\n", $$1, $$2}'

demo: $(STAMP)  ## run the main experiment, small, and draw its picture into runs/demo
	@$(RUN) $(DEMO) $(ARGS)

test: $(STAMP)  ## run the tests
	JAX_PLATFORMS=cpu $(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not slow' -q $(ARGS)

test-all: $(STAMP)  ## run the tests, the slow ones too, with many examples of each property
	JAX_PLATFORMS=cpu $(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -q --hypothesis-profile=thorough $(ARGS)

test-long: $(STAMP)  ## run what `make test` leaves out: the slow tests, and many examples of each property
	JAX_PLATFORMS=cpu $(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'slow or hypothesis' -q --hypothesis-profile=thorough $(ARGS)

lint: $(STAMP)  ## check style and the order of imports
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(VENV)/bin/lint-imports

format: $(STAMP)  ## mend style
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

setup: $(STAMP)  ## only create the environment (the others do it where needed)

clean:  ## remove environments, caches and the demo's output
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .hypothesis .ruff_cache runs/demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

FITS = import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
WHOLE = import sys, pip; sys.exit("%d.%d" % sys.version_info[:2] != "$(VERSION)")

# The stamp is written last: an install that was cut short is taken up again by the next call.
$(STAMP): pyproject.toml constraints.txt
	@$(RUN) -c '$(WHOLE)' 2>/dev/null || { \
	  $(PYTHON) -c '$(FITS)' 2>/dev/null || { \
	    echo 'PYTHON=$(PYTHON) is not a Python 3.11 or newer with its venv module: name another, as in `make test PYTHON=python3.12`.' >&2; \
	    exit 2; }; \
	  echo 'Creating the environment $(VENV) with Python $(VERSION): 1 GB, about a minute ...'; \
	  $(PYTHON) -m venv --clear $(VENV); }
	@echo 'Installing what constraints.txt pins into $(VENV) ...'
	@$(RUN) -m pip install -q -q --disable-pip-version-check -c constraints.txt -e '.[dev]' || { \
	  echo 'The install failed for the reason above: mend it and run make again.' >&2; exit 2; }
	@touch $@
