"""Answers compared as mathematics."""
