"""Curves of two runs, or of anybody's logs: how far apart, and whether that is more than a repeat."""
