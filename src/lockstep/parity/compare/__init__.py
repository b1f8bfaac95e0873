"""Curves of two runs, or of logs: how far apart, and whether more than a repeat. For `parity` and the command line."""
