"""Loads, checks and exports models. May be imported by `tape` and the layers above it; may import `run`."""
