"""OpenRLHF's command lines, in both dialects: flat flags (0.7) and dotted ones (0.11)."""
