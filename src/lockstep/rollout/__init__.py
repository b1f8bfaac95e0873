"""Rollout engines and the collection of scored responses. May be imported by `methods`, `train` and layers above."""
