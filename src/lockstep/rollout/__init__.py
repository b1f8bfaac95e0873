"""Rollout engines and collection of scored responses. `methods`, `train` and higher layers may import this package."""
