"""Repeats a recorded run elsewhere, judges every stage, and finds the first divergence."""
