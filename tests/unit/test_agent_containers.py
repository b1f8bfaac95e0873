"""Agents in containers: a container that ignores SIGTERM ends with its trajectory, with the run, and after SIGKILL of
the run. A program in place of docker asks a daemon for real processes, which are no descendants of the run."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_engines import Watched, engine_of, repeats, run
from container_daemon import Containers, container_daemon
from hang import wait_until
from lockstep.environments.agents.agent_host import labelled_container
from lockstep.environments.agents.agent_setup import agent_setup
from lockstep.environments.host import EnvironmentHosts
from lockstep.model.load import load_tokenizer
from lockstep.recipe.keys_rollout import RolloutSettings

AGENT = "command:docker run -i --rm --init agent:1 --name x"


@pytest.fixture
def containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Containers]:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    # Tests in other processes note containers, too. The path is short, because sockets have a limited length.
    with tempfile.TemporaryDirectory(prefix="lockstep-test-") as own:
        monkeypatch.setenv("TMPDIR", own)
        monkeypatch.setattr(tempfile, "tempdir", None)
        with container_daemon(tmp_path) as daemon:
            yield daemon


def notes() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("lockstep-containers-*"))


def test_a_container_gets_a_label() -> None:
    words, label = labelled_container(["/usr/bin/podman", "container", "run", "image", "--label", "x"])
    assert words == ["/usr/bin/podman", "container", "run", "--label", f"lockstep={label}", "image", "--label", "x"]
    assert label != labelled_container(["docker", "run", "image"])[1] != ""
    for other in (["docker", "exec", "x"], ["python", "run"], ["docker"]):
        assert labelled_container(other) == (other, "")


@pytest.mark.slow
def test_a_container_that_hangs_is_removed(tiny_folder: Path, containers: Containers) -> None:
    before = notes()
    tokenizer: Any = load_tokenizer(str(tiny_folder))
    engine = engine_of(tokenizer, AGENT, repeats(tokenizer), step_timeout=5.0)
    watched = Watched(engine)
    try:
        made = run(engine, ["5", "5"])
        assert [one.trajectory.stop for one in made if one.trajectory is not None] == ["timeout", "timeout"]
        wait_until(lambda: containers.living == [])
        assert len(watched.marks) == 1  # the host waits for no container
    finally:
        engine.close()
    assert len(containers.started) == 2
    assert len([line for line in containers.log if line.startswith("SIGTERM")]) == 2
    assert len([line for line in containers.log if line.startswith("rm --force")]) >= 2
    assert watched.left() == []
    wait_until(lambda: notes() == before)  # the supervisor removes them after its process


def test_a_container_ends_with_the_hosts(containers: Containers) -> None:
    before = notes()
    hosts = EnvironmentHosts(agent_setup(RolloutSettings(agent=AGENT, environment_workers=1)))
    hosts.send(hosts.place_now(0), do="run", trajectory=0, row={}, base_url="http://x", seed=1)
    containers.wait_for(1)
    hosts.close()
    assert containers.living == []
    wait_until(lambda: notes() == before)  # the supervisor removes them after its process


@pytest.mark.slow
def test_a_container_ends_after_the_run_was_killed(containers: Containers) -> None:
    code = (
        "import time\n"
        "from lockstep.environments.agents.agent_setup import agent_setup\n"
        "from lockstep.environments.host import EnvironmentHosts\n"
        "from lockstep.recipe.keys_rollout import RolloutSettings\n"
        f"hosts = EnvironmentHosts(agent_setup(RolloutSettings(agent={AGENT!r}, environment_workers=1)))\n"
        "hosts.send(hosts.place_now(0), do='run', trajectory=0, row={}, base_url='http://x', seed=1)\n"
        "time.sleep(1e6)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    containers.wait_for(1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: containers.living == [])
