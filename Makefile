# make setup | demo | check | test | mutants | lock | clean.  Linux, Python >= 3.11, a C compiler, GNU make >= 4.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.PHONY: setup demo check test mutants lock clean

PYTHON ?= python3
BIN := .venv/bin
# -qq: errors only. --no-compile: pip compiles on one core, file by file; compileall does it on all of them afterwards.
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
INSTALL := $(PIP) install --no-deps --no-compile --no-build-isolation
PINNED = $$(grep -E '^$(1)==' requirements/cpu.txt)
# `+cpu`: a bare 2.13.0 is, on most machines, the CUDA build of several gigabytes.
TORCH := torch==2.13.0+cpu
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

# The stamp holds the digest of what the set-up was made from; equal digest: nothing to do, no network.
# .venv/.unfinished marks a set-up that was cut short: pip takes a half-written package for a whole one, so start afresh.
setup:
	@wanted=$$(cat Makefile pyproject.toml requirements/cpu.txt | sha256sum)
	if [ "$$(cat .venv/.stamp 2>/dev/null)" = "$$wanted" ]; then exit 0; fi
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
	    echo "setup: needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1); run: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	command -v cc >/dev/null || {
	    echo "setup: needs a C compiler and found no cc: pycosat, which reasoning_gym imports, has no wheel; install gcc" >&2; exit 1; }
	if [ -e .venv/.unfinished ]; then echo "setup: the last one was cut short, starting afresh"; rm -rf .venv; fi
	mkdir -p .venv && touch .venv/.unfinished && rm -f .venv/.stamp
	echo "setup: virtual environment in .venv (one to three minutes)"
	[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv  # over one of another Python it would leave a mixture
	$(INSTALL) $(call PINNED,pip) $(call PINNED,setuptools)
	echo "setup: $(TORCH)"
	$(INSTALL) "$(TORCH)" 2>/dev/null || $(INSTALL) --extra-index-url $(TORCH_CPU_INDEX) "$(TORCH)"
	echo "setup: $$(grep -c == requirements/cpu.txt) packages of requirements/cpu.txt"
	$(INSTALL) -r requirements/cpu.txt
	$(INSTALL) -e .
	echo "setup: bytecode"
	# Not left to the first import: where PYTHONDONTWRITEBYTECODE is set, every start of vLLM would compile it again.
	# The exit status says only that some shipped templates are no Python, so it is not asked.
	$(BIN)/python -W ignore -m compileall -qq -j 0 .venv/lib || true
	rm .venv/.unfinished
	echo "$$wanted" > .venv/.stamp
	echo "setup: done"

demo: setup
	@$(BIN)/python -m learner.main --config configs/local_cpu.yaml $(ARGS)

check:
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy learner rollout rewards cluster tests benchmarks examples
	$(BIN)/lint-imports --no-logo
	$(BIN)/pytest -n 2 --dist loadscope

test: setup
	@$(MAKE) --no-print-directory check

# What the tests would not notice, in the files where a fault would be believed (pyproject.toml, tool.mutmut). One thread
# each: mutants run beside each other.
mutants: setup
	@cmp -s requirements/mutants.txt build/mutants/.requirements || {
	    rm -rf build/mutants
	    $(INSTALL) --target build/mutants -r requirements/mutants.txt
	    cp requirements/mutants.txt build/mutants/.requirements; }
	rm -rf mutants
	export PYTHONPATH=$$PWD/build/mutants OMP_NUM_THREADS=1
	$(BIN)/python -m mutmut run --max-children 2 > build/mutants.log || { tail -5 build/mutants.log; exit 1; }
	$(BIN)/python tests/mutation/report.py

lock: setup
	@report=$$(mktemp)
	trap 'rm -f "$$report"' EXIT
	resolve="$(PIP) install --dry-run --ignore-installed --report $$report .[cpu,demo,dev] $(TORCH)"
	$$resolve 2>/dev/null || $$resolve --extra-index-url $(TORCH_CPU_INDEX)
	$(BIN)/python requirements/lock.py "$$report" > requirements/cpu.txt.new
	mv requirements/cpu.txt.new requirements/cpu.txt

clean:
	@rm -rf .venv build mutants *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
