"""Runs over two hosts, each a network namespace of this machine, whose cable is cut in the middle and restored."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from commands import lockstep
from conftest import write_online_recipe, write_sft_recipe
from hang import HANG, wait_until
from runs import close, facts, samples, stored
from two_hosts import Host, two_hosts, why_none

pytestmark = [pytest.mark.slow, pytest.mark.torchrun, pytest.mark.skipif(bool(why_none()), reason=why_none())]
Hosts = tuple[Host, Host]
SCRIPT = Path(__file__).parents[2] / "examples" / "cluster" / "torchrun.sh"
STEPS = 40
SFT = [
    *("checkpoint.every=8", "checkpoint.asynchronous=false", "run.export=false", f"run.steps={STEPS}"),
    *("optim.eps=1e-4", "optim.schedule=constant", "parallel.stall_seconds=60"),
]
STALLED = 75


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with two_hosts() as both:
        yield both


def begin(hosts: Hosts, stack: ExitStack, folder: Path, *words: object) -> list[subprocess.Popen[bytes]]:
    """The script of examples/cluster on each host, with one rank; its output in `node_0.log` and `node_1.log`."""
    folder.mkdir(exist_ok=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"HEAD": hosts[0].address, "DEVICES": "1", "MAX_RESTARTS": "0", "PATH": path}
    nodes = []
    for number, host in enumerate(hosts):
        logs = {"LOGS": str(folder / f"logs_{number}")}
        command = [SCRIPT, *words, f"run.folder={folder}"]
        node = host.start(command, folder / f"node_{number}.log", **environment, **logs)
        stack.callback(lambda node=node: (node.kill(), node.wait()))
        nodes.append(node)
    return nodes


def end(nodes: list[subprocess.Popen[bytes]], folder: Path) -> tuple[list[int], str]:
    """The exit statuses of the nodes, and what they said."""
    statuses = [node.wait(timeout=HANG) for node in nodes]
    return statuses, "\n".join(file.read_text() for file in sorted(folder.glob("*.log")))


def at_step(folder: Path, count: int, nodes: list[subprocess.Popen[bytes]]) -> None:
    """Returns when so many steps are logged."""
    metrics = folder / "run" / "metrics.jsonl"

    def reached() -> bool:
        return metrics.exists() and metrics.read_bytes().count(b"\n") >= count

    wait_until(lambda: reached() or any(node.poll() is not None for node in nodes))
    assert reached(), end(nodes, folder)[1]


def cut(host: Host, until: Callable[[], object]) -> None:
    host.link("down")
    try:
        until()
    finally:
        host.link("up")


def assert_equal(run: Path, whole: Path, steps: int) -> None:
    """Bit for bit, with every step once."""
    told, wanted_facts = (
        [
            (step, {name: value for name, value in metrics.items() if not name.startswith("async/")})
            for step, metrics in one
        ]
        for one in (facts(run), facts(whole))  # metrics of `async/` are shares of time
    )
    assert [step for step, _ in told] == list(range(1, steps + 1))
    assert told == wanted_facts
    assert samples(run) == samples(whole)
    weights, wanted = stored(run, steps), stored(whole, steps)
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def test_sft_over_two_hosts_survives_a_cut_cable(hosts: Hosts, tmp_path: Path, tiny_folder: Path) -> None:
    """A cut of five seconds costs only time. A longer one ends the ranks of both hosts, with the reason on each; when
    the cable is back, the same commands go on from the checkpoint. All of it gives the numbers of one process."""
    recipe = write_sft_recipe(tmp_path, tiny_folder)
    one = lockstep("train", recipe, f"run.folder={tmp_path / 'one'}", *SFT)
    assert one.returncode == 0, one.stderr
    whole, runs = tmp_path / "whole", tmp_path / "cut"
    with ExitStack() as stack:
        statuses, told = end(begin(hosts, stack, whole, recipe, *SFT), whole)
        assert statuses == [0, 0], told
        assert close(stored(whole / "run", STEPS), stored(tmp_path / "one" / "run", STEPS))

        nodes = begin(hosts, stack, runs, recipe, *SFT)
        at_step(runs, 3, nodes)
        cut(hosts[1], lambda: time.sleep(5))
        at_step(runs, 10, nodes)

        def ended_by_themselves() -> None:
            wait_until(lambda: all("the run has stalled" in (runs / f"node_{n}.log").read_text() for n in (0, 1)))

        cut(hosts[1], ended_by_themselves)
        statuses, told = end(nodes, runs)
        assert all(statuses), told
        assert told.count("the run has stalled: no progress for") == 2, told
        assert "rank 1 has sent no heartbeat for" in told  # on the first host
        assert "the rendezvous store has not responded for" in told  # on the second
        reached = len(facts(runs / "run"))
        assert 10 <= reached < STEPS, "the cable was cut too late"
        assert [file.name for file in sorted((runs / "run" / "stacks").iterdir())] == ["rank_0.txt", "rank_1.txt"]

        statuses, told = end(begin(hosts, stack, runs, recipe, *SFT), runs)
        assert statuses == [0, 0], told
        # torchrun prefixes each line with its rank, also the second line of a broken sentence.
        words = " ".join(told.replace("[default0]:", "").split())
        assert re.search(rf"resuming {runs / 'run'} after step (8|16|24|32)\b", words), told
    assert_equal(runs / "run", whole / "run", STEPS)


# A server whose requests wait at two moments until the cable is cut: the first sample of a step, and a push.
SERVER = """
import sys, time
from pathlib import Path
import sglang_server

