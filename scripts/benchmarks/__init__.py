"""What ``scripts/benchmark.py`` measures: this project beside others, at the same work."""
