"""Rewards: rules, functions, models, endpoints. May be imported by `methods`, `train` and the layers above them."""
