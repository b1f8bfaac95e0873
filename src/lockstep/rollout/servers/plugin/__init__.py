"""Modules that vLLM imports. vLLM's Python may not have lockstep installed, so this folder is on its PYTHONPATH."""
