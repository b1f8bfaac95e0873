"""Rewards: rules, a function, models, a remote endpoint. Used by `methods`, `train` and all above."""
