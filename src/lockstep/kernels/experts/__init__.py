"""Matmuls over the experts of a layer in training: tokens are sorted once, and each expert computes its own."""
