"""A run on disk and alive."""
