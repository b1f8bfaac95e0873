"""Parallelism: process groups, FSDP, tensor and context parallelism, and the watchdog.

Used by `data`, `model`, `run` and all above.
"""
