"""Atomic writes of files and folders, and checksums."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lockstep.errors import unwritten

ASIDE = ".writing-"
"""Name prefix of a file or folder that is not complete yet."""


@contextlib.contextmanager
def written_aside(path: Path, *, over: bool = False, durable: bool = True) -> Iterator[Path]:
    """Yields a temporary path that is renamed to `path` if the block succeeds, and removed otherwise.

    After a kill or a power failure, `path` has either the old or the new content. An existing folder is replaced only
    with `over`. Without `durable`, the function does not flush the files to disk, so a power failure may lose them.
    """
    aside = cleared_aside(path)
    try:
        yield aside
        take_name(aside, path, over=over, durable=durable)
    except BaseException:
        with contextlib.suppress(OSError):  # fails on a read-only disk, which has no temporary file
            _remove(aside)
        raise


def aside_of(path: Path) -> Path:
    """Returns the temporary path of `path`."""
    return path.with_name(f"{ASIDE}{path.name}")


def cleared_aside(path: Path) -> Path:
    """Deletes an old file or folder at the temporary path of `path`. Returns the temporary path."""
    aside = aside_of(path)
    _remove(aside)
    return aside


def take_name(aside: Path, path: Path, *, over: bool = False, durable: bool = True) -> None:
    """Renames the temporary path to `path` atomically."""
    if durable:
        for written in [*aside.rglob("*"), aside]:
            sync_path(written)
    if over and path.is_dir():
        shutil.rmtree(path)
    aside.replace(path)
    if durable:
        sync_path(path.parent)


def share_model(folder: Path, like: str = "config.json") -> None:
    """Gives a new model folder and its files the permissions of the file `like`. safetensors writes files that only
    their owner can read, and temporary folders are private."""
    mode = stat.S_IMODE((folder / like).stat().st_mode)
    folder.chmod(mode | (mode & 0o444) >> 2)
    for file in folder.iterdir():
        # A file that an export shares with its checkpoint is read-only, because a change would damage both.
        file.chmod(mode & 0o444 if file.stat().st_nlink > 1 else mode)


def _remove(aside: Path) -> None:
    """Deletes the temporary file or folder of a killed process or of a failed write."""
    if aside.is_dir():
        shutil.rmtree(aside)
    else:
        aside.unlink(missing_ok=True)


def replace_text(path: Path, text: str, *, private: bool = False) -> None:
    """Replaces the content of the file `path` atomically. Raises OSError, so that the caller can write its own error
    message. With `private`, only the user can read the file. Use `private` for files that contain the recipe or the
    command line."""
    with written_aside(path) as aside:
        if private:
            write_private(aside, text)
        else:
            aside.write_text(text, encoding="utf-8", newline="\n")


def write_private(path: Path, content: str | bytes | bytearray) -> None:
    """Writes a file that only the user can read, also while the file is being written."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


def atomic_write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Replaces the file `path` atomically, or raises `Refusal` and leaves the old file unchanged."""
    try:
        replace_text(path, text, private=private)
    except OSError as error:
        raise unwritten(path, error, "the old file is unchanged") from error


def sync_path(path: Path) -> None:
    """Flushes a file or a folder to disk. A renamed file survives a power failure only after its folder is flushed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """Returns the SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


# SHA-256 takes longer than the disk on one core. So the checksum of a large file is the SHA-256 of the SHA-256 digests
# of its blocks, which several threads compute at the same time.

# Size of a block in bytes, the number of bytes that are read at once, and the largest number of threads.
BLOCK, PIECE, THREADS = 2**26, 2**22, 8


def file_threads(each: int = 1) -> ThreadPoolExecutor:
    """Returns threads that read, write and checksum the blocks of files, `each` times as many as the disk needs."""
    return ThreadPoolExecutor(each * min(THREADS, os.cpu_count() or 1), thread_name_prefix="files")


def checksum_entry(size: int, digests: Sequence[bytes]) -> dict[str, Any]:
    """Returns the size and the checksum of a file from the SHA-256 digests of its blocks. A file of one block has the
    plain SHA-256 of its content."""
    if size > BLOCK:
        return {"bytes": size, "block": BLOCK, "sha256_blocks": hashlib.sha256(b"".join(digests)).hexdigest()}
    return {"bytes": size, "sha256": digests[0].hex()}


def block_checksum(path: Path, block: int) -> str:
    """Returns the checksum `sha256_blocks` of a file, for blocks of `block` bytes."""
    with path.open("rb") as file, file_threads() as threads:
        starts = range(0, path.stat().st_size, block)
        digests = threads.map(lambda start: _block_digest(file.fileno(), start, start + block), starts)
        return hashlib.sha256(b"".join(digests)).hexdigest()


def _block_digest(descriptor: int, start: int, end: int) -> bytes:
    digest = hashlib.sha256()
    for offset in range(start, end, PIECE):
        digest.update(os.pread(descriptor, min(PIECE, end - offset), offset))
    return digest.digest()
