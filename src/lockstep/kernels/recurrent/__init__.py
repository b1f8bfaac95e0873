"""Recurrent layers: kernels for the gated delta rule and for short convolutions."""
