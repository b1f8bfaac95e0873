"""Repeats a recorded run on another device, checks every stage, and finds the first divergence."""
