"""Converts files to rows, tokens and micro-batches.

The layer `tape` and the layers above it may import this package; this package may import `run`.
"""
