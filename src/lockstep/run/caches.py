"""The cache folder of lockstep. Lockstep recreates missing cache entries, so deleting the cache costs only time.

Models that lockstep has converted to Hugging Face folders are large. A process that uses a converted model folder locks
it until the process ends, so that other processes and `lockstep cache --clear` do not delete it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from lockstep.errors import Refusal
from lockstep.run.files import ASIDE

ROWS, FOLDERS, VERIFIED, RUNS, BYTECODE = "rows", "folders", "models", "runs", "bytecode"
"""The subfolders of the cache: tokenised dataset rows, converted model folders, model architectures that passed their
check, lists of runs, and compiled Python modules."""
BOUND = "LOCKSTEP_CACHE_GB"
DEFAULT_GB = 50.0
_REMOVING = ".removing-"
_held: dict[Path, int] = {}


def cache_home() -> Path:
    """Returns the cache folder, which is `LOCKSTEP_CACHE` or a folder in the user's cache directory. Raises
    RuntimeError if the user has no home directory."""
    configured = os.environ.get("LOCKSTEP_CACHE")
    return (
        Path(configured)
        if configured
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"
    )


def cache_bytecode() -> None:
    """Stores compiled Python modules in the cache for this process, if Python finds none of torch and may not write
    them. Some container images are like that, and then each start compiles torch and transformers for several seconds.
    Python takes bytecode for that of a module if path, time and size match, which may be so for two images: so each set
    of installed packages has its own folder."""
    if sys.pycache_prefix is not None or sys.implementation.cache_tag is None:
        return
    spec = find_spec("torch")
    if spec is None or spec.origin is None or Path(cache_from_source(spec.origin)).exists():
        return
    module = Path(spec.origin)
    if not sys.dont_write_bytecode and os.access(module.parent, os.W_OK):
        return  # this start writes them beside the modules
    packages = sorted(path.name for path in module.parents[1].glob("*-info"))
    key = hashlib.sha256("\n".join([sys.version, *packages]).encode()).hexdigest()[:16]
    with contextlib.suppress(RuntimeError, OSError):  # no home directory, or it cannot be written
        folder = (cache_home() / BYTECODE / key).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            sys.pycache_prefix = str(folder)
            sys.dont_write_bytecode = False
            _drop_incomplete_bytecode()


def _drop_incomplete_bytecode() -> None:
    """Deletes bytecode that was written incompletely. Python 3.11 keeps it if the disk is full, and every later start
    would fail to read it."""
    written = SourceFileLoader.set_data

    def complete(loader: SourceFileLoader, path: str, data: bytes, *, _mode: int = 0o666) -> None:
        written(loader, path, data, _mode=_mode)
        with contextlib.suppress(OSError):
            if os.stat(path).st_size != len(data):
                os.unlink(path)

    SourceFileLoader.set_data = complete  # type: ignore[method-assign, assignment]


@dataclass(frozen=True)
class MadeFolder:
    """A converted model folder in the cache, with a lock file and a label file that names its source."""

    path: Path

    @property
    def _lock(self) -> Path:
        return self.path.with_suffix(".used")

    @property
    def _making(self) -> Path:
        return self.path.with_suffix(".lock")

    @property
    def _label(self) -> Path:
        return self.path.with_suffix(".json")

    def hold(self) -> None:
        """Locks the folder against deletion until this process ends."""
        with contextlib.suppress(OSError):  # ignores read-only folders and file systems without locks
            if self.path not in _held:
                file = _held[self.path] = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644)
                fcntl.flock(file, fcntl.LOCK_SH)
            os.utime(self._lock)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Locks the model folder exclusively during its conversion. Other processes that convert the same model
        wait."""
        with self._making.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def label(self, what: str) -> None:
        self._label.write_text(json.dumps({"made_of": what}), encoding="utf-8")

    @property
    def made_of(self) -> str:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads(self._label.read_text(encoding="utf-8"))["made_of"])
        return "?"

    @property
    def last_used(self) -> float:
        for file in (self._lock, self.path):
            with contextlib.suppress(OSError):
                return file.stat().st_mtime
        return 0.0

    def delete(self) -> bool:
        """Deletes the folder. Returns False, without deleting, if a process uses the folder."""
        with contextlib.suppress(OSError), self._lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            gone = self.path.with_name(f"{_REMOVING}{self.path.name}")
            self.path.rename(gone)
            shutil.rmtree(gone)
            self._label.unlink(missing_ok=True)
            # The lock file is not deleted, because other processes may wait for its lock.
            return True
        return False


def _sweep(home: Path) -> None:
    """Deletes temporary folders of killed processes from the cache."""
    for leftover in [*home.glob(f"{ASIDE}*"), *home.glob(f"{_REMOVING}*")]:
        # A leftover name may have the prefix twice, because a converter may also write to a temporary path.
        made = MadeFolder(home / re.sub(f"^({re.escape(ASIDE)}|{re.escape(_REMOVING)})+", "", leftover.name))
        with contextlib.suppress(OSError), made._making.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises OSError if a process is creating the folder
            shutil.rmtree(leftover)


def made_folders() -> list[MadeFolder]:
    """Returns the complete converted folders, least recently used first."""
    home = cache_home() / FOLDERS
    found = [MadeFolder(path) for path in home.glob("*") if path.is_dir() and not path.name.startswith(".")]
    return sorted(found, key=lambda one: one.last_used)


def make_room(new: MadeFolder) -> list[str]:
    """Deletes the least recently used model folders, except `new`, until the cache is below its size limit. Returns
    messages for the user."""
    bound, folders = folders_bound(), made_folders()
    _sweep(new.path.parent)
    sizes = {one.path: size_of(one.path) for one in folders}
    left, messages = sum(sizes.values()), []
    for one in folders:
        if left <= bound or one.path == new.path:
            continue
        made_of, day = one.made_of, time.strftime("%Y-%m-%d", time.localtime(one.last_used))
        if one.delete():
            left -= sizes[one.path]
            messages.append(f"removed the model folder of {made_of} (last used {day}) from the cache to free space")
    if left > bound:
        messages.append(f"the model folders in {new.path.parent} use {gib(left)}, more than {BOUND}={bound / 2**30:g}")
    return messages


def folders_bound() -> float:
    """Returns the size limit of all converted folders in bytes."""
    text = os.environ.get(BOUND, "")
    try:
        number = float(text) if text else DEFAULT_GB
    except ValueError:
        number = -1.0
    if not number >= 0:
        raise Refusal.at(
            BOUND,
            f"{text!r} is not a number of GiB",
            f"set a number, or unset the variable to use the default of {DEFAULT_GB:g} GiB",
            code="not-a-number",
        )
    return number * 2**30


def clear(part: str) -> tuple[int, list[MadeFolder]]:
    """Deletes the subfolder `part` of the cache. Returns the number of freed bytes, and the model folders that were
    kept because they are in use."""
    home = cache_home() / part
    if part != FOLDERS:
        size = size_of(home)
        shutil.rmtree(home, ignore_errors=True)
        return size - size_of(home), []
    freed, busy = 0, []
    for one in made_folders():
        size = size_of(one.path)
        if one.delete():
            freed += size
        else:
            busy.append(one)
    _sweep(home)
    return freed, busy


def size_of(folder: Path) -> int:
    return sum(_sizes(folder))


def _sizes(folder: Path) -> Iterator[int]:
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # another process removed it
            if not path.is_symlink() and path.is_file():
                yield path.stat().st_size


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
