"""Compares two runs or logs: errors, statistical test and verdict. May be imported by `parity` and `cli`."""
