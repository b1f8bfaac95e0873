"""Loads, checks and exports models, and adds heads. Used by `tape` and all above; it may import `run`."""
