"""`lockstep view`: serves a web page that shows the runs of a folder, until Ctrl-C."""

from __future__ import annotations

from pathlib import Path

from lockstep.errors import Refusal
from lockstep.run.output import write
from lockstep.serve.viewer import RunViewer


def view_runs(folder: Path, port: int = 0, open_browser: bool = False) -> None:
    """Prints the link of the page and serves it until Ctrl-C."""
    if not folder.is_dir():
        why = "is a file" if folder.exists() else "does not exist"
        raise Refusal.at(
            folder, why, "give the folder with your runs (run.folder of their recipes), or one run", code="not-a-folder"
        )
    viewer = RunViewer(folder, port)
    scan = viewer.data.runs.scan()
    write(f"{len(scan.runs):,} runs in {folder}" if len(scan.runs) != 1 else f"1 run in {folder}")
    write(viewer.link)
    write("Local only; Ctrl-C stops the server.")
    if open_browser:
        import webbrowser

        webbrowser.open(viewer.link)
    viewer.run()
    write("")
