"""Experiment trackers such as wandb, with one module per tracker. Only `run` may import this package."""