folder, limit = Path(sys.argv[1]), int(sys.argv[2])

def held(verb, counts, moment):
    own = getattr(sglang_server.Engine, verb)
    seen = []

    def call(engine, body):
        if counts(body):
            seen.append(1)
            if len(seen) == moment:
                (folder / f"{verb}.reached").touch()
                while not (folder / f"{verb}.go").exists():
                    time.sleep(0.05)
        return own(engine, body)

    setattr(sglang_server.Engine, verb, call)

# The first sample of the third step; the weight check also generates, with fewer tokens.
held("generate", lambda body: body["sampling_params"]["max_new_tokens"] == limit, 2 * 12 + 1)
# The push of the fourth step: there are two at the start, one before each later step, and one to the server that is
# back.
held("update_weights_from_disk", lambda body: True, 6)
sglang_server.main(sys.argv[3:])
"""
TOKENS, KEY, PATIENCE = 23, "key-of-the-test", 120


def serve(host: Host, stack: ExitStack, folder: Path, model: Path) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    (folder / "server.py").write_text(SERVER, encoding="utf-8")
    flags = ["--enable-deterministic-inference", "--dtype", "float32", "--host", host.address, "--api-key", KEY]
    words = [sys.executable, folder / "server.py", folder, TOKENS, "--model-path", model, *flags]
    support = Path(__file__).parents[1] / "support"
    server = host.start(words, folder / "server.log", PYTHONPATH=str(support))
    stack.callback(lambda: (server.kill(), server.wait()))
    return server


def test_grpo_with_an_engine_on_the_other_host_survives_a_cut_cable(
    hosts: Hosts, tmp_path: Path, tiny_folder: Path
) -> None:
    """Cut while the engine generates: its requests are repeated when it is back. Cut during a push, for longer than the
    run waits for a server: the run ends with the server's address, and the same command goes on. The samples and
    weights are those of an undisturbed run, which pushes its weights by a collective over the cable."""
    recipe = write_online_recipe(tmp_path, tiny_folder)
    near, far = hosts
    url = f"http://{far.address}:30000"
    words = [recipe, "rollout.engine=sglang", f"rollout.url={url}", f"rollout.max_tokens={TOKENS}", "log.samples=99"]
    words += ["run.export=false", "checkpoint.every=1", "checkpoint.asynchronous=false"]

    def train(stack: ExitStack, folder: Path, *own: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "lockstep", "train", *words, f"run.folder={folder}", *own]
        run = near.start(command, folder / "run.log", LOCKSTEP_SERVER_KEY=KEY)
        stack.callback(lambda: (run.kill(), run.wait()))
        return run

    whole, runs = tmp_path / "whole", tmp_path / "cut"
    with ExitStack() as stack:
        serve(far, stack, whole, tiny_folder)
        (whole / "generate.go").touch()
        statuses, told = end([train(stack, whole, "rollout.weight_sync=collective")], whole)
        assert statuses == [0], told

    (tmp_path / "weights").mkdir()
    files = ["rollout.weight_sync=files", f"rollout.server.folder={tmp_path / 'weights'}"]
    files += [f"rollout.server.start_timeout={PATIENCE}"]
    with ExitStack() as stack:
        serve(far, stack, runs, tiny_folder)
        run = train(stack, runs, *files)

        def held(verb: str) -> None:
            wait_until(lambda: (runs / f"{verb}.reached").exists() or run.poll() is not None)
            assert run.poll() is None, end([run], runs)[1]

        def lost() -> None:
            (runs / "generate.go").touch()
            wait_until(lambda: "the server is gone" in (runs / "run.log").read_text())

        held("generate")
        cut(far, lost)
        held("update_weights_from_disk")
        assert len(facts(runs / "run")) == 3  # the third step is complete: it was generated after the cut

        def failed() -> None:
            (runs / "update_weights_from_disk.go").touch()
            run.wait(timeout=HANG)

        cut(far, failed)
        statuses, told = end([run], runs)
        assert statuses == [STALLED], told
        assert f"no answer in {PATIENCE} s from {url}" in " ".join(told.split())
        assert "run the same command again" in " ".join(told.split())
        assert KEY not in told

        statuses, told = end([train(stack, runs, *files)], runs)
        assert statuses == [0], told
    assert_equal(runs / "run", whole / "run", 4)


def test_asynchronous_grpo_over_two_hosts_survives_a_cut_cable(hosts: Hosts, tmp_path: Path, tiny_folder: Path) -> None:
    """Each host has a rank and its rollout worker. Without staleness the results are bit-identical to an undisturbed
    run; with staleness, a short cut leaves a complete run."""
    recipe = write_online_recipe(tmp_path, tiny_folder)
    words = [recipe, "checkpoint.every=2", "checkpoint.asynchronous=false", "run.export=false", "log.samples=99"]
    words += ["parallel.stall_seconds=60", "run.steps=12"]
    exact = [*words, "rollout.max_staleness=0"]
    whole, runs, stale = tmp_path / "whole", tmp_path / "cut", tmp_path / "stale"
    with ExitStack() as stack:
        statuses, told = end(begin(hosts, stack, whole, *exact), whole)
        assert statuses == [0, 0], told

        nodes = begin(hosts, stack, runs, *exact)
        at_step(runs, 3, nodes)
        cut(hosts[1], lambda: wait_until(lambda: "the run has stalled" in (runs / "node_1.log").read_text()))
        statuses, told = end(nodes, runs)
        assert all(statuses), told
        assert 3 <= len(facts(runs / "run")) < 12, "the cable was cut too late"
        statuses, told = end(begin(hosts, stack, runs, *exact), runs)
        assert statuses == [0, 0], told
        assert_equal(runs / "run", whole / "run", 12)

        nodes = begin(hosts, stack, stale, *words, "rollout.max_staleness=2")
        at_step(stale, 3, nodes)
        cut(hosts[1], lambda: time.sleep(5))
        statuses, told = end(nodes, stale)
        assert statuses == [0, 0], told
    found = facts(stale / "run")
    assert [step for step, _ in found] == list(range(1, 13))
    assert max(metrics["async/staleness_max"] for _, metrics in found) <= 2
