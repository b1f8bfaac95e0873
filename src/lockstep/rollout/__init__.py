"""Engines that generate responses, and the loop that collects them. Used by `methods`, `train` and all above."""
