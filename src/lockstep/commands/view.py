"""What `lockstep view` does: serves the page of the runs in a folder until it is stopped."""

from __future__ import annotations

from pathlib import Path

from lockstep.errors import Refusal
from lockstep.run.output import write
from lockstep.view.server import PageServer


def view_runs(folder: Path, port: int = 0, open_browser: bool = False) -> None:
    """Prints the link and serves; ends with Ctrl-C."""
    if not folder.is_dir():
        why = "is a file" if folder.exists() else "does not exist"
        raise Refusal.at(folder, why, "give the folder that holds your runs (run.folder of their recipes), or one run")
    try:
        server = PageServer(folder, port)
    except OSError as error:
        remedy = "give another port, or none to take any that is free"
        raise Refusal.at(f"--port {port}", f"cannot be listened on: {error.strerror}", remedy) from error
    with server:
        found = server.answers.shelf.found()
        write(f"{len(found.runs):,} runs in {folder}" if len(found.runs) != 1 else f"1 run in {folder}")
        write(server.link)
        write("For this machine only; Ctrl-C ends it.")
        if open_browser:
            import webbrowser

            webbrowser.open(server.link)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            write("")
