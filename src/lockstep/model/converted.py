"""Folders that were made of models in another form (a checkpoint, an adapter, a GGUF file), each once.

They lie in the cache by what they were made of; where that changes another folder is made. Whoever comes second waits
for the first. Those that were not used for longest are deleted when they take too much room together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import lockstep
from lockstep.errors import Refusal, unwritten
from lockstep.run.caches import FOLDERS, MadeFolder, cache_home, folders_bound, make_room
from lockstep.run.files import aside_of, written_aside
from lockstep.run.output import write

VERSION = 2
"""Of the conversions: another one makes the folders anew."""


def converted(what: str, facts: Any, convert: Callable[[Path], object]) -> str:
    """The folder that `convert` writes of `facts`, which say everything that it depends on. `what` is shown."""
    text = json.dumps([VERSION, lockstep.__version__, facts], sort_keys=True, default=str)
    try:
        folder = cache_home() / FOLDERS / hashlib.sha256(text.encode()).hexdigest()[:24]
    except RuntimeError as error:
        why = "must be made into a model folder, and there is no home to keep that in"
        raise Refusal.at(what, why, "set LOCKSTEP_CACHE to a folder") from error
    made = MadeFolder(folder)
    advice = "LOCKSTEP_CACHE names the folder of the cache"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made.hold()
        if folder.is_dir():
            return str(folder)
        folders_bound()  # refused before the work
        with made.alone():
            if not folder.is_dir():
                write(f"making a model folder of {what}: {folder}", error=True)
                # Whoever asks may be counting parameters without storage.
                with written_aside(folder) as aside, torch.device("cpu"):
                    convert(aside)
                made.label(str(Path(what).absolute()))
        for line in make_room(made):
            write(line, error=True)
    except OSError as error:
        raise unwritten(folder, error, advice) from error
    except Refusal as refusal:
        if refusal.problems[0].where != str(aside_of(folder)):
            raise
        raise Refusal.at(folder, refusal.problems[0].why, advice) from refusal
    return str(folder)
