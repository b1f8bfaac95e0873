"""Quantised weights: the number formats nf4, int8 and fp8, and products with weights in these formats."""
