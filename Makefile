# `make demo` and `make test` need nothing but Python 3.10 or newer: they set everything up, with
# what the system lacks by apt-get where they may (scripts/system_packages.sh).
# Without a GPU elsewhere: PIP_ARGS names an index of CPU builds of torch, or pip takes gigabytes.
# ARGS go to pytest: make test ARGS='tests/format -x'.

PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
STORE ?=
ENGINE ?= mini
SEED ?=
MINUTES ?= 5
PIP_ARGS ?=
PROCESSORS ?=
ARGS ?=
SGLANG ?= 0.5.23
LMCACHE ?= 0.5.6
MOONCAKE ?= $(if $(shell command -v nvidia-smi),mooncake,mooncake-cpu)
BIN := $(abspath $(VENV))/bin
VLLM_BIN := $(abspath $(VLLM_VENV))/bin
DEMO_SETUP := $(if $(filter vllm,$(ENGINE)),setup-vllm,setup)
DEMO_BIN := $(if $(filter vllm,$(ENGINE)),$(VLLM_BIN),$(BIN))

.DEFAULT_GOAL := help
.PHONY: help packages setup setup-vllm native demo quick test test-vllm nightly chaos check docs bench
.PHONY: test-uncounted test-uncountable test-vllm-uncounted bench-handoff bench-load release
.PHONY: coverage coverage-seams coverage-vllm coverage-report

help: ## Show these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.stamp ## Make .venv with everything the examples and the tests need
	@:

setup-vllm: $(VLLM_VENV)/.stamp ## Make .venv-vllm, in which vLLM runs on a CPU
	@:

# First of all, and only what the goal needs: a demo over files works without a compiler.
NEEDS := venv compiler redis mooncake
demo check: NEEDS := venv $(filter redis mooncake,$(STORE))
test: NEEDS += --wanted monitoring browser fuse network
check: NEEDS += --wanted monitoring units
nightly: NEEDS += --wanted bare arm
packages:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
	  || { echo "$(PYTHON) is missing or older than 3.10: make PYTHON=/path/to/python3" >&2; exit 1; }
	@PYTHON='$(PYTHON)' scripts/system_packages.sh $(NEEDS)

native: setup ## Build libpdstore now, for GPUs too where nvcc is found, and say what it is
	@$(BIN)/python -c 'from pdstore.native.build import find_library; print(find_library(with_cuda=True))'

demo: $(DEMO_SETUP) ## P and D with a pool between them, checked (ENGINE=mini|vllm STORE=file|redis|mooncake)
	@PYTHON=$(DEMO_BIN)/python examples/run_pd_storage.sh $(addprefix --store ,$(STORE)) --engine $(ENGINE)

# A test or more of each seam, without servers and models: at most 30 s on two quiet cores.
QUICK_TESTS := tests/test_modules.py $(addprefix tests/,format/test_block.py format/test_keys.py native/test_abi.py \
  native/test_parity.py::test_every_byte_of_pieces_of_every_small_length_is_copied \
  store/arena/test_store.py::TestArenaStore worker/test_pool.py scheduler/test_prefix_cache.py engine/test_request.py \
  adapters/sglang/test_backend.py::test_pages_reach_another_server_through_every_store cli/test_main.py \
  router/test_exchange.py examples/test_mini_adapter.py::test_d_computes_one_token_and_answers_the_same[file-qwen3])
quick: setup ## A test of each seam, in half a minute
	@$(BIN)/python -m pytest -m 'not nightly and not mooncake' $(QUICK_TESTS) $(ARGS)

# Whole, it is three processes on two cores, since tests often wait.
test: setup ## The test suite
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not vllm and not nightly' \
	  $(if $(strip $(ARGS)),,-n 3 --dist loadfile) $(ARGS)

VLLM_TESTS := tests/adapters/vllm tests/examples/test_demo_vllm.py # to collect all takes 20 s
test-vllm: setup-vllm ## The tests with vLLM
	@$(VLLM_BIN)/python -m pytest -m 'vllm and not nightly' $(if $(findstring tests/,$(ARGS)),,$(VLLM_TESTS)) $(ARGS)

# The tests that enter each folder by its interface: no server of vLLM, no process of the examples.
# Left out is what counting disturbs: forks beside threads and signals at each line hang, and SIGTERM
# ends a process by coverage's own handler.
SEAMS := $(addprefix tests/,format native scheduler engine store worker cli router telemetry status misconfigurations) \
  $(filter-out $(addprefix tests/test_,docs.py house.py lint.py modules.py requirements.py),$(wildcard tests/test_*.py))
VLLM_SEAMS = $(shell grep -LE '\b(pair|launcher)\b' tests/adapters/vllm/test_*.py)
UNCOUNTABLE := fork or signal_handler or SIGTERM
# Their many cases run lines that others run, too: counting would only make them slower.
UNCOUNTED := $(addprefix tests/,store/tiers/test_contract.py store/test_conformance.py scheduler/test_break_even.py \
  worker/test_scales.py worker/test_table_sizes.py)
coverage: coverage-seams coverage-vllm coverage-report ## How much of each folder of pdstore/ the seams' tests run
# pytest ignores no folder that it is also given, so those that ARGS ignore are left out.
coverage-seams: setup # counted, an example of hypothesis may take longer than its 200 ms: the profile allows it
	@$(BIN)/python -m coverage run -m pytest -m 'not vllm and not nightly' -k 'not ($(UNCOUNTABLE))' \
	  --hypothesis-profile=ci $(addprefix --ignore=,$(UNCOUNTED)) $(if $(filter tests/%,$(ARGS)),,$(filter-out $(patsubst --ignore=%,%,$(ARGS)),$(SEAMS))) $(ARGS)
