# `make demo` and `make test` need nothing but git, Python >= 3.10 and a C++ compiler's system packages,
# which are installed when run as root on Debian/Ubuntu and named otherwise.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
JOBS ?= 2
PYTEST_ARGS ?=
BENCH_ARGS ?=

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
PY := $(BIN)/python
ENGINE_VENV := .venv-vllm
ENGINE_PY := $(CURDIR)/$(ENGINE_VENV)/bin/python
SGLANG_VENV := .venv-sglang
TRTLLM_VENV := .venv-trtllm
SGLANG_PY := $(CURDIR)/$(SGLANG_VENV)/bin/python
STAMPS := build/stamps

# Our distributions, outermost last: "folder:source folder". Linked into environments from this tree.
PROJECTS := .:. plugins/backends/posix:plugins/backends/posix/src plugins/vllm:plugins/vllm/src \
	plugins/sglang:plugins/sglang/src plugins/trtllm:plugins/trtllm/src \
	plugins/reference:plugins/reference/src
PROJECT_FILES := pyproject.toml plugins/backends/posix/pyproject.toml plugins/vllm/pyproject.toml \
	plugins/sglang/pyproject.toml plugins/trtllm/pyproject.toml plugins/reference/pyproject.toml
ENGINE_LOCKS := $(wildcard plugins/vllm/env/*)
SGLANG_LOCKS := $(wildcard plugins/sglang/env/*)
# What SGLang has of GPU builds alone: for tests, never shipped.
SGLANG_STANDINS := plugins/sglang/tests/support/standins
CXX_FILES = $(shell git ls-files 'native/*.cc' 'native/*.h')

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

# --- environments ------------------------------------------------------------------------------

.PHONY: system
system:
	@dev/system_packages.sh

$(STAMPS)/venv: dev/requirements.lock
	@mkdir -p $(STAMPS)
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -r dev/requirements.lock
	@touch $@

$(STAMPS)/linked: $(STAMPS)/venv $(PROJECT_FILES) dev/link.py
	PATH=$(BIN):$$PATH $(PY) dev/link.py $$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))') $(PROJECTS)
	@touch $@

build/dev/build.ninja: $(STAMPS)/venv CMakeLists.txt native/CMakeLists.txt
	PATH=$(BIN):$$PATH cmake -S . -B build/dev -G Ninja -DUCM_TESTS=ON -DUCM_BENCH=ON -DPython_EXECUTABLE=$(PY) >build/cmake.log \
		|| { cat build/cmake.log; exit 1; }
	@touch $@

.PHONY: native
native: system build/dev/build.ninja ## Compile the native store in-tree (quick when nothing changed)
	@PATH=$(BIN):$$PATH ninja -C build/dev -j $(JOBS) --quiet

# Tests only, each in a folder of its own: nothing of a sanitizer build can be shared with another.
build/%/build.ninja: CMakeLists.txt native/CMakeLists.txt CMakePresets.json
	@mkdir -p build
	PATH=$(BIN):$$PATH cmake --preset $* >build/cmake-$*.log || { cat build/cmake-$*.log; exit 1; }
	@touch $@

.PHONY: native-asan native-tsan native-chaos
native-asan native-tsan native-chaos: native-%: native build/%/build.ninja
	@PATH=$(BIN):$$PATH ninja -C build/$* -j $(JOBS) --quiet

.PHONY: dev
dev: native $(STAMPS)/linked ## Everything for `.venv`: tools, native store, this tree's packages

# vLLM tests run in an overlay: the cached engine environment plus this tree's packages.
$(STAMPS)/engine-vllm: $(STAMPS)/linked $(ENGINE_LOCKS) dev/engine_env.py dev/requirements-engine.lock dev/overlay.sh
	dev/overlay.sh $(ENGINE_VENV) vllm $(PY) $(PROJECTS)
	@touch $@

.PHONY: engine-vllm
engine-vllm: dev $(STAMPS)/engine-vllm ## The vLLM environment (2-3 GB in the user's cache, once)

# The same for SGLang, with the stand-ins that let it run on a CPU.
$(STAMPS)/engine-sglang: $(STAMPS)/linked $(SGLANG_LOCKS) $(SGLANG_STANDINS)/pyproject.toml dev/engine_env.py \
		dev/requirements-engine.lock dev/overlay.sh
	dev/overlay.sh $(SGLANG_VENV) sglang $(PY) $(PROJECTS) $(SGLANG_STANDINS):$(SGLANG_STANDINS)
	@touch $@

.PHONY: engine-sglang
engine-sglang: dev $(STAMPS)/engine-sglang ## The SGLang environment (3 GB in the user's cache, once)

# Public connectors for TensorRT-LLM, on top of the cached vLLM environment; for the executor stub's tests.
$(STAMPS)/engine-trtllm: $(STAMPS)/engine-vllm plugins/trtllm/env/peers.lock
	dev/overlay.sh $(TRTLLM_VENV) vllm $(PY) $(PROJECTS)
	$(PY) -m pip --disable-pip-version-check --python $(TRTLLM_VENV)/bin/python install --quiet --no-deps \
		-r plugins/trtllm/env/peers.lock
	@touch $@

.PHONY: engine-trtllm
engine-trtllm: engine-vllm $(STAMPS)/engine-trtllm ## The vLLM environment plus public TensorRT-LLM connectors

# --- tests -------------------------------------------------------------------------------------

.PHONY: test
test: engine-vllm engine-sglang ## Everything CI runs: lint, native, Python, packaging, real engines
	@MAKE="$(MAKE)" dev/run_steps.sh lint test-native test-fuzz chaos test-python test-packaging test-engine test-sglang test-trtllm test-cross

.PHONY: lint
lint: dev ## ruff, mypy, import-linter, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PATH=$(BIN):$$PATH $(BIN)/lint-imports --no-cache
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

.PHONY: format
format: dev ## Rewrite sources to the house format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

.PHONY: test-native
test-native: native native-asan native-tsan ## googletest: as it is, with ASan and UBSan, with TSan
	build/dev/native/ucm_tests --gtest_brief=1
	dev/sanitized_tests.sh

# --- chaos and fuzz ----------------------------------------------------------------------------

SEED ?= 1
KILLS ?= 2000
FUZZ_SECONDS ?= 60
FUZZ_TARGETS := object_file layout

.PHONY: chaos
chaos: native-chaos ## Kill processes that share a store: SEED=, KILLS= (20,000 in `make long`)
	build/chaos/native/ucm_chaos --canaries --seed $(SEED)
	build/chaos/native/ucm_chaos --seed $(SEED) --kills $(KILLS)

.PHONY: fuzz
fuzz: native-asan ## What parses foreign bytes, on bytes of any kind: FUZZ_SECONDS=
	@for target in $(FUZZ_TARGETS); do \
	  mkdir -p build/fuzz/$$target; \
	  build/asan/native/ucm_fuzz_$$target -max_total_time=$(FUZZ_SECONDS) \
	    build/fuzz/$$target native/fuzz/corpus/$$target; \
	done

.PHONY: test-fuzz
test-fuzz:
	@$(MAKE) fuzz FUZZ_SECONDS=3

.PHONY: test-python
test-python: dev ## Core, backends, reference engine and docs, without a foreign engine
	$(BIN)/pytest -n $(JOBS) --dist loadfile -m "not packaging and not long" --ignore=tests/cross_engine tests plugins/backends/posix/tests plugins/reference/tests plugins/trtllm/tests/unit $(PYTEST_ARGS)

.PHONY: test-packaging
test-packaging: dev ## Wheels of every distribution in empty environments
	$(BIN)/pytest -m "packaging and not long" --ignore=tests/cross_engine tests $(PYTEST_ARGS)

.PHONY: test-engine
test-engine: engine-vllm ## The adapter on the real vLLM
	$(ENGINE_VENV)/bin/python -P -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not long" plugins/vllm/tests $(PYTEST_ARGS)

.PHONY: test-sglang
test-sglang: engine-sglang ## The adapter on real host pools and the real SGLang
	$(SGLANG_VENV)/bin/python -P -m pytest -m "not long" plugins/sglang/tests $(PYTEST_ARGS)

.PHONY: test-trtllm
test-trtllm: engine-trtllm ## TensorRT-LLM: public connectors in the executor stub
	$(TRTLLM_VENV)/bin/python -P -m pytest -m "not long" plugins/trtllm/tests/adapters $(PYTEST_ARGS)

.PHONY: test-cross
test-cross: engine-vllm engine-sglang ## What one engine saved another serves
	$(BIN)/pytest -m "not long" tests/cross_engine $(PYTEST_ARGS)

.PHONY: long
long: engine-vllm engine-sglang native-asan native-tsan ## The full form of everything long, and clang-tidy
	@$(MAKE) chaos KILLS=20000
	@$(MAKE) fuzz FUZZ_SECONDS=120
	UCM_STRESS_S=60 build/dev/native/ucm_tests --gtest_brief=1 --gtest_filter=*StoreStress*
	UCM_STRESS_S=60 GTEST_FILTER=*StoreStress* dev/sanitized_tests.sh
	$(BIN)/pytest -m long tests plugins/backends/posix/tests plugins/reference/tests plugins/trtllm/tests/unit $(PYTEST_ARGS)
	$(ENGINE_VENV)/bin/python -P -m pytest -m long plugins/vllm/tests $(PYTEST_ARGS)

.PHONY: tidy
tidy: native ## clang-tidy (a system package)
	clang-tidy -p build/dev --quiet $(filter native/src/%.cc,$(CXX_FILES))

# --- use ---------------------------------------------------------------------------------------

.PHONY: demo
ifeq ($(MODEL),hybrid)
demo: dev ## Save in one vLLM process, reuse in a second, compare the outputs; MODEL=hybrid: a picture
	$(PY) -P examples/hybrid_demo.py
else
demo: engine-vllm
	$(ENGINE_PY) -P examples/demo.py
endif

.PHONY: demo-cross
demo-cross: engine-vllm engine-sglang ## Two engines, one cache directory: the table of hits
	$(PY) -P examples/cross_demo.py

.PHONY: bench
bench: engine-vllm ## Medians and ratios beside physical limits and peers
	$(ENGINE_PY) -m benchmarks $(BENCH_ARGS)

.PHONY: bench-sglang
bench-sglang: engine-vllm engine-sglang ## UCM beside SGLang's file backend; TTFT in the real SGLang
	$(SGLANG_PY) -m benchmarks.sglang $(BENCH_ARGS)
	$(PY) -m benchmarks.sglang_ttft

.PHONY: wheels
wheels: dev ## Wheels of every distribution into build/wheels
	$(PY) dev/build_wheels.py build/wheels

.PHONY: docs
docs: dev ## Rewrite the generated pages of docs/
	$(PY) dev/docs.py

.PHONY: lock
lock: ## Rewrite dev/requirements.lock from dev/requirements.in
	dev/lock.sh

.PHONY: clean
clean: ## Remove what was built here (not the engine environments in the user's cache)
	rm -rf build dist $(VENV) $(ENGINE_VENV) $(SGLANG_VENV) $(TRTLLM_VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find ucm_core -name '*.so' -delete
