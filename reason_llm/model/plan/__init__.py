"""Bytes of each memory phase, before a weight is read."""
