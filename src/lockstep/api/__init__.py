"""The Python API: a handle on a loaded model, and the comparison of two runs.

The package `lockstep` exports the names of this package; lower layers must not import `lockstep.api`.
"""
