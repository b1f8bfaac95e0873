"""Rollout engines and the collection of scored responses. `methods`, `train` and higher layers may import it."""
