# `make` lists what there is. VENV is the folder of the Python environment.
VENV ?= .venv
CUDA_VENV ?= .venv-cuda
PYTHON_IN_VENV := $(VENV)/bin/python
unexport PYTHONDONTWRITEBYTECODE # pytest takes 8 seconds to rewrite the tests, in each of its processes, and keeps what it wrote
# freed memory is kept for what comes next: pages of the system are costly in a virtual machine
MALLOC := glibc.malloc.trim_threshold=268435456:glibc.malloc.mmap_threshold=33554432
PYTEST := GLIBC_TUNABLES=$(MALLOC) CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(PYTHON_IN_VENV) -m pytest -n logical --maxprocesses 8 --dist worksteal
SLOW ?= slow and not weekly and not gpu

.DEFAULT_GOAL := help
.PHONY: help venv quickstart format style types lint test test-quick test-slow test-pythons test-gpu test-cuda first-gpu-hour drill docs figures clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: ## the Python environment: made, mended or updated; nothing if it is current
	@sh requirements/install.sh $(VENV)

quickstart: venv ## text to a trained small model on this machine
	$(PYTHON_IN_VENV) -m modernbert_train pretrain --preset quickstart

format: venv ## put the code into its style
	$(PYTHON_IN_VENV) -m ruff check --fix .
	$(PYTHON_IN_VENV) -m ruff format .

style: venv
	$(PYTHON_IN_VENV) -m ruff check .
	$(PYTHON_IN_VENV) -m ruff format --check .

types: venv
	$(VENV)/bin/pyrefly check --python-interpreter-path $(PYTHON_IN_VENV)

lint: style types ## style and types

test: lint ## style, types and the tests that need no GPU, on all cores
	@$(PYTHON_IN_VENV) -m tests.support.compile_kernels # once; each process would compile them otherwise
	$(PYTEST)

test-quick: venv ## the tests that start nothing, train nothing and take no time
	$(PYTEST) -m 'not gpu and not slow and not runs' -q

test-slow: venv ## the tests marked slow, the wheel in a fresh environment among them; needs a package index; SLOW='slow and not gpu' adds those marked weekly
	$(PYTEST) -m '$(SLOW)'

test-pythons: venv ## test-quick under the other Pythons that are here, with the CUDA build of torch; 8 GB each
	@sh tests/other_pythons.sh $(VENV)

test-cuda: ## what can be proven of the CUDA build of torch without a GPU; makes .venv-cuda of 6 GB; PART=quick runs in ten minutes what CI does
	@sh tests/cuda_build/run.sh $(CUDA_VENV) $(PART)

test-gpu: venv ## the tests that need a GPU, on this machine's; minutes
	$(PYTHON_IN_VENV) -m pytest -m gpu tests/gpu --durations=15

first-gpu-hour: venv ## an hour on 1, 2, 4 or 8 GPUs: whether all of it works there, and how fast; into ./first-gpu-hour; it resumes
	$(PYTHON_IN_VENV) -m benchmarks.first_gpu_hour

drill: venv ## runs killed, damaged and starved a thousand times, into ./drill; an hour; it resumes where it was stopped
	OMP_NUM_THREADS=1 $(PYTHON_IN_VENV) -m benchmarks.drill --out drill

docs: venv ## the documentation as a site, in .site
	$(PYTHON_IN_VENV) -m mkdocs build --strict -f .mkdocs.yml

figures: venv ## write the figures that pages quote, from the program and benchmarks/RESULTS.md
	$(PYTHON_IN_VENV) -m tests.docs.figures

clean: ## remove caches and builds; the environment and the runs stay
	rm -rf build dist .site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -path './$(VENV)' -prune -o -path './$(CUDA_VENV)' -prune -o -path './.venv-3.*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
