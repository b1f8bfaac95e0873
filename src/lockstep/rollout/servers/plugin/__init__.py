"""Modules that vLLM imports. Its Python may not have lockstep installed, so this folder is on its PYTHONPATH."""
