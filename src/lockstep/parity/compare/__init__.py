"""Comparison of two runs or logs: errors, statistical test and verdict. For `parity` and the command line."""
