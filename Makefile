# `make help` lists what there is. Each target makes the virtual environment it needs from nothing, and touches nothing when
# nothing changed. Python sources are used in place; a changed C++ source, CMakeLists.txt or pyproject.toml rebuilds.

PYTHON ?= python3
DEMO_ARGS ?=
BENCH_ARGS ?=
FUZZ_SECONDS ?= 30
GUARD_ARGS ?=
PYTEST_ARGS ?=

# Tests are spread over the cores, but no more than eight: each process has a server of its own. In one: PYTEST_ARGS="-n 0".
PYTEST_SPREAD := --numprocesses auto --maxprocesses 8 --dist worksteal

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test test-all test-ray lint bench sanitize sanitize-cpp sanitize-python fuzz guard accept-instructions clean FORCE

MAIN := .venv
ALL := .venv-all
SANITIZED := .venv-sanitize
VENVS := $(MAIN) $(ALL) $(SANITIZED)

NATIVE_INPUTS := pyproject.toml CMakeLists.txt src/gradquorum/_version.py \
                 $(shell find cpp/include cpp/bind -type f 2>/dev/null) $(wildcard cpp/include/* cpp/bind)

# The compiler that CMake will find (it looks at the environment's CXX first), or nothing.
ifneq ($(origin CXX),environment)
  CXX := $(firstword $(foreach name,c++ g++ clang++,$(shell command -v $(name) 2>/dev/null)))
endif
# The engine that `make test` insists on: a build that came out without its native part must not pass for a good one.
EXPECTED_ENGINE ?= $(if $(CXX),native,reference)

# Their doctests run where the frameworks are: make test-all.
WITHOUT_ADAPTERS := $(addprefix --ignore=src/gradquorum/,jax tensorflow torch)
WITHOUT_NATIVE := $(if $(filter reference,$(EXPECTED_ENGINE)),--ignore=src/gradquorum/engine/native.py)

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Variables: PYTHON (3.11 or newer), DEMO_ARGS, PYTEST_ARGS, BENCH_ARGS, FUZZ_SECONDS; RIVALS=1 benches beside PyTorch and TensorFlow."

# --- virtual environments ---------------------------------------------------------------------------------------------
# VENV/.interpreter  made for this Python, this compiler and this folder; made anew when one of them changed
# VENV/.package      the package, in place, with the cli extra
# VENV/.group-NAME   a dependency group of pyproject.toml

$(VENVS:=/.interpreter): FORCE
	@id=$$($(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("this is Python %d.%d" % sys.version_info[:2]); \
	print(sys.executable, sys.version.split()[0], "$(CURDIR)", "$(CXX)")') \
	|| { echo "make: gradquorum needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3" >&2; exit 1; }; \
	if [ "$$(cat $@ 2>/dev/null)" != "$$id" ]; then \
	  echo "make: creating $(@D)"; \
	  rm -rf $(@D) build/$(@D); \
	  $(PYTHON) -m venv $(@D) || { echo "make: $(PYTHON) -m venv failed (on Debian and Ubuntu: install python3-venv)" >&2; exit 1; }; \
	  $(@D)/bin/python -m pip install --quiet --upgrade 'pip>=25.1' && echo "$$id" > $@; \
	fi

PIP_INSTALL = $(@D)/bin/python -m pip install --quiet --disable-pip-version-check
INSTALL_PACKAGE = $(PIP_INSTALL) --group build && \
                  $(PIP_INSTALL) --no-build-isolation -Cbuild-dir=build/$(@D) $(1) --editable '.[cli]' && touch $@

$(MAIN)/.package $(ALL)/.package: %/.package: %/.interpreter $(NATIVE_INPUTS)
	@echo "make: installing gradquorum into $(@D)"
	@$(call INSTALL_PACKAGE)

$(SANITIZED)/.package: %/.package: %/.interpreter $(NATIVE_INPUTS)
	@echo "make: installing gradquorum into $(@D), instrumented"
	@$(call INSTALL_PACKAGE,-Ccmake.build-type=RelWithDebInfo -Ccmake.define.GRADQUORUM_PYTHON=ON \
	  -Ccmake.define.GRADQUORUM_SANITIZE=address$(comma)undefined)
comma := ,

define group_rule
$(1)/.group-$(2): $(1)/.package pyproject.toml
	@echo "make: installing the $(2) tools into $$(@D)"
	@$$(PIP_INSTALL) --group $(2) && touch $$@
endef
$(foreach venv,$(VENVS),$(foreach group,lint test frameworks rivals ray,$(eval $(call group_rule,$(venv),$(group)))))

# --- what people run --------------------------------------------------------------------------------------------------

demo: $(MAIN)/.package ## four workers train word vectors on real text (DEMO_ARGS="--workers 8")
	@$(MAIN)/bin/gradquorum demo $(DEMO_ARGS)
	@echo "make demo: it worked."

# $(1): Python. Says which engine is installed, and fails when it is not the one to be expected on this machine.
define check_engine
	@$(1) -c 'import warnings; warnings.simplefilter("ignore"); import gradquorum as gq; \
	print("engine:", gq.engine_name); gq.engine_name == "$(EXPECTED_ENGINE)" or exit("expected the $(EXPECTED_ENGINE) engine")'
endef

test: $(MAIN)/.group-test ## the tests, under five minutes
	$(call check_engine,$(MAIN)/bin/python)
	$(MAIN)/bin/python -m pytest --quiet --doctest-modules src $(WITHOUT_NATIVE) $(WITHOUT_ADAPTERS)
	$(MAIN)/bin/python -m pytest tests $(PYTEST_SPREAD) -m "not slow and not frameworks" $(PYTEST_ARGS)
	@echo "make test: everything passed."

# In three goes: many tests fork, which with JAX's threads beside them may deadlock, and those on Ray share a cluster.
# JAX is loaded by test files of these already.
OF_FRAMEWORKS := tests/facade tests/frameworks
run_tests_on_ray = $(ALL)/bin/python -m pytest tests $(PYTEST_SPREAD) --require-all -m "ray and not frameworks" \
                   $(OF_FRAMEWORKS:%=--ignore=%) $(PYTEST_ARGS)

test-all: $(ALL)/.group-test $(ALL)/.group-frameworks $(ALL)/.group-ray ## with PyTorch, JAX, TensorFlow and Ray installed; nothing may be skipped
	$(call check_engine,$(ALL)/bin/python)
	$(ALL)/bin/python -m pytest --quiet --doctest-modules src
	$(ALL)/bin/python -m pytest tests $(PYTEST_SPREAD) --require-all -m "not ray and not frameworks" $(OF_FRAMEWORKS:%=--ignore=%) $(PYTEST_ARGS)
	$(ALL)/bin/python -m pytest tests $(PYTEST_SPREAD) --require-all -m frameworks $(PYTEST_ARGS)
	$(run_tests_on_ray)
	$(ALL)/bin/python -m benchmarks.instructions $(GUARD_ARGS)
	@echo "make test-all: everything passed."

test-ray: $(ALL)/.group-test $(ALL)/.group-frameworks $(ALL)/.group-ray ## those of test-all that are on Ray
	$(run_tests_on_ray)
	@echo "make test-ray: everything passed."

lint: $(MAIN)/.group-lint ## ruff and mypy
	$(MAIN)/bin/ruff check .
	$(MAIN)/bin/ruff format --check .
	$(MAIN)/bin/mypy
	@echo "make lint: nothing to complain about."

BENCH := $(if $(RIVALS),$(ALL),$(MAIN))
bench: $(BENCH)/.package $(if $(RIVALS),$(BENCH)/.group-frameworks $(BENCH)/.group-rivals $(BENCH)/.group-ray) ## the benchmarks (BENCH_ARGS, RIVALS=1)
	$(BENCH)/bin/python -m benchmarks $(BENCH_ARGS)

sanitize: sanitize-cpp sanitize-python ## C++ and Python tests under AddressSanitizer, UBSan and ThreadSanitizer
	@echo "make sanitize: everything passed, no reports."

# ThreadSanitizer of older compilers cannot start where addresses are randomised widely; setarch -R switches that off.
WITHOUT_ASLR := $(shell setarch -R true 2>/dev/null && echo setarch -R)

sanitize-cpp: $(MAIN)/.package
	@ls cpp/tests/*.cpp >/dev/null
	@set -e; for sanitizer in address,undefined thread; do \
	  echo "make: C++ tests under $$sanitizer"; \
	  $(MAIN)/bin/cmake -S . -B build/sanitize-$$sanitizer -G Ninja --log-level=WARNING -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(MAIN)/bin/ninja \
	    -DGRADQUORUM_BUILD_TESTS=ON -DGRADQUORUM_PYTHON=OFF -DGRADQUORUM_SANITIZE=$$sanitizer \
	    -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_COMPILE_WARNING_AS_ERROR=ON; \
	  $(MAIN)/bin/cmake --build build/sanitize-$$sanitizer; \
	  UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 \
	    $(WITHOUT_ASLR) $(MAIN)/bin/ctest --test-dir build/sanitize-$$sanitizer --output-on-failure --no-tests=error; \
	done

# The interpreter itself is not instrumented, so the runtime must be loaded before it, and libstdc++ with it (the runtime wraps
# the throwing of exceptions). Leaks are not reported: the interpreter's own would drown ours. PYTHONMALLOC gives each object its own bounds.
# Tests ask for more memory than there is; that is an answer, no report.
# --capture=sys: a report is written to the descriptor itself, and must be seen.
sanitize-python: $(SANITIZED)/.group-test
	$(call check_engine,$(INSTRUMENTED))
	$(INSTRUMENTED) -m pytest tests $(PYTEST_SPREAD) --capture=sys -m "not slow and not frameworks" -o timeout=600 $(PYTEST_ARGS)

INSTRUMENTED = LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc $(SANITIZED)/bin/python

fuzz: $(MAIN)/.package ## libFuzzer on the C++ core, FUZZ_SECONDS=30 for each target (needs clang)
	@$(MAIN)/bin/python -m tests.fuzz.libfuzzer --seconds $(FUZZ_SECONDS)
	@echo "make fuzz: nothing found."

guard: $(MAIN)/.package ## instructions of each kernel against the accepted counts (needs valgrind)
	@$(MAIN)/bin/python -m benchmarks.instructions $(GUARD_ARGS)
	@echo "make guard: as accepted, or nothing accepted for this compiler."

accept-instructions: $(MAIN)/.package ## accept the instruction counts of this compiler as they are now
	@$(MAIN)/bin/python -m benchmarks.instructions --accept

clean: ## remove environments, builds and caches
	rm -rf $(VENVS) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests benchmarks -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
