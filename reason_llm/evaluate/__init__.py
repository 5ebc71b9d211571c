"""Accuracy with intervals on problems that are not trained on."""
