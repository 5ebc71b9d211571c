"""A trained adapter as a model for others."""
