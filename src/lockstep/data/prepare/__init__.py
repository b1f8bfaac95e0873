"""Writes files of rows: generated tasks, GSM8K, pairs of sampled responses. Only the command line uses this package."""
