"""Programs run against tests, in a sandbox."""
