"""Errors in user input. Each says where the problem is, what is wrong, and how to fix it."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.masking import Unresolved, expanded, masked

if TYPE_CHECKING:
    from typing import Self  # Python 3.10 does not have it


@dataclass(frozen=True)
class Problem:
    """One problem. `where` names a key, a file and row, a token or a device."""

    where: str
    why: str
    remedy: str = ""

    def __post_init__(self) -> None:
        # The texts contain input values and are printed and logged, so secrets are masked.
        for name in ("where", "why", "remedy"):
            object.__setattr__(self, name, masked(getattr(self, name)))

    def __str__(self) -> str:
        return f"{self.where}: {self.why}" + (f"\n    -> {self.remedy}" if self.remedy else "")


class Refusal(Exception):
    """Invalid input. Carries all problems, not only the first."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    @classmethod
    def at(cls, where: object, why: str, remedy: str = "") -> Self:
        """Creates a refusal with one problem; `where` is converted to text."""
        return cls([Problem(str(where), why, remedy)])


def with_secrets(text: str, key: str) -> str:
    """Returns a recipe value with its secret references resolved. A missing secret is reported at `key`."""
    try:
        return expanded(text)
    except Unresolved as error:
        raise Refusal.at(key, f"{text}: {error}", "provide it on every machine where the run starts") from error


class RenamedKey(FutureWarning):
    """A recipe uses the old name of a key."""


class LostProcess(Refusal):
    """A process of the run was killed or hangs. The input is not the cause, so the run can be resumed."""


def refuse_all(problems: Sequence[Problem], what: str = "") -> None:
    """Raises a refusal if there are problems. With `what`, it lists the first problems and counts the others."""
    if problems:
        raise Refusal(shortened(problems, what) if what else problems)


def shortened(problems: Sequence[Problem], what: str, most: int = 10) -> list[Problem]:
    """Returns the first `most` problems and the number of the others."""
    hidden = len(problems) - most
    others = [Problem(f"{hidden:,} more {what}", "have problems too")] if hidden > 0 else []
    return [*problems[:most], *others]


def missing_extra(package: str, extra: str, needed_for: str) -> Refusal:
    """Returns the refusal for an optional package that is not installed."""
    return Refusal.at(
        f"package {package}",
        f"needed for {needed_for} and not installed",
        f'in a checkout: pip install -c constraints.txt -e ".[{extra}]"; elsewhere: pip install "lockstep-rl[{extra}]"',
    )


def first_line(error: BaseException) -> str:
    """Returns the message of an error on one line."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    # If the first line ends with a colon, the second line is added.
    return f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]


# Remedies for errors of the file system: no space, no permission, broken disk.
_MACHINE = {
    errno.ENOSPC: "free some disk",
    errno.EDQUOT: "free some of the quota",
    errno.EFBIG: "raise the file size limit",
    errno.EROFS: "choose a writable folder, or mount it writable",
    errno.EACCES: "check its permissions",
    errno.EPERM: "check its permissions",
    errno.EIO: "check the disk and the kernel log",
    errno.ESTALE: "check the network file system",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def refusal_of_machine(error: OSError) -> Refusal | None:
    """Returns the refusal for a file system error of the machine; None for any other error."""
    if error.errno not in _MACHINE:
        return None
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return Refusal.at(" and ".join(names) or "the disk", str(error.strerror), _MACHINE[error.errno])


def unwritten(path: object, error: Exception, remedy: str = "") -> Refusal:
    """Returns the refusal for a file that could not be written."""
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    advice = _MACHINE.get(error.errno or 0, "") if isinstance(error, OSError) else ""
    return Refusal.at(path, f"could not be written: {why}", "; ".join(part for part in (advice, remedy) if part))


class Interrupted(Exception):
    """The user stopped the run; the step was completed and saved."""


# Exit code EX_TEMPFAIL of sysexits.h: the run stalled or lost a process (`LostProcess`), and a retry can help.
STALLED = 75
