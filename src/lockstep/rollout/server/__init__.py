"""Serving engines (vLLM and its kin) as rollout engines: servers with weights of their own, asked over HTTP.

What all of them share is in `engine.py`, `fleet.py`, `line.py`, `process.py`, `weights.py` and `probe.py`; what one of
them calls things is its `Dialect` (`dialect.py`), a file of its own.
"""
