"""reason_llm: a single-GPU, memory-frugal, serialized RL fine-tuner for language models.

Importing this package, or ``reason_llm.config``, loads neither torch nor transformers.
"""

import os

# Read when torch is loaded. OpenMP's threads wait for each other spinning; by GNU's default so long
# that a step on the CPU takes many times as long where anything else uses the cores.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__version__ = "0.1.0"
