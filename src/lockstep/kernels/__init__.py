"""Kernels for attention, log-probs and sampling, with plain-torch references. Used by `parallel` and higher layers."""
