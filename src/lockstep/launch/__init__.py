"""Starts and supervises processes: the ranks of a run (torchrun, SLURM, Ray) and workers that run user functions.

This package imports no large package such as torch when it is loaded, because workers must start quickly.
"""
