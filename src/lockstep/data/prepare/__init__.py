"""Writes row files: generated tasks, GSM8K, pairs of sampled responses. Used only by the command line."""
