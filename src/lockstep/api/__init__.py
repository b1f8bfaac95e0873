"""The front door for Python: a handle on a model, and comparisons. `lockstep` itself offers its names; nothing below
imports this room."""
