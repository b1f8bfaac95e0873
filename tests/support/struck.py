"""A rank that is killed or stopped at a moment of its own work, once, whoever starts it and however often.

Launchers start `python -m lockstep` by themselves, so the blow comes with the environment: a `sitecustomize.py` that
the rank alone acts on. The rank looks for itself, at each of its file operations, and strikes itself.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from kills import OPERATIONS, Moment

HERE = Path(__file__).parent

SITE = """
import os, sys
if os.environ.get("RANK") == {rank!r} and not os.path.exists({once!r}):
    sys.path.append({here!r})
    from kills import Moment
    from struck import strike_at
    strike_at({number}, {once!r}, {moment!r})
"""


def strike_at(number: int, once: str, moment: Moment) -> None:
    """This process sends itself the signal at its first file operation from the moment on, and notes its number."""
    looking = False

    def look(event: str, _: object) -> None:
        nonlocal looking
        if looking or event not in OPERATIONS:
            return
        looking = True  # looking is a file operation too
        if os.path.exists(once) or not moment.has_come():
            looking = False
            return
        with open(once, "w") as file:
            file.write(str(os.getpid()))
        os.kill(os.getpid(), number)

    sys.addaudithook(look)


def struck(folder: Path, rank: int, number: signal.Signals, moment: Moment) -> tuple[dict[str, str], Path]:
    """The environment that strikes a rank, and the file that holds its process number from the blow on."""
    folder.mkdir()
    once = folder / "once"
    site = SITE.format(rank=str(rank), once=str(once), here=str(HERE), number=int(number), moment=moment)
    (folder / "sitecustomize.py").write_text(site, encoding="utf-8")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path}, once
