"""Attention: the transformers hook, layouts, masks, and one kernel per device and its plain-torch reference."""
