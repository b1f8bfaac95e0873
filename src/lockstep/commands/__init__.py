"""Implementations of the commands. Imported only by `cli.py`."""
