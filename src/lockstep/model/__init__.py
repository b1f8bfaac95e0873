"""Loads, checks and exports models. May be imported by `tape` and the layers above `tape`. May import `run`."""
