"""Starts and supervises processes: the ranks of a run (torchrun, SLURM, Ray) and workers that run user functions.

Imports no heavy package: workers must start quickly.
"""
