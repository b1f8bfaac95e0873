"""Kernels with plain-torch references: attention, log-probs and sampling. Imported by `parallel` and layers above."""
