"""The docker adapter. Docker does not run in these tests: a script in its place records the commands and runs them."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hang import HANG, wait_until
from lockstep.environments.sandbox import SandboxLimits, chosen_isolation, run_bash, run_python
from lockstep.errors import Refusal

# `run` executes the words after the image in the folder of the volume; `rm` kills that process group.
DOCKER = """#!/bin/bash
echo "$@" >> {log}
case "$1" in
  image) [ "$3" = known ] || {{ echo "Error: No such image: $3" >&2; exit 1; }} ;;
  ps) echo "${{5#label=lockstep=}}" ;;
  rm) [ -f {log}.pid ] && kill -9 -- -$(cat {log}.pid) 2>/dev/null; rm -f {log}.pid ;;
  run)
    while [ "$1" != known ]; do [ "$1" = --volume ] && folder="${{2%%:*}}"; shift; done
    shift; cd "$folder" || exit 1
    setsid "$@" <&0 & echo $! > {log}.pid; wait $! ;;
esac
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program, log = tmp_path / "docker", tmp_path / "log"
    program.write_text(DOCKER.format(log=log))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("LOCKSTEP_SANDBOX", "docker:known")
    return log


def test_a_program_runs_in_a_container_without_network(log: Path) -> None:
    assert chosen_isolation() == "docker:known"
    done = run_bash("cat; ls; exit 3", SandboxLimits(memory_mb=77, processes=5, disk_mb=9), stdin="in\n")
    assert (done.stdout, done.status, done.stopped) == ("in\nmain.sh\n", 3, "")
    inspect, run, remove = log.read_text().splitlines()[1:]
    assert inspect == "image inspect known"
    for option in (
        "--rm --interactive",
        "--network none",
        "--memory 77m --memory-swap 77m --pids-limit 5",
        "--cap-drop ALL --security-opt no-new-privileges --read-only",
        "--tmpfs /tmp:size=9m",
        "--user 65534:65534",
        "--pull never",
    ):
        assert option in run
    name = run.split("--name ")[1].split()[0]
    assert remove == f"rm --force {name}"
    assert " known /bin/sh -c " in run
    assert run.endswith(" /bin/bash main.sh")


def test_a_container_that_hangs_or_talks_too_much_is_removed(log: Path) -> None:
    done = run_bash("echo first; sleep 100000", SandboxLimits(seconds=1))
    assert (done.stdout, done.status, done.stopped) == ("first\n", None, "time")
    done = run_python("while True: print('y' * 999)", SandboxLimits(seconds=1000, output_bytes=10))
    assert (done.stdout, done.status, done.stopped) == ("y" * 10, None, "output")


def test_a_container_ends_with_the_process_that_started_it(log: Path) -> None:
    code = "from lockstep.environments.sandbox import run_bash, SandboxLimits\n"
    code += f"run_bash('echo $$ > inside; sleep {HANG * 100:g}', SandboxLimits(seconds={HANG}))"
    host = subprocess.Popen([sys.executable, "-c", code])
    started = Path(f"{log}.pid")
    wait_until(lambda: started.is_file() and started.read_text().strip() != "")
    inside = int(started.read_text())
    assert Path(f"/proc/{inside}").exists()
    host.kill()
    host.wait()
    wait_until(
        lambda: not Path(f"/proc/{inside}").exists() or "\nState:\tZ" in Path(f"/proc/{inside}/status").read_text()
    )
    wait_until(lambda: "rm --force" in log.read_text())


def test_an_unknown_image_is_refused(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_SANDBOX", "docker:other")
    with pytest.raises(Refusal, match="No such image: other") as refusal:
        chosen_isolation()
    assert refusal.value.problems[0].remedy.endswith("docker pull other")
