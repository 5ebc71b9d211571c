"""What runs beside a program: the launcher that walls it in, and the tester of its functions.

Imported by relative names, as it runs as ``jail`` alone: without the packages above, and within the
sandbox.
"""
