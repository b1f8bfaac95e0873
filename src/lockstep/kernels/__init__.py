"""Kernels: attention, log-probs and sampling, each with a plain-torch reference. For `parallel` and all above it."""
