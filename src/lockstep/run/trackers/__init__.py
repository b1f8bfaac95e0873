"""Experiment trackers such as wandb, one per file, which imports the package. May be imported only by `run`."""
