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
from lockstep.launch.supervisor import MARK, descendants

HERE = Path(__file__).parent

SITE = """
import os, sys
own = os.environ.get("RANK") == {rank!r} and {mark!r} not in os.environ  # not a process that a rank has started
if own and not os.path.exists({once!r}):
    sys.path.append({here!r})
    from kills import Moment
    from struck import strike_at
    strike_at({number}, {once!r}, {moment!r}, {worker!r})
"""


def strike_at(number: int, once: str, moment: Moment, worker: bool = False) -> None:
    """This process sends itself the signal, or the one that generates for it, at its first file operation from the
    moment on, and notes whom."""
    looking = False

    def look(event: str, _: object) -> None:
        nonlocal looking
        if looking or event not in OPERATIONS:
            return
        looking = True  # looking is a file operation too
        if os.path.exists(once) or not moment.has_come():
            looking = False
            return
        victim = _rollout_worker() if worker else os.getpid()
        with open(once, "w") as file:
            file.write(str(victim))
        os.kill(victim, number)

    sys.addaudithook(look)


def _rollout_worker() -> int:
    """The process that generates for this one: the child of a supervisor, which has the same command line."""
    mark = b"lockstep.rollout.worker:serve_worker"
    named = [pid for pid in descendants(os.getpid(), "") if mark in Path(f"/proc/{pid}/cmdline").read_bytes()]
    (worker,) = (pid for pid in named if set(descendants(pid, "")).isdisjoint(named))
    return worker


def struck(
    folder: Path, rank: int, number: signal.Signals, moment: Moment, *, worker: bool = False
) -> tuple[dict[str, str], Path]:
    """The environment that strikes a rank, or its rollout worker, and the file that holds the process number of who
    was struck from the blow on."""
    folder.mkdir()
    once = folder / "once"
    told = {"number": int(number), "moment": moment, "worker": worker, "mark": MARK}
    site = SITE.format(rank=str(rank), once=str(once), here=str(HERE), **told)
    (folder / "sitecustomize.py").write_text(site, encoding="utf-8")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path}, once
