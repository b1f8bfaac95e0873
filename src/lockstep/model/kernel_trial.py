"""Decides whether a failed model check is caused by the model or by the device's attention kernel.

The check is repeated with plain torch instead of the kernel, and on the CPU. A replay continues with a wrong kernel, to
locate the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from lockstep.errors import Problem, Refusal

PLAIN = "sdpa"
HOST = torch.device("cpu")
# Returns why a model fails with an attention kernel on a device; None if it passes.
Trial = Callable[[str, torch.device], str | None]

_kept: ContextVar[list[Problem] | None] = ContextVar("problems that a replay locates", default=None)


def wrong_kernel(
    kernel: str, device: torch.device, why: str, trial: Trial, eager: Callable[[], float]
) -> Problem | None:
    """The problem of the device's attention; None if the model is the cause.

    `eager` returns the difference of transformers' eager attention between device and CPU, in log-probs.
    """
    if kernel != PLAIN and trial(PLAIN, device) is None:
        return Problem(
            f"device {device}",
            f"its attention kernel {kernel} is wrong: {why}. With model.attention={PLAIN} the same check passes here",
            f"set model.attention={PLAIN}, which is plain torch and slower; another version of torch or of "
            "the driver may fix the kernel, `lockstep doctor` lists matching versions, and a replay of a tape "
            "(docs/replay.md) writes a script that reproduces the fault",
            code="wrong-kernel",
        )
    if device.type == HOST.type or trial(PLAIN, HOST) is not None:
        return None
    apart, kinds = eager(), " and with ".join(dict.fromkeys((kernel, PLAIN)))
    return Problem(
        f"device {device}",
        f"attention is wrong on it with {kinds}: {why}. On the CPU the same check passes; transformers' eager "
        f"attention on this device is {apart:.2g} nats from the CPU's",
        "no setting of model.attention helps: run `lockstep doctor` for matching versions of torch and the driver, "
        "or train with device=cpu",
        code="wrong-kernel",
    )


def refuse_unless_replayed(problem: Problem) -> None:
    """Refuse a problem found before the first step. A replay collects it, continues and locates it."""
    kept = _kept.get()
    if kept is None:
        raise Refusal([problem])
    if problem not in kept:
        kept.append(problem)


@contextmanager
def judged_later() -> Iterator[list[Problem]]:
    """Collect problems of checks before the first step instead of refusing."""
    found: list[Problem] = []
    token = _kept.set(found)
    try:
        yield found
    finally:
        _kept.reset(token)
