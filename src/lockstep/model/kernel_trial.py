"""Whose fault it is that a model fails its check at load: the model's, or that of the device's attention kernel.

The same check is made with plain torch in the kernel's place, and on the CPU. A replay goes on with a wrong kernel, to
say where it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from lockstep.errors import Problem, Refusal

PLAIN = "sdpa"
HOST = torch.device("cpu")
# Why a model fails with an attention kernel on a device; None where it passes.
Trial = Callable[[str, torch.device], str | None]

_kept: ContextVar[list[Problem] | None] = ContextVar("problems that a replay locates", default=None)


def wrong_kernel(
    kernel: str, device: torch.device, why: str, trial: Trial, eager: Callable[[], float]
) -> Problem | None:
    """The problem with the device's attention; None where it is the model that cannot be served.

    `eager` is how far transformers' own plain attention on the device lies from the CPU's, in log-probs.
    """
    if kernel != PLAIN and trial(PLAIN, device) is None:
        return Problem(
            f"device {device}",
            f"its attention kernel {kernel} is wrong: {why}. With model.attention={PLAIN} the same check passes here",
            f"set model.attention={PLAIN}, which is plain torch and slower; another version of torch or of "
            "the driver may have a right kernel, `lockstep doctor` knows which belong together, and a replay of a tape "
            "(docs/replay.md) writes a script that shows the fault",
        )
    if device.type == HOST.type or trial(PLAIN, HOST) is not None:
        return None
    apart, kinds = eager(), " and with ".join(dict.fromkeys((kernel, PLAIN)))
    return Problem(
        f"device {device}",
        f"attention is wrong on it with {kinds}: {why}. On the CPU the same check passes; transformers' eager "
        f"attention on this device is {apart:.2g} nats from the CPU's",
        "no setting of model.attention helps: run `lockstep doctor` for the versions of torch and the driver that "
        "belong together, or train with device=cpu",
    )


def refuse_unless_replayed(problem: Problem) -> None:
    """Refuse what a check before the first step finds wrong. A replay keeps the problem, continues and locates it."""
    kept = _kept.get()
    if kept is None:
        raise Refusal([problem])
    if problem not in kept:
        kept.append(problem)


@contextmanager
def judged_later() -> Iterator[list[Problem]]:
    """Inside of it what a check before the first step finds is no refusal: the problems are collected here."""
    found: list[Problem] = []
    token = _kept.set(found)
    try:
        yield found
    finally:
        _kept.reset(token)
