"""Responses of a step that could not be generated or scored: how many are too many, and what is said of the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import Refusal
from lockstep.types import ROLLOUT_FUNCTION, Failure, Rollout


@dataclass(frozen=True)
class Unscored:
    """How many there were, and the first of them."""

    count: int
    first: Sequence[Rollout]


def refuse_failures(failed: Unscored, total: int, most: float) -> None:
    """Stop where more than the share `most` of all responses failed."""
    if failed.count > most * total:
        raise _refusal(failed, total, f"over reward.max_failures={most:g}")


def refuse_nothing_left(failed: Unscored, total: int, left: int) -> None:
    """Stop where no response is left to learn from, however many may fail."""
    if not left:
        raise _refusal(failed, total, "and none is left to learn from")


def _refusal(failed: Unscored, total: int, consequence: str) -> Refusal:
    first = failed.first[0]
    assert isinstance(first.score, Failure)
    what = "function" if _of_rollout(first.score) else "reward"
    return Refusal.at(
        first.score.key,
        f"{failed.count} of {total} responses {_what(first.score)}, {consequence}; the first, to "
        f"{first.prompt.question.origin}: {first.score.told}{_response(first, 200)}",
        f"mend the {what}, or raise reward.max_failures; the last checkpoint is untouched",
    )


def failure_warning(failed: Unscored) -> list[str]:
    """The first response of a step that failed, with the reason."""
    if not failed.count:
        return []
    first = failed.first[0]
    assert isinstance(first.score, Failure)
    return [
        f"{failed.count} responses {_what(first.score)} and are left out; the first, to "
        f"{first.prompt.question.origin}: {first.score.part}: {first.score.told}{_response(first, 80)}"
    ]


def _of_rollout(failure: Failure) -> bool:
    """Whether it was the rollout function that failed, and no reward."""
    return failure.part == ROLLOUT_FUNCTION


def _what(failure: Failure) -> str:
    return "could not be generated or scored" if _of_rollout(failure) else "could not be scored"


def _response(rollout: Rollout, most: int) -> str:
    return f"; response: {rollout.text[:most]!r}" if rollout.ids else ""
