"""Loads, checks and exports models. `tape` and higher layers may import this package. This package may import `run`."""
