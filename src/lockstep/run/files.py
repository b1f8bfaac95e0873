"""Files that appear whole or not at all, and the checksum of what is in them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import unwritten

ASIDE = ".writing-"
"""What the name of a file or folder begins with until it is whole."""


@contextlib.contextmanager
def written_aside(path: Path, *, over: bool = False, durable: bool = True) -> Iterator[Path]:
    """Where to write the file or folder that takes the name `path` when the block ends well; else nothing of it stays.

    A kill or a power cut leaves the old one or the new one, never half of it. A folder that is there already is
    replaced with `over` only. Without `durable` a power cut may cost the last writing, which then need not wait for
    the disk.
    """
    aside = cleared_aside(path)
    try:
        yield aside
        take_name(aside, path, over=over, durable=durable)
    except BaseException:
        with contextlib.suppress(OSError):  # a disk that cannot be written to has nothing to remove
            _remove(aside)
        raise


def aside_of(path: Path) -> Path:
    """Where to write what will be `path`."""
    return path.with_name(f"{ASIDE}{path.name}")


def cleared_aside(path: Path) -> Path:
    """The same, with nothing there."""
    aside = aside_of(path)
    _remove(aside)
    return aside


def take_name(aside: Path, path: Path, *, over: bool = False, durable: bool = True) -> None:
    """What was written aside becomes `path`, all at once."""
    if durable:
        for written in [*aside.rglob("*"), aside]:
            sync_path(written)
    if over and path.is_dir():
        shutil.rmtree(path)
    aside.replace(path)
    if durable:
        sync_path(path.parent)


def _remove(aside: Path) -> None:
    """What a kill left of an earlier try, or an error of this one."""
    if aside.is_dir():
        shutil.rmtree(aside)
    else:
        aside.unlink(missing_ok=True)


def replace_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write `path` anew, for callers with advice of their own on a disk that takes no more. `private`: for the user
    alone, as a file that repeats the recipe or the command line."""
    with written_aside(path) as aside:
        if private:
            write_private(aside, text)
        else:
            aside.write_text(text, encoding="utf-8", newline="\n")


def write_private(path: Path, content: str | bytes | bytearray) -> None:
    """A new file that nobody but the user can read, from its first moment."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


def atomic_write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write `path` anew, or refuse with what was there before untouched."""
    try:
        replace_text(path, text, private=private)
    except OSError as error:
        raise unwritten(path, error, "what was there before is untouched") from error


def sync_path(path: Path) -> None:
    """Makes a file, or the names in a folder, survive a power cut: a rename is data of the folder it happens in."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """The SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()
