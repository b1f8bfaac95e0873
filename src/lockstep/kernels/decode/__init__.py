"""Generation: fused decoder layers, and the kernels between their matmuls."""
