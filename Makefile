# The commands of every day; CI calls these same targets. CONTRIBUTING.md says when to use which.
NEWEST := .venv-newest
INTERPRETER := .venv-interpreter
AOT := .venv-aot
CUDA ?= cuda13

.PHONY: check format test test-slow test-newest test-interpreter test-aot test-gpu bench docs

check:
	uv run ruff format --check
	uv run ruff check
	uv run pyright
	uv run lint-imports

format:
	uv run ruff format
	uv run ruff check --fix

test:
	uv run pytest

test-slow:
	uv run pytest -m "slow and not gpu"

# The lock pins jax to the version of the GPU machines. --no-config leaves that pin out of account. These folders hold
# nearly all that jax itself may change.
test-newest:
	UV_PROJECT_ENVIRONMENT=$(NEWEST) uv sync --frozen
	uv --no-config pip install --python $(NEWEST)/bin/python --upgrade jax jaxlib
	$(NEWEST)/bin/python -c 'import jax; print("jax", jax.__version__)'
	$(NEWEST)/bin/python -m pytest tests/kernels tests/mesh tests/engine tests/e2e/test_goldens.py tests/e2e/test_sampling.py

# Triton's kernels on the CPU, in Triton's own interpreter, which needs an older numpy than the lock has.
test-interpreter:
	UV_PROJECT_ENVIRONMENT=$(INTERPRETER) uv sync --frozen
	uv --no-config pip install --python $(INTERPRETER)/bin/python triton 'numpy<2.5'
	TRITON_INTERPRET=1 $(INTERPRETER)/bin/python -m pytest --dist worksteal -m interpreter tests/kernels tests/scripts

# Kernels and steps compiled for GPUs that are not here. CUDA's libraries are a download of 2.6 GB.
test-aot:
	UV_PROJECT_ENVIRONMENT=$(AOT) uv sync --frozen --extra cuda13
	JAX_PLATFORMS=cpu $(AOT)/bin/python -m pytest --dist worksteal -m aot tests/kernels tests/engine

test-gpu:
	uv run --extra $(CUDA) pytest -n 0 -m gpu

# BENCH="--model llama-3.1-8b --load-format dummy --max-model-len 4096 --workloads L1,L8,W1" on a GPU
bench:
	uv run python scripts/bench.py $(BENCH)

docs:
	uv run python scripts/make_docs.py
