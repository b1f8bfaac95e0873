"""Entry point of the rollout worker. The imports happen in the worker, not in its supervisor."""

from __future__ import annotations


def serve(connection: int) -> None:
    from lockstep.rollout.worker.worker_loop import work

    work(connection)
