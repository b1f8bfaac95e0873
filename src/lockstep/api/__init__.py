"""The Python API: a handle on a model, and comparisons. `lockstep` exports it; lower packages do not import it."""