coverage-vllm: setup-vllm
	@$(VLLM_BIN)/python -m coverage run -m pytest -m 'vllm and not nightly' $(VLLM_SEAMS) $(ARGS)
coverage-report: setup
	@$(BIN)/python -m coverage combine -q && $(BIN)/python -m tests.support.rooms

# What `make test` and `make test-vllm` run beside the counted tests and OTHERS: CI runs each test once.
OTHERS := $(addprefix tests/,examples router deploy benchmarks store)
test-uncounted: setup
	@$(BIN)/python -m pytest -m 'not vllm and not nightly' $(UNCOUNTED) integrations/lmcache/tests \
	  $(filter-out $(SEAMS) $(OTHERS) tests/support tests/__pycache__,$(patsubst %/,%,$(wildcard tests/*/)) $(wildcard tests/test_*.py)) $(ARGS)
test-uncountable: setup
	@$(BIN)/python -m pytest -m 'not vllm and not nightly' -k '$(UNCOUNTABLE)' \
	  $$(grep -rlE 'fork|signal_handler|SIGTERM|StoreTests' --include='test_*.py' \
	  $(addprefix --exclude=,$(notdir $(UNCOUNTED))) $(SEAMS)) $(ARGS)
test-vllm-uncounted: setup-vllm
	@$(VLLM_BIN)/python -m pytest -m 'vllm and not nightly' $(VLLM_TESTS) $(addprefix --ignore=,$(VLLM_SEAMS)) $(ARGS)

nightly: setup-vllm ## The tests that take minutes
	@$(VLLM_BIN)/python -m pytest -m nightly $(ARGS)

chaos: $(DEMO_SETUP) ## Hurt P, D and their stores for MINUTES, from a SEED, and check every answer
	@$(DEMO_BIN)/python -m benchmarks.chaos --engine $(ENGINE) --minutes $(MINUTES) $(addprefix --seed ,$(SEED)) \
	  $(addprefix --round ,$(ROUND)) $(if $(QUICK),--quick) $(if $(STORES),--stores $(STORES))

check: setup ## Lint, format, spelling, types, the files of deploy/, the site
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/typos
	$(BIN)/clang-format --dry-run -Werror $$(git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' ':!csrc/third_party')
	$(BIN)/mypy
	PATH=$(BIN):$$PATH scripts/check_deploy.sh
	@$(MAKE) --no-print-directory docs

docs: setup ## The documents as a site, in site/index.html; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: setup ## How fast keys are computed and blocks put and got
	@$(BIN)/python -m benchmarks.keys && $(BIN)/pdstore bench --store file:///dev/shm/pdstore-bench-$$$$

bench-handoff: setup ## What a client waits for between P's answer and D's first token, on the CPU
	@$(BIN)/python -m benchmarks.handoff --cpu --stores file shm redis --tokens 1024 --rounds 1 \
	  --burst 2 --check-following

bench-load: setup ## What an engine serves under load without the pool and with it, on the CPU
	@$(BIN)/python -m benchmarks.load --cpu --windows 1 --kinds plain shm concurrent

release: .venv-release/.stamp ## Build and check the sources and the wheels (PROCESSORS="x86_64 aarch64")
	@PYTHON=.venv-release/bin/python scripts/release.sh $(PROCESSORS)

$(VENV)/.stamp: pyproject.toml integrations/lmcache/pyproject.toml constraints.txt | packages
	$(call make_venv,$(VENV))
	@$(BIN)/pip install $$([ -t 1 ] || echo -qq) $(PIP_ARGS) -c constraints.txt \
	  -e '.[redis,$(MOONCAKE),seal,cli,otel,lmcache,router]' -e integrations/lmcache \
	  $(addprefix --group ,examples test dev docs)
	@$(BIN)/pip download -qq --no-deps --only-binary :all: --dest $(VENV)/wheels sglang==$(SGLANG) \
	  || echo "no wheel of SGLang $(SGLANG) for this Python: the tests with its classes are skipped" >&2
	@$(BIN)/pip download -qq --no-deps --only-binary :all: --dest $(VENV)/wheels lmcache==$(LMCACHE) \
	  || echo "no wheel of LMCache $(LMCACHE) for this Python: the tests with its classes are skipped" >&2
	@touch $@

$(VLLM_VENV)/.stamp: pyproject.toml examples/vllm_env.py | packages
	$(call make_venv,$(VLLM_VENV))
	@PIP_ARGS='$(PIP_ARGS)' $(VLLM_BIN)/python examples/vllm_env.py \
	  -e '.[redis,mooncake-cpu,seal,cli,otel,vllm,router]' \
	  $(addprefix --group ,proxies examples test)
	@touch $@

.venv-release/.stamp: pyproject.toml | packages
	$(call make_venv,.venv-release)
	@.venv-release/bin/pip install --no-compile $$([ -t 1 ] || echo -qq) $(PIP_ARGS) --group release
	@touch $@

define make_venv
@echo "setting up $(1): a few minutes, once" >&2
@$(PYTHON) -m venv $(1)
@$(1)/bin/pip install -qq --no-compile 'pip>=25.1' # the first that knows dependency groups
endef
