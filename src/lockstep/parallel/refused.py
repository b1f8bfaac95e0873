"""What one rank refuses, refused by all: the others would wait for it in their next collective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from lockstep.errors import Problem, Refusal, refuse_all


@contextmanager
def refused_together(what: str) -> Iterator[None]:
    """Every rank of the run does what is inside; all raise the problems with `what` that any of them found there (a
    collective)."""
    problems: list[Problem] = []
    try:
        yield
    except Refusal as refusal:
        problems = refusal.problems
    every: list[list[Problem]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, problems)
    # Of a tensor that several have slices of, each may say the same.
    refuse_all(list(dict.fromkeys(problem for found in every for problem in found)), what)
