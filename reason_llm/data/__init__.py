"""Data files and Hub sets become rows, and rows become prompts."""
