"""Serving engines (vLLM and its kin) as rollout engines: servers with weights of their own, asked over HTTP.

What all of them share: `engine.py` is what the run sees; `life.py`, `process.py` and `fleet.py` are the servers and who
is asked; `handover.py` gives them weights, through files (`weights.py`), by a collective (`collective.py`) or by the
memory that they are in (`memory.py`), and `probe.py` proves that they came; `server_client.py` sends HTTP requests, and
`request_batcher.py` sends many samples in one. What one of them calls things is its `Dialect` (`dialect.py`), a file of
its own; `plugin` is what vLLM's own processes import.
"""
