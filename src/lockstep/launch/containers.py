"""Containers that a supervised process starts. They are processes of a daemon, so they do not end with their client.

A process notes the label of each container before it starts it. When the process ends, for any reason, its supervisor
removes the containers that are still noted.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

# The environment variable with the mark of a supervised process, which its child processes inherit.
MARK = "LOCKSTEP_FUNCTION_PROCESS"
# Seconds in which a daemon must remove containers.
REMOVE_SECONDS = 30.0


def note_container(label: str, program: str = "docker") -> None:
    """Notes a container before it starts, so that the supervisor removes it if this process ends first. Without a
    supervisor nothing is noted."""
    if mark := os.environ.get(MARK, ""):
        folder = _folder(mark)
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / label).write_text(program, encoding="utf-8")


def forget_container(label: str) -> None:
    """Removes the note of a container that has ended."""
    if mark := os.environ.get(MARK, ""):
        (_folder(mark) / label).unlink(missing_ok=True)


def remove_noted_containers(mark: str) -> None:
    """Removes the containers that a supervised process has noted and that have not ended. The process has ended."""
    folder = _folder(mark)
    if not folder.is_dir():
        return
    for note in folder.iterdir():
        remove_container(note.name, note.read_text(encoding="utf-8"))
    shutil.rmtree(folder, ignore_errors=True)


def remove_container(label: str, program: str = "docker") -> None:
    """Kills and removes the containers with the label `lockstep=LABEL`, with all their processes. A container that has
    ended is no error."""
    with suppress(OSError, subprocess.TimeoutExpired):
        words = [program, "ps", "--all", "--quiet", "--filter", f"label=lockstep={label}"]
        found = subprocess.run(words, capture_output=True, text=True, timeout=REMOVE_SECONDS, check=False)
        if names := found.stdout.split():
            words = [program, "rm", "--force", *names]
            subprocess.run(words, capture_output=True, timeout=REMOVE_SECONDS, check=False)


def _folder(mark: str) -> Path:
    return Path(tempfile.gettempdir()) / f"lockstep-containers-{mark}"
