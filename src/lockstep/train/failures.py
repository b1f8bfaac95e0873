"""Responses of a step that could not be scored: how many are too many, and what is said of the first."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.errors import Refusal
from lockstep.types import Failure, Rollout


def refuse_failures(failed: Sequence[Rollout], total: int, most: float) -> None:
    """Stop where more than the share `most` of all responses failed."""
    if len(failed) > most * total:
        raise _refusal(failed, total, f"over reward.max_failures={most:g}")


def refuse_nothing_left(failed: Sequence[Rollout], total: int, left: int) -> None:
    """Stop where no response is left to learn from, however many may fail."""
    if not left:
        raise _refusal(failed, total, "and none is left to learn from")


def _refusal(failed: Sequence[Rollout], total: int, consequence: str) -> Refusal:
    first = failed[0]
    assert isinstance(first.score, Failure)
    return Refusal.at(
        f"reward.{first.score.part}",
        f"{len(failed)} of {total} responses could not be scored, {consequence}; the first, to "
        f"{first.prompt.question.origin}: {first.score.told}; response: {first.text[:200]!r}",
        "mend the reward, or raise reward.max_failures; the last checkpoint is untouched",
    )


def failure_warning(failed: Sequence[Rollout]) -> list[str]:
    """The first response of a step that could not be scored, with the reason."""
    if not failed:
        return []
    first = failed[0]
    assert isinstance(first.score, Failure)
    return [
        f"{len(failed)} responses could not be scored and are left out; the first, to "
        f"{first.prompt.question.origin}: {first.score.part}: {first.score.told}; it said {first.text[:80]!r}"
    ]
