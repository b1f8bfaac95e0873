"""Parallelism: process groups, FSDP, tensor and context parallelism, and the watchdog.

For `data`, `model`, `run` and all above.
"""
