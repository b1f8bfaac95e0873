"""`lockstep cache`, shell completion, and the start options of `lockstep train`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import Refusal, unwritten
from lockstep.recipe.loader import value_text
from lockstep.run.caches import (
    FOLDERS,
    ROWS,
    RUNS,
    VERIFIED,
    cache_home,
    clear,
    folders_bound,
    gib,
    made_folders,
    size_of,
)
from lockstep.run.output import fit_rows, write

# What `lockstep train` begins with, as words of the recipe.


def with_beginning(overrides: Sequence[str], resume_from: Path | None, init_from: str | None) -> list[str]:
    """`--init-from` is another model to start from: all else, the optimizer and the schedule too, begins anew."""
    if init_from is None:
        return list(overrides)
    if resume_from is not None:
        raise Refusal.at("--init-from", "set together with --resume-from, which has weights too", "remove one of them")
    if any(word.startswith("model.path=") for word in overrides):
        raise Refusal.at("--init-from", "set together with model.path, which it stands for", "remove one of them")
    return [*overrides, f"model.path={value_text(init_from)}"]


# `lockstep cache`: what is kept on this machine, how large it is, and a way to be rid of it.

PARTS = {
    ROWS: "encoded rows (each recipe's data.cache_gb bounds them)",
    FOLDERS: "model folders made of checkpoints, adapters and GGUF files",
    VERIFIED: "architectures that passed their check",
    RUNS: "lists of runs, for `lockstep view`",
}


def cache_lines(cleared: str | None) -> list[str]:
    """What to say; with `cleared`, a part or `all`, after deleting it."""
    if cleared is not None and cleared not in (*PARTS, "all"):
        raise Refusal.at("--clear", f"there is no part {cleared!r}", f"one of {', '.join(PARTS)}, all")
    try:
        home = cache_home()
    except RuntimeError as error:
        raise Refusal.at("the cache", "there is no home to keep it in", "set LOCKSTEP_CACHE to a folder") from error
    if cleared is not None:
        return [line for part in PARTS if cleared in (part, "all") for line in _cleared(part)]
    rows = [(part, f"{gib(size_of(home / part))}, {meaning}") for part, meaning in PARTS.items()]
    for one in reversed(made_folders()):
        day = time.strftime("%Y-%m-%d", time.localtime(one.last_used))
        rows.append((f"  {one.path.name[:8]}", f"{gib(size_of(one.path))}, last used {day}: {one.made_of}"))
    rows.append(("bound", f"{gib(folders_bound())} of model folders (LOCKSTEP_CACHE_GB)"))
    rows.append(("clear", f"lockstep cache --clear {'|'.join(PARTS)}|all"))
    return [str(home), *(f"{key}{value}" for key, value in fit_rows(rows))]


def _cleared(part: str) -> list[str]:
    freed, busy = clear(part)
    return [f"{part}: freed {gib(freed)}", *[f"{part}: a process uses that of {one.made_of}: it stays" for one in busy]]


# `lockstep --install-completion SHELL`: for a shell that is named; without a name typer looks which one is running.


def install_for(shell: str) -> None:
    from typer.completion import Shells, completion_init, install

    known = [one.value for one in Shells]
    if shell not in known:
        raise Refusal.at("--install-completion", f"there is none for {shell!r}", f"one of {', '.join(known)}")
    completion_init()
    try:
        _, path = install(shell=shell, prog_name="lockstep")
    except OSError as error:
        raise unwritten("--install-completion", error) from error
    write(f"{shell} completion installed in {path}")
    write("it takes effect in the next shell")


# What `lockstep view` does: serves the page of the runs in a folder until it is stopped.
