"""Writes files of rows: generated tasks, GSM8K, pairs of sampled responses. Commands and `compat` use this package."""
