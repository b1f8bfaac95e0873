"""The implementation of commands that need more than one call. Only `cli.py` imports it."""
