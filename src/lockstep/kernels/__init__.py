"""Attention, log-prob and sampling kernels with plain-torch references, for `parallel` and higher import layers."""
