"""Pure functions on tensors: advantages, losses, divergences. They import `types` and `errors`; all may import them."""
