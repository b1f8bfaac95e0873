"""Measuring a model: its answers to questions, its loss on rows. Imported by the loops and the commands."""
