"""Collects what is wrong with a set of files, so that one refusal names it all."""

from __future__ import annotations

from lockstep.errors import Problem, Refusal

SHOWN = 10


class Problems:
    """Keeps the first problems in full and counts the rest: a broken file can have a million bad lines."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.first: list[Problem] = []
        self.count = 0

    def add(self, where: object, why: str, remedy: str = "") -> None:
        self.count += 1
        if len(self.first) < SHOWN:
            self.first.append(Problem(str(where), why, remedy))

    def refuse(self) -> None:
        """Raises the refusal if anything was found."""
        if not self.count:
            return
        more = self.count - len(self.first)
        raise Refusal(self.first + ([Problem(self.subject, f"and {more} more like these")] if more else []))
