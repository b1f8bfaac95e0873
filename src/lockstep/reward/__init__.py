"""Rewards: rules, a function, models, a remote endpoint. For `methods`, `train` and all above."""
