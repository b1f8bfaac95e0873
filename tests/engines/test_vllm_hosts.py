"""GRPO with a real vLLM server on another host (a network namespace), whose cable is cut in the middle of the run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from conftest import write_online_recipe
from hang import HANG, wait_until
from runs import facts
from two_hosts import Host, two_hosts, why_none

pytestmark = pytest.mark.skipif(bool(why_none()), reason=why_none())
KEY = "key-of-the-test"
SERVER = """
import sys, time
from pathlib import Path
from lockstep.device.cpu import Cpu
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout.servers.adapter import ServerNeeds
from lockstep.rollout.servers.server_process import start_server
from lockstep.rollout.servers.vllm import Vllm

python, model, folder, host = sys.argv[1:]
settings = RolloutSettings(engine="vllm", server={"python": python, "env": {"OMP_NUM_THREADS": "1"}})
log = Path(folder) / "vllm.log"
process, url, _ = start_server(Vllm(), settings, Cpu(), model, "fp32", ServerNeeds("cpu"), log, host)
Path(folder, "url.part").write_text(url)
Path(folder, "url.part").rename(Path(folder, "url"))
while process.alive:
    time.sleep(1)
"""


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


def test_grpo_with_vllm_on_another_host_survives_a_cut_cable(
    hosts: tuple[Host, Host], python: str, embedded: Path, tmp_path: Path
) -> None:
    """Wherever the cut falls: requests are repeated when the server is back; a run that was pushing weights ends with
    status 75, and the same command goes on."""
    near, far = hosts
    recipe, log = write_online_recipe(tmp_path, embedded), tmp_path / "run.log"
    (tmp_path / "server.py").write_text(SERVER, encoding="utf-8")
    (tmp_path / "weights").mkdir()
    with ExitStack() as stack:
        words = [sys.executable, tmp_path / "server.py", python, embedded, tmp_path, far.address]
        server = far.start(words, tmp_path / "server.log", LOCKSTEP_SERVER_KEY=KEY)
        stack.callback(lambda: (server.kill(), server.wait()))
        wait_until(lambda: (tmp_path / "url").exists() or server.poll() is not None)
        assert server.poll() is None, (tmp_path / "server.log").read_text()
        url = (tmp_path / "url").read_text()
        assert far.address in url

        command = [sys.executable, "-m", "lockstep", "train", recipe, "rollout.engine=vllm", f"rollout.url={url}"]
        command += ["checkpoint.every=1", "checkpoint.asynchronous=false", "run.export=false", "run.steps=6"]
        command += [f"rollout.server.folder={tmp_path / 'weights'}", "rollout.max_tokens=64"]

        def train() -> int:
            run = near.start(command, log, LOCKSTEP_SERVER_KEY=KEY)
            stack.callback(lambda: (run.kill(), run.wait()))
            metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
            if not metrics.exists():
                wait_until(lambda: run.poll() is not None or (metrics.exists() and metrics.stat().st_size > 0))
                far.link("down")
                try:
                    # The first is told of a cut during a request, the second of one between two requests.
                    lost = ("the server is gone", "No route to host")
                    wait_until(lambda: run.poll() is not None or any(why in log.read_text() for why in lost))
                finally:
                    far.link("up")
            return run.wait(timeout=HANG)

        status = train()
        assert status in (0, 75), log.read_text()
        if status == 75:
            assert url in log.read_text()
            assert train() == 0, log.read_text()
    told = log.read_text()
    assert url in told
    assert KEY not in told
    steps = facts(tmp_path / "runs" / "run")
    assert [step for step, _ in steps] == list(range(1, 7))
    assert max(metrics["training/rollout_probs_diff_max"] for _, metrics in steps) < 1e-3
