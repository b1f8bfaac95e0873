"""Kernels for attention, log-probs and sampling, with plain-torch references. `parallel` and higher layers import
them."""
