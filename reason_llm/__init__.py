"""reason_llm: a single-GPU, memory-frugal, serialized RL fine-tuner for language models.

Importing this package, or ``reason_llm.config``, loads neither torch nor transformers.
"""

import os

# Read when torch is loaded. OpenMP's threads would wait for each other spinning, and where anything
# else uses the cores, a step on the CPU takes many times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
