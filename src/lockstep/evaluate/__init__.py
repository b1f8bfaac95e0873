"""Evaluates a model for training loops and commands: its answers to questions, and its loss on rows."""
