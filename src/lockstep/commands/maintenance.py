"""`lockstep cache`, shell completion, and the start options of `lockstep train`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from lockstep.errors import Problem, Refusal, unwritten
from lockstep.recipe.loader import builtin_names, recipe_text, value_text
from lockstep.run.caches import (
    BYTECODE,
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


def with_beginning(overrides: Sequence[str], resume_from: Path | None, init_from: str | None) -> list[str]:
    """Returns the overrides of `lockstep train`. `--init-from` overrides only `model.path`, so the optimizer is new."""
    if init_from is None:
        return list(overrides)
    if resume_from is not None:
        raise Refusal.at(
            "--init-from", "cannot be combined with --resume-from", "remove one of them", code="conflicting-keys"
        )
    if any(word.startswith("model.path=") for word in overrides):
        raise Refusal.at(
            "--init-from", "cannot be combined with model.path", "remove one of them", code="conflicting-keys"
        )
    return [*overrides, f"model.path={value_text(init_from)}"]


@contextmanager
def naming_commands(recipe: str) -> Iterator[None]:
    """Replaces the remedy for a missing file of a built-in recipe by the command that writes the file. The first lines
    of a built-in recipe list these commands."""
    try:
        yield
    except Refusal as refusal:
        if Path(recipe).is_file() or recipe not in builtin_names():
            raise
        text = recipe_text(recipe)
        needed = re.findall(r"^# Needs: +(.*)$", text, re.MULTILINE)
        commands = [one.strip() for line in needed for one in line.split(" and ") if one.strip().startswith("lockstep")]
        problems = [_with_command(problem, commands, text) for problem in refusal.problems]
        if problems == refusal.problems:
            raise
        raise Refusal(problems) from refusal


def _with_command(problem: Problem, commands: Sequence[str], text: str) -> Problem:
    path = problem.where.rpartition(" ")[2]
    fitting = [one for one in commands if any("/" in word and path.startswith(word) for word in one.split())]
    fitting = fitting or [one for one in commands if "/" not in one]  # an earlier run, which needs the same files
    if problem.code != "no-such-file" or path not in text or not fitting:
        return problem
    return replace(problem, remedy=f"run: {' && '.join(fitting)}")


PARTS = {
    ROWS: "encoded rows (limited by data.cache_gb of each recipe)",
    FOLDERS: "model folders made of checkpoints, adapters and GGUF files",
    VERIFIED: "models that passed the checks at the start of a run",
    RUNS: "lists of runs, used by `lockstep view`",
    BYTECODE: "compiled modules, if Python may not write them elsewhere",
}


def cache_lines(cleared: str | None) -> list[str]:
    """Returns lines that describe the cache folder; with `cleared` (a part or `all`), deletes that part first."""
    if cleared is not None and cleared not in (*PARTS, "all"):
        raise Refusal.at(
            "--clear",
            f"there is no part {cleared!r} of the cache",
            f"use one of {', '.join(PARTS)}, all",
            code="unknown-name",
        )
    try:
        home = cache_home()
    except RuntimeError as error:
        raise Refusal.at(
            "the cache folder", "there is no home directory", "set LOCKSTEP_CACHE to a folder", code="no-home"
        ) from error
    if cleared is not None:
        return [line for part in PARTS if cleared in (part, "all") for line in _cleared(part)]
    rows = [(part, f"{gib(size_of(home / part))}, {meaning}") for part, meaning in PARTS.items()]
    for one in reversed(made_folders()):
        day = time.strftime("%Y-%m-%d", time.localtime(one.last_used))
        rows.append((f"  {one.path.name[:8]}", f"{gib(size_of(one.path))}, last used {day}: {one.made_of}"))
    rows.append(("limit", f"{gib(folders_bound())} of model folders (LOCKSTEP_CACHE_GB)"))
    rows.append(("clear", f"lockstep cache --clear {'|'.join(PARTS)}|all"))
    return [str(home), *(f"{key}{value}" for key, value in fit_rows(rows))]


def _cleared(part: str) -> list[str]:
    freed, busy = clear(part)
    return [f"{part}: freed {gib(freed)}", *[f"{part}: kept {one.made_of}, which a process uses" for one in busy]]


def install_for(shell: str) -> None:
    """Installs completion for `lockstep --install-completion SHELL`; if SHELL is omitted, typer detects the shell."""
    from typer.completion import Shells, completion_init, install

    shells = [member.value for member in Shells]
    if shell not in shells:
        raise Refusal.at(
            "--install-completion",
            f"{shell!r} is not supported",
            f"use one of {', '.join(shells)}",
            code="unknown-name",
        )
    completion_init()
    try:
        _, path = install(shell=shell, prog_name="lockstep")
    except OSError as error:
        raise unwritten("--install-completion", error) from error
    write(f"{shell} completion installed in {path}")
    write("the completion takes effect in the next shell")
