"""The one way bad input is answered: where it is, what is wrong with it, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing wrong: `where` names a key, a file and row, a token or a device."""

    where: str
    why: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.why}" + (f"\n    -> {self.remedy}" if self.remedy else "")


class Refusal(Exception):
    """Input that cannot be worked with. Carries every problem found, not only the first."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    @classmethod
    def at(cls, where: str, why: str, remedy: str = "") -> Refusal:
        return cls([Problem(where, why, remedy)])


def shortened(problems: Sequence[Problem], what: str, most: int = 10) -> list[Problem]:
    """The first `most` problems, and how many more there are."""
    hidden = len(problems) - most
    rest = [Problem(f"{hidden:,} more {what}", "are refused too")] if hidden > 0 else []
    return [*problems[:most], *rest]


def missing_extra(package: str, extra: str, needed_for: str) -> Refusal:
    """The refusal for an optional package that is not installed."""
    return Refusal.at(
        f"package {package}",
        f"needed for {needed_for} and not installed",
        f'in a checkout: pip install -c constraints.txt -e ".[{extra}]"; elsewhere: pip install "lockstep-rl[{extra}]"',
    )


def first_line(error: BaseException) -> str:
    """What an error says, on one line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


class Interrupted(Exception):
    """The user asked to stop; the step was finished and saved."""
