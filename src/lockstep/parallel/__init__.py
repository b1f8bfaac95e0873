"""Parallelism: process groups, FSDP, tensor and context parallelism, and the watchdog.

The packages `data`, `model`, `run` and higher layers may import this package.
"""
