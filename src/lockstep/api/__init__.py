"""The Python API: a handle on a model, and comparisons. The package `lockstep` exports its names; lower packages do not
import it."""
