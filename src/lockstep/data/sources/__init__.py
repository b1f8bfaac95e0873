"""Reads the rows of a recipe's paths: files, formats, hub data sets, user readers, and the order of mixed sources."""
