# `make` lists what there is. VENV is the folder of the Python environment.
VENV ?= .venv
CUDA_VENV ?= .venv-cuda
PYTHON_IN_VENV := $(VENV)/bin/python
unexport PYTHONDONTWRITEBYTECODE # pytest takes 8 seconds to rewrite the tests, in each of its processes, and keeps what it wrote
# freed memory is kept for what comes next: pages of the system are costly in a virtual machine
MALLOC := glibc.malloc.trim_threshold=268435456:glibc.malloc.mmap_threshold=33554432
PYTEST := GLIBC_TUNABLES=$(MALLOC) CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(PYTHON_IN_VENV) -m pytest -n logical --maxprocesses 8

.DEFAULT_GOAL := help
.PHONY: help venv quickstart format style types suite lint test test-quick test-commands test-cases test-slow test-pythons test-wheel test-gpu test-cuda test-cuda-quick first-gpu-hour drill coverage docs figures clean

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

suite: venv
	$(PYTEST) --dist loadfile --no-loadscope-reorder

lint: style types ## style and types

test: style ## style, types and the tests that need no GPU, on all cores
	@$(MAKE) --no-print-directory -j 2 types suite # one core has nothing to do while one process collects

test-quick: venv ## the tests that start nothing, train nothing and take no time
	$(PYTEST) -m 'not gpu and not slow and not runs' -q

test-commands: venv ## every command of the README and the pages that make test only checks; minutes
	$(PYTEST) -m slow tests/test_readme.py tests/docs tests/test_docs.py --dist worksteal

# the files whose default cases stand for others; `make test-slow` has these and all longer forms
CASES := curves recipes plan weights train core extension benchmarks systems security examples contrastive \
	data_prep/adoption data_prep/tasks test_api.py packaging/test_import_hook.py packaging/test_packaging.py \
	models/test_real_sizes.py models/test_casts.py models/test_every_encoder.py distributed/test_thousand_ranks.py \
	checkpoints/test_checkpoints_in_a_store.py evaluate/test_probe.py evaluate/retrieval \
	evaluate/finetune/test_finetune.py evaluate/finetune/test_many.py evaluate/finetune/test_predictions.py \
	launch/test_pretrain.py report/inspection/test_inspect.py \
	launch/test_kills.py::test_ranks_that_have_not_met_yet_die_with_their_launcher \
	launch/test_stop_moments.py::test_no_import_takes_the_signals_away \
	launch/test_launch.py::test_the_quickstart_on_four_ranks_takes_the_steps_of_one

test-cases: venv ## the pairs, optimizers, kills and injuries of which make test runs one of a kind; minutes
	$(PYTEST) -m slow -k 'not two_ranks_are and not two_ranks_leave and not by_every_verb and not real_sizes_equal and not 8192_tokens_equals and not scifact' $(CASES:%=tests/%) --dist worksteal

test-slow: venv ## the tests that are slow by nature, the wheel in a fresh environment among them; needs a package index
	$(PYTEST) -m 'slow and not gpu' --dist loadfile --no-loadscope-reorder

test-pythons: venv ## test-quick under the other Pythons that are here, with the CUDA build of torch; 8 GB each
	@sh tests/other_pythons.sh $(VENV)

coverage: venv ## lines that no test reaches; as long as all tests in one process
	$(PYTHON_IN_VENV) -m pytest --cov --cov-report=term-missing:skip-covered

test-wheel: venv ## the wheel in a fresh environment, from text to a model; minutes, and needs a package index
	OMP_NUM_THREADS=1 $(PYTHON_IN_VENV) -m pytest -n 2 -m slow tests/packaging/test_fresh.py

test-cuda: ## what can be proven of the CUDA build of torch without a GPU; makes .venv-cuda of 6 GB; an hour
	@sh tests/cuda_build/run.sh $(CUDA_VENV)

test-cuda-quick: ## the part of test-cuda that CI runs: two ranks, two faults, the guards; ten minutes
	@sh tests/cuda_build/run.sh $(CUDA_VENV) quick

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
