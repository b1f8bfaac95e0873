"""Attention: the transformers interface, layouts, masks, and one kernel per device with a plain-torch reference."""
