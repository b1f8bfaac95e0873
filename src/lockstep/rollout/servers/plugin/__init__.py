"""Files for the Python of a serving engine, which need not have lockstep: this folder is put on its PYTHONPATH."""
