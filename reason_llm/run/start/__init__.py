"""The start of a run: its checks, its recovery, the rollouts that it begins from."""
