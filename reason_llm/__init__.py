"""reason_llm: a single-GPU, memory-frugal, serialized RL fine-tuner for language models.

Importing this package, or ``reason_llm.config``, loads neither torch nor transformers.
"""

__version__ = "0.1.0"
