"""Replays a recorded run on another device, compares every stage of each step, and finds the first divergence."""
