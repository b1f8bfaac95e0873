"""Starts and supervises processes: the ranks of a run (torchrun, SLURM, Ray) and workers that run user functions.

It imports no heavy package, because workers must start quickly.
"""
