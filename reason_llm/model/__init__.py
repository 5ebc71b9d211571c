"""The one base copy and the adapters over it."""
