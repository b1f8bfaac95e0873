"""The one way bad input is answered: where it is, what is wrong with it, and what to do."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from lockstep.masking import Unresolved, expanded, masked


@dataclass(frozen=True)
class Problem:
    """One thing wrong: `where` names a key, a file and row, a token or a device."""

    where: str
    why: str
    remedy: str = ""

    def __post_init__(self) -> None:
        # Texts of a problem repeat values of the input, and are printed and logged.
        for name in ("where", "why", "remedy"):
            object.__setattr__(self, name, masked(getattr(self, name)))

    def __str__(self) -> str:
        return f"{self.where}: {self.why}" + (f"\n    -> {self.remedy}" if self.remedy else "")


class Refusal(Exception):
    """Input that cannot be worked with. Carries every problem found, not only the first."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    @classmethod
    def at(cls, where: object, why: str, remedy: str = "") -> Self:
        """Of one problem; `where` is shown as text."""
        return cls([Problem(str(where), why, remedy)])


def with_secrets(text: str, key: str) -> str:
    """A value of a recipe with the secrets that it refers to; `key` is named where one is not there."""
    try:
        return expanded(text)
    except Unresolved as error:
        raise Refusal.at(key, f"{text}: {error}", "provide it where the run starts, on every machine") from error


class LostProcess(Refusal):
    """A process that a run needs was killed or hangs, by no fault of the input: it may go on from its checkpoint."""


def refuse_all(problems: Sequence[Problem], what: str = "") -> None:
    """Refuse where there is any; of many problems with `what` the first are told and the others counted."""
    if problems:
        raise Refusal(shortened(problems, what) if what else problems)


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
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    # A first line that only announces what follows says nothing alone.
    return f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]


# What a machine answers that has no room, no permission or a broken disk, and what one does then.
_MACHINE = {
    errno.ENOSPC: "free some disk",
    errno.EDQUOT: "free some of the quota",
    errno.EFBIG: "raise the limit on the size of a file",
    errno.EROFS: "choose a folder that can be written to, or mount it writable",
    errno.EACCES: "look at its permissions",
    errno.EPERM: "look at its permissions",
    errno.EIO: "look at the disk, and at what the kernel says of it",
    errno.ESTALE: "look at the network file system",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def refusal_of_machine(error: OSError) -> Refusal | None:
    """The refusal for an error of the file system that no program can help; None for any other."""
    if error.errno not in _MACHINE:
        return None
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return Refusal.at(" and ".join(names) or "the disk", str(error.strerror), _MACHINE[error.errno])


def unwritten(path: object, error: Exception, remedy: str = "") -> Refusal:
    """The refusal for a file that could not be written."""
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    usual = _MACHINE.get(error.errno or 0, "") if isinstance(error, OSError) else ""
    return Refusal.at(path, f"could not be written: {why}", "; ".join(part for part in (usual, remedy) if part))


class Interrupted(Exception):
    """The user asked to stop; the step was finished and saved."""


# EX_TEMPFAIL of sysexits.h: the run has stalled, or has lost what it needs (`LostProcess`), and is worth another try.
STALLED = 75
