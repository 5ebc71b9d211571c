"""Measurements against other trainers, in one run each; ``scripts/benchmark.py`` starts them."""
