"""Rewards: rules, user functions, reward models and remote endpoints.

May be imported by `methods`, `train` and the layers above them.
"""
