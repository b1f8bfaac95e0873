"""Files of run folders, opened only where they are regular files inside the folder that is shown."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


class Missing(Exception):
    """What was asked for is not there, or is not for the page to show. The message is for the reader of the page."""


def inside(root: Path, path: Path) -> bool:
    """Whether `path`, with all links followed, is in `root`, which is a real path."""
    return Path(os.path.realpath(path)).is_relative_to(root)


def open_inside(root: Path, path: Path) -> BinaryIO:
    """A regular file inside `root` for reading; a link that leads out of it is not followed."""
    if not inside(root, path):
        raise Missing(f"{path.name} leads out of the folder that is shown")
    try:
        # A pipe would keep a reader waiting for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Missing(f"{path.name} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Missing(f"{path.name} is no regular file")
    return os.fdopen(descriptor, "rb")


def read_small(root: Path, path: Path, most: int) -> str:
    """The text of a file that is expected to be small."""
    with open_inside(root, path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise Missing(f"{path.name} has over {most:,} bytes: too many to show")
    return content.decode("utf-8", errors="replace")
