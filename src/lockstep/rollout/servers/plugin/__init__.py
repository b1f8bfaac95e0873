"""Modules that a serving engine imports. Its Python may not have lockstep, so this folder is on its PYTHONPATH."""
