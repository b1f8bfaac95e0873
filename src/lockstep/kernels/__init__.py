"""Attention, log-probs and noise, each fast kernel with a plain-torch twin. For `parallel` and all above it."""
