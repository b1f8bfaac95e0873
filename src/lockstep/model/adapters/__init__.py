"""Adapters of a PEFT model: which adapter is active, initialisation from weights, and the PEFT folder."""
