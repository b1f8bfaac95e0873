"""A worker process that generates responses during training. `rollout` and higher layers may import this package."""

from __future__ import annotations


def serve_worker(connection: int) -> None:
    """Runs the rollout worker. The worker modules are imported inside this function, so that the supervisor process
    does not load these modules."""
    from lockstep.rollout.worker.worker_loop import work

    work(connection)
