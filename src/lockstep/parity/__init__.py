"""Compares two runs, or a run with its replay, and locates the first divergence. Used only by the command line."""
