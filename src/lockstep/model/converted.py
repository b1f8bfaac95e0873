"""Folders that were made of models in another form (a checkpoint, an adapter, a GGUF file), each once.

They lie in the cache by what they were made of; where that changes another folder is made. Whoever comes second waits
for the first.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import lockstep
from lockstep.errors import unwritten
from lockstep.run.caches import cache_home
from lockstep.run.files import written_aside
from lockstep.run.output import write

VERSION = 2
"""Of the conversions: another one makes the folders anew."""


def converted(what: str, facts: Any, convert: Callable[[Path], object]) -> str:
    """The folder that `convert` writes of `facts`, which say everything that it depends on. `what` is shown."""
    text = json.dumps([VERSION, lockstep.__version__, facts], sort_keys=True, default=str)
    folder = cache_home() / "folders" / hashlib.sha256(text.encode()).hexdigest()[:24]
    if folder.is_dir():
        return str(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.with_suffix(".lock")):
            if not folder.is_dir():
                write(f"making a model folder of {what}: {folder}", error=True)
                # Whoever asks may be counting parameters without storage.
                with written_aside(folder) as aside, torch.device("cpu"):
                    convert(aside)
    except OSError as error:
        raise unwritten(folder, error, "LOCKSTEP_CACHE names the folder of the cache") from error
    return str(folder)


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[None]:
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
