"""Processes around a program: the launcher that confines it, and the tester of its functions.

Imported by relative names, as it runs as ``jail`` alone: without the packages above, and within the
sandbox.
"""
