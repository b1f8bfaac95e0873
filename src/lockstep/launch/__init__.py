"""Starts and supervises processes: the ranks of a run (torchrun, SLURM, Ray) and workers that run user functions.

Nothing heavy is imported here: the workers must start quickly.
"""
