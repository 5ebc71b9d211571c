"""What runs beside and around an untrusted program: its launcher, its walls, its test harness.

Standard library only, and nothing of the project: these files are started as bare programs.
"""
