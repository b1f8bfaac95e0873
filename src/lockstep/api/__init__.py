"""The Python API: a handle on a model, and comparisons. The package `lockstep` exports its names; lower layers must not
import it."""
