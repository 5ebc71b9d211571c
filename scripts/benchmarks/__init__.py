"""Measurements of ``scripts/benchmark.py``: this project and others at the same work."""
