"""Modules for the Python of a serving engine, which may not have lockstep: this folder is on its PYTHONPATH."""
