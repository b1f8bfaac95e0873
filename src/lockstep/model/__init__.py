"""Models loaded, checked, given heads and exported. For `tape` and all above it; it may import `run`."""
