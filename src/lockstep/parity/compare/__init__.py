"""Compares two runs or logs: errors, statistical test and verdict. Used by `parity`, `cli`, `api` and `serve`."""
