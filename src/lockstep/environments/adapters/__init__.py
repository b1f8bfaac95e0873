"""Adapters: environments and tools that are written for other frameworks."""
