"""Was something kept in bf16 that must be finer? Rounding once more cannot be seen in the size of an error, but what is
left of it can: every number has an exact form in bf16, which of fp32 numbers one in 65,536 has by chance."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lockstep.parity.replay.checks import Check, Stage
from lockstep.tape.format import StepRecord

# Shares of numbers that bf16 can hold: a side with more was rounded to it, one with less was not.
ROUNDED, FINE = 0.99, 0.9
# Fewer numbers prove nothing.
ENOUGH = 32


def coarse(numbers: torch.Tensor) -> float | None:
    """The share of the numbers other than 0 that bf16 holds exactly; None of too few."""
    some = numbers[(numbers != 0) & torch.isfinite(numbers)].float()
    return float((some.bfloat16().float() == some).float().mean()) if len(some) >= ENOUGH else None


def judge_precision(stage: Stage, step: int, what: str, a: torch.Tensor, b: torch.Tensor) -> Iterator[Check]:
    """B's numbers must not be of bf16 where A's are finer."""
    ours, theirs = coarse(a), coarse(b)
    if ours is None or theirs is None or ours > FINE:
        return
    where = f"{theirs:.1%} of the numbers are bf16, of the recorded {ours:.1%}"
    yield Check(stage, step, f"{what}: precision", theirs, ROUNDED, where)


def sampled_gradients(record: StepRecord, learner: str) -> torch.Tensor:
    """The single gradients of the first update that are on the tape, of all parameters."""
    prefix = f"{learner}/0/sample/"
    found = [t for name, t in record.tensors.items() if name.startswith(prefix) and name.endswith("/gradient")]
    return torch.cat([t.reshape(-1).float() for t in found]) if found else torch.zeros(0)
