"""A program in place of docker, and the daemon whose containers are real processes. They ignore SIGTERM.

    python container_daemon.py FOLDER

The client `docker` writes its orders into the folder: ID.run with the label of a container, and ID.kill. The daemon
starts and kills the containers, and writes ID.pid and ID.done.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hang import wait_until

CONTAINER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(1e6)"
CLIENT = r"""#!/bin/bash
echo "$@" >> {0}/log
case "$1" in
  run)
    while [ $# -gt 0 ]; do [ "$1" = --label ] && label="${{2#lockstep=}}"; shift; done
    id=c$$; echo "$label" > {0}/$id.new; mv {0}/$id.new {0}/$id.run
    trap 'echo "SIGTERM $id" >> {0}/log' TERM
    until [ -e {0}/$id.done ]; do sleep 0.05; done ;;
  ps) for run in {0}/*.run; do [ "$(cat $run)" = "${{5#label=lockstep=}}" ] && basename $run .run; done ;;
  rm) shift 2; for id in "$@"; do touch {0}/$id.kill; until [ -e {0}/$id.done ]; do sleep 0.05; done; done ;;
esac
"""


class Containers:
    """The containers of a daemon, as a test sees them."""

    def __init__(self, folder: Path):
        self.folder = folder

    @property
    def started(self) -> list[int]:
        return [int(file.read_text()) for file in self.folder.glob("*.pid")]

    @property
    def living(self) -> list[int]:
        """The processes of containers that have not ended."""
        return [pid for pid in self.started if Path(f"/proc/{pid}").exists()]

    @property
    def log(self) -> list[str]:
        return (self.folder / "log").read_text().splitlines()

    def wait_for(self, count: int) -> None:
        wait_until(lambda: len(self.started) == count)


@contextmanager
def container_daemon(folder: Path) -> Iterator[Containers]:
    """Runs the daemon. `folder` gets the program `docker`."""
    orders = folder / "orders"
    orders.mkdir()
    (folder / "docker").write_text(CLIENT.format(orders))
    (folder / "docker").chmod(0o755)
    daemon = subprocess.Popen(
        [sys.executable, __file__, str(orders)], env={**os.environ, "PYTHONPATH": ":".join(sys.path)}
    )
    containers = Containers(orders)
    try:
        yield containers
    finally:
        daemon.kill()
        daemon.wait()
        for pid in containers.living:
            os.kill(pid, signal.SIGKILL)


def main(orders: Path) -> None:
    running: dict[str, subprocess.Popen[bytes]] = {}
    while True:
        for file in orders.glob("*.run"):
            if file.stem not in running:
                process = subprocess.Popen([sys.executable, "-c", CONTAINER], stdout=subprocess.PIPE)
                assert process.stdout is not None
                process.stdout.readline()  # the container ignores SIGTERM now
                running[file.stem] = process
                new = file.with_suffix(".pid-new")
                new.write_text(str(process.pid))
                new.rename(file.with_suffix(".pid"))
        for file in orders.glob("*.kill"):
            if file.stem in running and not file.with_suffix(".done").exists():
                running[file.stem].kill()
                running[file.stem].wait()
                file.with_suffix(".done").touch()
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
