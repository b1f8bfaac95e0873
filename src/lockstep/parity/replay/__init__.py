"""Replays a recorded run, judges every stage, and finds the first divergence."""
