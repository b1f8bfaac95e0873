"""Proof that two runs train in step, and where they part when they do not. For the command line alone."""
