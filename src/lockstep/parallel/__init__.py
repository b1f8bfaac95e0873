"""Parallelism: process groups, FSDP, tensor and context parallelism, and the watchdog.

May be imported by `data`, `model`, `run` and the layers above these.
"""
