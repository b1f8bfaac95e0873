"""`lockstep --install-completion SHELL`: for a shell that is named; without a name typer looks which one is running."""

from __future__ import annotations

from lockstep.errors import Refusal, unwritten
from lockstep.run.output import write


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
