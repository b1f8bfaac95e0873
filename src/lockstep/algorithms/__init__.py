"""Pure functions on tensors: advantages, losses, divergences."""
