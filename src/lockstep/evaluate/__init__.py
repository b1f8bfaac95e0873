"""Evaluates a model: its answers to questions, and its loss on rows. Used by training loops and commands."""
