"""The package version, its commit and the package folder, for modules that must not import the package root.

The version comes from the newest git tag, as setuptools-scm derives it: tag v0.2.0 is version 0.2.0, and the third
commit after it is 0.2.1.dev3 with the commit as the local part. setup.py stores version and commit in the file
`_build.py` of a built package. A checkout has no such file, so git is asked there. `git archive` fills in `ARCHIVE`.
"""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

PACKAGE_FOLDER = Path(__file__).parent
ARCHIVE = "$Format:%H %(describe:tags=true,match=v[0-9]*,abbrev=9)$"
# The version before the first tag.
FIRST = "0.1.0"
BUILD = "_build.py"


def package_version() -> str:
    return _identity(PACKAGE_FOLDER)[0]


def own_commit() -> str | None:
    """Returns the git commit of this package, or None if it is unknown."""
    return _identity(PACKAGE_FOLDER)[1]


@cache  # a later checkout does not change imported code
def _identity(folder: Path) -> tuple[str, str | None]:
    """Returns the version and the commit of the package in `folder`."""
    if (folder / BUILD).is_file():
        _, built, _, stored, _ = (folder / BUILD).read_text(encoding="utf-8").split('"')
        return built, stored or None
    commit = checkout_commit(folder)
    if commit is not None:
        described = _git(folder, "describe", "--tags", "--long", "--match=v[0-9]*", "--abbrev=9", "--dirty") or ""
        if not described:
            dirty = "-dirty" if commit.endswith("-dirty") else ""
            described = f"-{_git(folder, 'rev-list', '--count', 'HEAD')}-g{commit[:9]}{dirty}"
        return version_of(described), commit
    archived, _, described = ARCHIVE.partition(" ")
    if archived.startswith("$"):
        return f"{FIRST}.dev0", None
    return version_of(described or f"-0-g{archived[:9]}"), archived


def version_of(described: str) -> str:
    """Returns the version for the output of `git describe`, such as v0.2.0-3-gabc or v0.2.0. Without a tag, the output
    begins with its second part."""
    found = re.fullmatch(r"(?:v(?P<tag>[^-]+))?(?:-(?P<count>\d+)-g(?P<hash>[0-9a-f]+))?(?P<dirty>-dirty)?", described)
    if found is None:
        raise ValueError(f"{described!r} is not the description of a commit by a tag such as v0.2.0")
    tag, count, dirty = found["tag"], int(found["count"] or 0), found["dirty"]
    if tag and not count and not dirty:
        return tag
    local = ".".join(filter(None, [found["hash"] and f"g{found['hash']}", dirty and "dirty"]))
    following = re.sub(r"\d+$", lambda number: str(int(number[0]) + 1), tag) if tag else FIRST
    return f"{following}.dev{count}+{local}"


def checkout_commit(folder: Path) -> str | None:
    """Returns the git commit of `folder`, with `-dirty` if files were changed, or None outside a checkout."""
    # If the package is installed in a virtual environment inside another git repository, the function must not return
    # the commit of that repository.
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None  # no git, or not a repository
    return answer.stdout.strip()
