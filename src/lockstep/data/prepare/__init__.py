"""Writes files of rows: generated tasks, GSM8K, pairs of sampled responses. Imported only by the command line."""
