"""Loads, checks and exports models. `tape` and higher layers may import this package. It may import `run`."""
