"""Matmuls over the experts of a layer in training: tokens sorted once, one product per expert or one grouped product."""
