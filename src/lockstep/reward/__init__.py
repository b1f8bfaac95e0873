"""Rewards: rules, functions, models, endpoints. `methods`, `train` and higher layers may import this package."""
