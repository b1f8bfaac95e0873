"""Where the rollout worker begins. What it needs is imported in the worker itself, not in the supervisor above it."""

from __future__ import annotations


def serve(connection: int) -> None:
    from lockstep.rollout.worker.worker_loop import work

    work(connection)
