"""Converts files to rows, tokens and micro-batches.

`tape` and higher import layers (see docs/architecture.md) may import this package. This package may import `run`.
"""
