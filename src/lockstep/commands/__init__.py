"""Implements the `lockstep` commands that are more than one function call. Only `cli.py` imports this package."""
