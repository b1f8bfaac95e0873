"""Engines that generate responses, and the loop that collects them. For `methods`, `train` and all above."""
