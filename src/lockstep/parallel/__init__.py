"""The processes of a run: ranks, shards, divided sequences, and the watch over them.

For `data`, `model`, `run` and all above.
"""
