"""The processes of a run: ranks, shards, and the watch over them. For `data`, `model`, `run` and all above."""
