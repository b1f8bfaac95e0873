"""The adapter of serving engines, against what a real vLLM server has answered (tests/data/engines), with faults."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_replay import Replay, replaying
from engine_session import SAMPLED, adapted, load, move, opened, requests, run, scored, session, slept, sync
from hang import HANG, wait_until
from lockstep.errors import LostProcess, Refusal
from lockstep.model.policy import Policy
from lockstep.model.tiny import write_tiny
from lockstep.parallel.world import World
from lockstep.rollout.servers.server_client import ClientThread, HealthCheck
from lockstep.rollout.servers.server_manager import STARTS
from lockstep.rollout.servers.server_process import ServerProcess

GENERATE = "/lockstep/samples"


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedded") / "model"
    write_tiny(folder)
    return folder


@pytest.fixture
def policy(embedded: Path) -> Policy:
    return load(embedded)


def generated(path: str, body: Any) -> bool:
    """A response of a step, not one of the probe, which has a temperature of its own."""
    return path == GENERATE and body is not None and body["sampling_params"]["temperature"] != 0.7


def probing(path: str, body: Any) -> bool:
    return path == GENERATE and body is not None and body["sampling_params"]["temperature"] == 0.7


def refused(url: str | list[str], policy: Policy, embedded: Path, tmp_path: Path, **values: Any) -> str:
    with pytest.raises(Refusal) as caught, opened(url, policy, embedded, tmp_path, **values) as engine:
        session(engine)
    return str(caught.value)


def test_a_session_as_it_was_recorded(policy: Policy, embedded: Path, tmp_path: Path) -> None:
    first = load(embedded)
    with replaying("vllm") as server, opened(server.address, policy, embedded, tmp_path) as engine:
        said = session(engine)
        paths = [path.partition("?")[0] for path, _ in server.asked]
    # Two pushes of the first weights, which tell what is noise, and one of those that have moved.
    assert sum(b is not None and b.get("method") == "lockstep_load" for _, b in server.asked) == 3
    order = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/collective_rpc", "/update_weight_version", "/resume"]
    assert paths[paths.index("/pause") :][:6] == order
    for made, weights, temperature in ((said.sampled, first, 0.8), (said.after, policy, 0.8)):
        assert [(one.request, one.sample) for one in made] == [(r, s) for r in range(3) for s in range(2)]
        for one, ours in zip(made, scored(weights, made, temperature), strict=True):
            torch.testing.assert_close(torch.tensor(one.logprobs), ours, rtol=0, atol=1e-4)
    assert {version for one in said.sampled for version in one.versions} == {0}
    assert {version for one in said.after for version in one.versions} == {1}
    assert said.stopped[0].stop == "string"
    assert said.stopped[0].ids == said.greedy[0].ids[: len(said.stopped[0].ids)]
    assert {one.stop for one in said.sampled + said.after} == {"token", "length"}


def off(answer: Any, by: float) -> Any:
    return {**answer, "logprobs": [logprob + by for logprob in answer["logprobs"]]}


def test_log_probs_that_are_off_end_the_run(policy: Policy, embedded: Path, tmp_path: Path) -> None:
    """A tenth of a nat, in the third push alone: the first two say what is noise."""

    def fault(path: str, body: Any, number: int, answer: Any) -> tuple[int, Any]:
        return 200, off(answer, 0.1) if probing(path, body) and pushes(server) == 3 else answer

    with replaying("vllm", fault) as server:
        told = refused(server.address, policy, embedded, tmp_path)
    assert f"at {server.address} [weights-differ]" in told
    assert "after 1 updates" in told
    assert "by 0.1 on average" in told


def pushes(server: Replay) -> int:
    return sum(body is not None and body.get("method") == "lockstep_load" for _, body in server.asked)


def test_raw_log_probs_are_refused_by_the_probe(policy: Policy, embedded: Path, tmp_path: Path) -> None:
    """A server that says it is processed and is not: log-probs of temperature 1 for tokens drawn at 0.7."""
    first = load(embedded)

    def fault(path: str, body: Any, number: int, answer: Any) -> tuple[int, Any]:
        if probing(path, body):
            answer["logprobs"] = raw_scores(first, body["token_ids"], answer["token_ids"])
        return 200, answer

    with replaying("vllm", fault) as server:
        assert "its log-probs of the weight check differ" in refused(server.address, policy, embedded, tmp_path)


@torch.no_grad()
def raw_scores(policy: Policy, prompt: list[int], ids: list[int]) -> list[float]:
    from lockstep.data.batching import micro_batch
    from lockstep.types import Example, Origin

    row = Example([*prompt, *ids], [0] * len(prompt) + [1] * len(ids), Origin("", 0))
    policy.eval()
    return policy(micro_batch([row], packed=True, pad_id=0)).logprobs_K.tolist()


@pytest.mark.parametrize(
    ("method", "change", "why"),
    [
        ("lockstep_facts", {"logprobs_mode": "raw_logprobs"}, "--logprobs-mode is raw_logprobs"),
        ("lockstep_facts", {"vocabulary": 300}, "[other-vocabulary]: its vocabulary has 300"),
        ("lockstep_facts", {"dtype": "bfloat16"}, "[unfit-server]: the server computes in bfloat16"),
        ("lockstep_facts", {"quantization": "fp8"}, "[unfit-server]: its weights are quantized (fp8)"),
        (
            "lockstep_facts",
            {"device": "cuda"},
            "(rollout.sleep): start it with --enable-sleep-mode",
        ),
        (
            "lockstep_facts",
            {"error": "AttributeError: x"},
            "AttributeError: x; ",
        ),
        (
            "lockstep_load",
            {"error": "ValueError: missing"},
            "[weight-sync-failed]",
        ),
        ("lockstep_version", {"version": "as started"}, "reports version as started"),
    ],
)
def test_what_a_server_says_of_itself(
    policy: Policy, embedded: Path, tmp_path: Path, method: str, change: dict, why: str
) -> None:
    def fault(path: str, body: Any, number: int, answer: Any) -> tuple[int, Any]:
        if body is not None and body.get("method") == method:
            answer["results"] = [{**result, **change} for result in answer["results"]]
        return 200, answer

    # Of a server that can sleep, or is on a CPU, nothing is said.
    with replaying("vllm", fault) as server:
        assert why in refused(server.address, policy, embedded, tmp_path, sleep=True)


@pytest.mark.parametrize(
    ("lora_rank", "why"),
    [
        (None, "the server accepts no LoRA adapters, but the run has an adapter of rank 8"),
        (4, "the server accepts LoRA adapters of rank 4 at most"),
    ],
)
def test_a_server_without_room_for_the_adapter_is_refused_with_the_flags(
    embedded: Path, tmp_path: Path, lora_rank: int | None, why: str
) -> None:
    def fault(path: str, body: Any, number: int, answer: Any) -> tuple[int, Any]:
        if body is not None and body.get("method") == "lockstep_facts":
            answer["results"] = [{**result, "lora_rank": lora_rank} for result in answer["results"]]
        return 200, answer

    with replaying("vllm-lora", fault) as server:
        with (
            pytest.raises(Refusal) as caught,
            opened(server.address, load(embedded, lora=8), embedded, tmp_path),
        ):
            pass
        assert not [path for path, _ in server.asked if path.startswith("/pause")]
    told = str(caught.value)
    assert why in told
    assert "--enable-lora --max-loras 1 --max-lora-rank 8" in told


def test_a_server_that_is_lost_in_mid_step_is_given_the_weights_again(
    policy: Policy, embedded: Path, tmp_path: Path
) -> None:
    """Its connections are cut from the third response on, until it is asked for its health."""
    lost: list[bool] = []

    def fault(path: str, body: Any, number: int, answer: Any) -> tuple[int, Any] | None:
        if path == "/health" and lost:
            lost[:] = [False]
        done = [body["sampling_params"]["seed"] for path, body in server.asked if generated(path, body)]
        if generated(path, body) and not lost and len(done) >= 3:
            lost.append(True)
        return None if lost == [True] else (200, answer)

    with replaying("vllm", fault) as server, opened(server.address, policy, embedded, tmp_path) as engine:
        sync(engine)
        before = pushes(server)
        made = run(engine, requests(), SAMPLED)
        assert pushes(server) == before + 1
        seeds = [body["sampling_params"]["seed"] for path, body in server.asked if generated(path, body)]
    with replaying("vllm") as server, opened(server.address, load(embedded), embedded, tmp_path) as engine:
        sync(engine)
        assert run(engine, requests(), SAMPLED) == made
    assert len(set(seeds)) == 6
    # All six, of which the third was cut: those behind it in the same request never reached the server.
    assert len(seeds) == 7


@pytest.mark.slow
def test_a_server_that_came_back_with_other_weights_is_found_out(
    policy: Policy, embedded: Path, tmp_path: Path
) -> None:
    changed: list[int] = []

    def fault(path: str, body: Any, number: int, answer: Any) -> tuple[int, Any]:
        if generated(path, body) and not changed:
            changed.append(number)
            answer["versions"] = ["default"]
        return 200, answer

    with replaying("vllm", fault) as server, opened(server.address, policy, embedded, tmp_path) as engine:
        sync(engine)
        before = pushes(server)
        assert len(run(engine, requests(), SAMPLED)) == 6
        assert pushes(server) == before + 1


def test_samples_are_shared_and_asked_again_elsewhere(policy: Policy, embedded: Path, tmp_path: Path) -> None:
    gone: list[bool] = []

    def fault(path: str, body: Any, number: int, answer: Any) -> tuple[int, Any] | None:
        if generated(path, body):
            gone.append(True)
        return None if gone else (200, answer)

    with (
        replaying("vllm", fault) as one,
        replaying("vllm") as other,
        opened([one.address, other.address], policy, embedded, tmp_path) as engine,
    ):
        sync(engine)
        assert len(run(engine, requests(), SAMPLED)) == 6
        assert [server.up for server in engine.fleet.servers] == [False, True]
        asked = [sum(generated(*request) for request in server.asked) for server in (one, other)]
        assert asked[0] > 0
        assert asked[1] == 6


@pytest.mark.slow
def test_an_aborted_response_is_asked_again(policy: Policy, embedded: Path, tmp_path: Path) -> None:
    aborted: list[int] = []

    def fault(path: str, body: Any, number: int, answer: Any) -> tuple[int, Any]:
        if generated(path, body) and not aborted:
            aborted.append(number)
            answer["finish_reason"] = "abort"
        return 200, answer

    with replaying("vllm", fault) as server, opened(server.address, policy, embedded, tmp_path) as engine:
        sync(engine)
        assert len(run(engine, requests(), SAMPLED)) == 6
        assert sum(generated(*request) for request in server.asked) == 7


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda answer: answer.update(token_ids=answer["token_ids"][:-1]), "tokens but"),
        (
            lambda answer: answer.update(finish_reason="stop", stop_reason=None, token_ids=[1] * 12),
            "unexpected reason: stop",
        ),
        (lambda answer: answer.pop("logprobs"), "malformed answer"),
        (lambda answer: answer.update(prompt="fedcba9876543210"), "the answer belongs to another prompt"),
        (lambda answer: answer.pop("prompt"), "malformed answer: KeyError\\('prompt'\\)"),
        (
            lambda answer: answer.update(token_ids=[1] * 36, logprobs=[-1.0] * 36),
            "36 tokens; the request allows 1 to 12",
        ),
        (lambda answer: answer.update(token_ids=[259, *answer["token_ids"][1:]]), "token 0 of an answer is 259"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_ends_the_run(
    policy: Policy, embedded: Path, tmp_path: Path, change: Callable[[dict], Any], why: str
) -> None:
    def fault(path: str, body: Any, number: int, answer: Any) -> tuple[int, Any]:
        if generated(path, body) and len(answer["token_ids"]) == 12:
            change(answer)
        return 200, answer

    with replaying("vllm", fault) as server:
        assert re.search(why, refused(server.address, policy, embedded, tmp_path))


def test_a_request_that_the_server_refuses_ends_the_run(policy: Policy, embedded: Path, tmp_path: Path) -> None:
    def fault(path: str, body: Any, number: int, answer: Any) -> tuple[int, Any]:
        return (400, "ValueError: temperature must be in [0, 2]") if generated(path, body) else (200, answer)

    with replaying("vllm", fault) as server:
        told = refused(server.address, policy, embedded, tmp_path)
    assert f"{GENERATE}: answered 400: ValueError: temperature must be in [0, 2]" in told


def test_a_response_that_the_servers_context_cut_ends_the_run(policy: Policy, embedded: Path, tmp_path: Path) -> None:
    def fault(path: str, body: Any, number: int, answer: Any) -> tuple[int, Any]:
        if generated(path, body) and answer["finish_reason"] == "length":
            answer["token_ids"].pop()
            answer["logprobs"].pop()
        return 200, answer

    with replaying("vllm", fault) as server:
        assert "was cut after 11 of 12" in refused(server.address, policy, embedded, tmp_path)


@pytest.mark.slow
def test_a_server_that_never_answers_is_given_up(policy: Policy, embedded: Path, tmp_path: Path) -> None:
    with replaying("vllm") as server:
        address = server.address
    with (
        pytest.raises(Refusal, match=r"no answer in 0\.5 s") as caught,
        opened(address, policy, embedded, tmp_path, server={"start_timeout": 0.5}),
    ):
        pass
    assert "rollout.server.start_timeout" in str(caught.value)
    assert not isinstance(caught.value, LostProcess)  # it would be refused again


@pytest.mark.slow
def test_a_server_that_ends_before_it_ever_answered_is_refused(
    policy: Policy, embedded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started by lockstep, with a flag that it does not know."""
    package = tmp_path / "package" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    words = "import argparse; argparse.ArgumentParser().parse_args()"
    (package / "api_server.py").write_text(words, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "package"))
    with (
        pytest.raises(
            Refusal, match=r"the server ended with status 2(.|\n)*unrecognized arguments: (.|\n)*--speed 9"
        ) as c,
        opened(None, policy, embedded, tmp_path, server={"args": ["--speed", "9"]}),
    ):
        pass
    assert not isinstance(c.value, LostProcess)
    # One that is killed, as by a machine without memory, may come up at the next try.
    (package / "api_server.py").write_text("import os; os.kill(os.getpid(), 9)", encoding="utf-8")
    with (
        pytest.raises(LostProcess, match=r"the server was killed \(SIGKILL\)"),
        opened(None, policy, embedded, tmp_path),
    ):
        pass


@dataclass
class CutOff:
    """From when it is told, every connection is cut."""

    gone: bool = False

    def __call__(self, path: str, body: Any, number: int, answer: Any) -> tuple[int, Any] | None:
        return None if self.gone else (200, answer)


def ends_at_once(log: Path) -> ServerProcess:
    return ServerProcess([sys.executable, "-c", "raise SystemExit('no memory left')"], {}, log)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["generation", "hand-over"])
def test_a_server_of_ours_that_is_lost_again_and_again_may_work_after_a_restart(
    policy: Policy, embedded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """It has worked, is then gone, and each of its successors ends before it answers."""
    restarts: list[ServerProcess] = []
    restart = ServerProcess.restart
    monkeypatch.setattr(ServerProcess, "restart", lambda self: (restarts.append(self), restart(self)))
    cut = CutOff()
    with replaying("vllm", cut) as server, opened(server.address, policy, embedded, tmp_path) as engine:
        engine.fleet.servers[0].process = ends_at_once(tmp_path / "vllm.log")
        sync(engine)
        cut.gone = True
        move(policy)
        with pytest.raises(LostProcess, match=r"\[server-lost\].* 4 times (.|\n)*no memory left"):
            run(engine, requests(), SAMPLED) if when == "generation" else sync(engine, 1)
    assert len(restarts) == STARTS


@pytest.mark.slow
def test_a_server_of_others_that_does_not_come_back_may_work_after_a_restart(
    policy: Policy, embedded: Path, tmp_path: Path
) -> None:
    cut = CutOff()
    with (
        replaying("vllm", cut) as server,
        opened(server.address, policy, embedded, tmp_path, server={"start_timeout": 0.5}) as engine,
    ):
        sync(engine)
        cut.gone = True
        with pytest.raises(LostProcess, match=r"no answer in 0\.5 s from"):
            run(engine, requests(), SAMPLED)


@pytest.mark.slow
def test_a_response_that_is_lost_with_every_server_may_be_had_after_a_restart(
    policy: Policy, embedded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server comes back each time, and is lost under the response again."""
    monkeypatch.setattr("lockstep.rollout.servers.fleet._HEALTH_PAUSE", 0.01)

    def fault(path: str, body: Any, number: int, answer: Any) -> tuple[int, Any] | None:
        return None if generated(path, body) else (200, answer)

    with replaying("vllm", fault) as server, opened(server.address, policy, embedded, tmp_path) as engine:
        sync(engine)
        with pytest.raises(LostProcess, match="was requested 6 times without success"):
            run(engine, requests(), SAMPLED)


@pytest.mark.parametrize(("before", "kind"), [(False, Refusal), (True, LostProcess)])
def test_a_server_that_breaks_in_a_push_may_take_it_after_a_restart_if_it_ever_did(
    policy: Policy, embedded: Path, tmp_path: Path, before: bool, kind: type[Refusal]
) -> None:
    broken = [not before]

    def fault(path: str, body: Any, number: int, answer: Any) -> tuple[int, Any]:
        return (500, "EngineDeadError") if broken == [True] and path.startswith("/pause") else (200, answer)

    with replaying("vllm", fault) as server, opened(server.address, policy, embedded, tmp_path) as engine:
        if before:
            sync(engine)
            broken[:] = [True]
            move(policy)
        with pytest.raises(Refusal, match=r"\[weight-sync-failed\].* after 1 updates") as caught:
            sync(engine, 1)
    assert type(caught.value) is kind


def test_an_address_must_be_one(policy: Policy, embedded: Path, tmp_path: Path) -> None:
    assert "'localhost:8000' is not an HTTP address" in refused("localhost:8000", policy, embedded, tmp_path)


def test_weights_that_did_not_change_are_not_pushed(policy: Policy, embedded: Path, tmp_path: Path) -> None:
    with replaying("vllm") as server, opened(server.address, policy, embedded, tmp_path) as engine:
        sync(engine)
        before = pushes(server)
        sync(engine, 1)
        assert pushes(server) == before
        move(policy)
        sync(engine, 1)
        assert pushes(server) == before + 1
        assert not list(Path("/dev/shm").glob(f"lockstep-weights-{os.getpid()}-*"))


@pytest.mark.slow
def test_an_adapter_is_pushed_alone(embedded: Path, tmp_path: Path) -> None:
    policy = load(embedded, lora=8)
    first = load(embedded)
    with replaying("vllm-lora") as server, opened(server.address, policy, embedded, tmp_path) as engine:
        made = adapted(engine)
    asked = [body["model"] for path, body in server.asked if generated(path, body)]
    assert pushes(server) == 0
    assert len(set(asked)) == 2  # an adapter's name tells its version
    # A fresh adapter changes nothing, one that has moved does.
    for weights, part in ((first, made[:3]), (policy, made[3:])):
        for one, ours in zip(part, scored(weights, part, SAMPLED.temperature), strict=True):
            torch.testing.assert_close(torch.tensor(one.logprobs), ours, rtol=0, atol=1e-4)


def test_a_server_that_slept_is_given_the_weights_again(policy: Policy, embedded: Path, tmp_path: Path) -> None:
    with replaying("vllm-sleep") as server, opened(server.address, policy, embedded, tmp_path, sleep=True) as engine:
        made = slept(engine)
    paths = [path for path, _ in server.asked]
    assert pushes(server) == 3
    back = paths[paths.index("/sleep?level=2") :]
    woken = [back.index(f"/wake_up?tags={tag}") for tag in ("weights", "kv_cache")]
    assert woken[0] < back.index("/pause?mode=abort") < woken[1] < back.index("/resume")
    assert [(one.ids, one.logprobs) for one in made[:3]] == [(one.ids, one.logprobs) for one in made[3:]]


@dataclass(frozen=True)
class Ranks(World):
    """Rank 1 hears what rank 0 has laid down, which has gone through the whole test before it."""

    laid: list[Any] = field(default_factory=list)

    def gather(self, value: Any) -> list[Any]:
        if self.rank == 0:
            self.laid.append(value)
            return [value, None]
        return [self.laid.pop(0), value]


@pytest.mark.slow
def test_rank_0_pushes_and_all_ranks_ask(embedded: Path, tmp_path: Path) -> None:
    laid: list[Any] = []
    cut = CutOff()
    with replaying("vllm", cut) as server:
        for number in range(2):
            world = Ranks(number, 2, laid=laid)
            limit = {"start_timeout": 0.5}
            with opened(server.address, load(embedded), embedded, tmp_path, world, server=limit) as engine:
                sync(engine)
                # The server is rank 0's to push to; by now it has gone on to the third push.
                if number == 0:
                    assert len(run(engine, requests(), SAMPLED)) == 6
                assert engine.weight_sync.pushes == (2 if number == 0 else 0)
                assert engine.fleet.version.endswith("-2")
                # What rank 0 is refused ends all, and what it lost.
                move(engine.policy, by=0.5)
                with pytest.raises(Refusal, match="log-probs of the weight check") as caught:
                    sync(engine, 1)
                assert type(caught.value) is Refusal
                cut.gone = True
                move(engine.policy, by=0.5)
                with pytest.raises(LostProcess, match=r"rollout\.server\.start_timeout"):
                    sync(engine, 2)
    assert pushes(server) == 3
    assert laid == []


# -- waits for a server that is gone, and for one that is slow


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server is looked at all the time, and given up after a moment."""
    for name, seconds in {"LOOK_SECONDS": 0.05, "TELL_SECONDS": 0.05, "GONE_SECONDS": 0.2}.items():
        monkeypatch.setattr(f"lockstep.rollout.servers.server_client.{name}", seconds)


@dataclass
class StuckPush:
    """A push that is never answered, as when vLLM's EngineCore is killed under it; `health` is what /health answers."""

    health: int
    stuck: bool = False
    entered: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)

    def __call__(self, path: str, body: Any, number: int, answer: Any) -> tuple[int, Any] | None:
        if self.stuck and body is not None and body.get("method") == "lockstep_load":
            self.entered.set()
            self.over.wait(HANG)
        return (self.health, None) if self.stuck and path == "/health" else (200, answer)


@pytest.mark.slow
def test_a_push_to_an_engine_that_died_ends_and_leaves_no_weights_behind(
    policy: Policy, embedded: Path, tmp_path: Path, soon: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """The HTTP server is there, and says of its health that the engine is dead. An answer may take 30 minutes."""
    stuck = StuckPush(503)
    with (
        replaying("vllm", stuck) as server,
        opened(server.address, policy, embedded, tmp_path, server={"start_timeout": 0.2}) as engine,
    ):
        sync(engine)
        move(policy)
        stuck.stuck = True
        with pytest.raises(LostProcess) as caught:
            sync(engine, 1)
        stuck.over.set()
    assert "/health: answered 503" in str(caught.value)
    told = capfd.readouterr().err
    assert f"waiting for {server.address}/collective_rpc" in told
    assert "/health answers 503; the server is regarded as lost after" in told
    assert not list(Path("/dev/shm").glob(f"lockstep-weights-{os.getpid()}-*"))


def test_a_push_that_takes_long_is_told_and_waited_for(
    policy: Policy, embedded: Path, tmp_path: Path, soon: None, capfd: pytest.CaptureFixture[str]
) -> None:
    slow = StuckPush(200)
    told: list[str] = []
    with replaying("vllm", slow) as server, opened(server.address, policy, embedded, tmp_path) as engine:
        sync(engine)
        move(policy)
        slow.stuck = True

        def let_go() -> None:
            slow.entered.wait(HANG)
            wait_until(lambda: told.append(capfd.readouterr().err) or "the server is healthy" in "".join(told))
            slow.over.set()

        threading.Thread(target=let_go, daemon=True).start()
        sync(engine, 1)
    assert f"waiting for {server.address}/collective_rpc" in "".join(told)
    assert pushes(server) == 3


@pytest.mark.slow
def test_a_server_that_takes_connections_and_says_nothing_is_busy(soon: None) -> None:
    """As an event loop does that loads weights, or a process that is stopped."""
    with socket.socket() as silent, socket.socket() as closed:
        for one in (silent, closed):
            one.bind(("127.0.0.1", 0))
        silent.listen()
        lines = ClientThread()
        try:
            for one, gone in ((silent, None), (closed, "the server is gone: Connection refused")):
                pulse = HealthCheck(f"http://127.0.0.1:{one.getsockname()[1]}")

                async def looked(pulse: HealthCheck = pulse) -> str | None:
                    found = None
                    for _ in range(8):
                        found = await pulse.check(lines._client)
                        await asyncio.sleep(0.05)
                    return found

                said = lines.start(looked()).result(HANG)
                assert said is gone is None or str(said).startswith(str(gone))
        finally:
            lines.close()


# -- servers that are not there at the start


def test_a_run_starts_with_the_servers_that_answer(
    policy: Policy, embedded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One of two is dead, and comes later."""
    monkeypatch.setattr("lockstep.rollout.servers.server_manager.OTHERS_SECONDS", 0.0)
    monkeypatch.setattr("lockstep.rollout.servers.server_manager.POLL_SECONDS", 0.01)
    cut = CutOff(gone=True)
    with (
        replaying("vllm") as one,
        replaying("vllm", cut) as other,
        opened([other.address, one.address], policy, embedded, tmp_path) as engine,
    ):
        told = capfd.readouterr().err
        assert "warning: 1 of 2 servers of rollout.url did not answer" in told
        assert f"{other.address}:" in told
        sync(engine)
        assert len(run(engine, requests(), SAMPLED)) == 6
        assert [server.up for server in engine.fleet.servers] == [False, True]
        assert not any(generated(*request) for request in other.asked)
        cut.gone = False
        engine.weight_sync.bring_up(engine.fleet.servers[0])
        assert [server.up for server in engine.fleet.servers] == [True, True]
        assert len(engine.manager.engines) == 2


def test_a_server_that_comes_late_and_does_not_fit_is_left_out(
    policy: Policy, embedded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lockstep.rollout.servers.server_manager.OTHERS_SECONDS", 0.0)
    monkeypatch.setattr("lockstep.rollout.servers.server_manager.POLL_SECONDS", 0.01)
    gone = [True]

    def fault(path: str, body: Any, number: int, answer: Any) -> tuple[int, Any] | None:
        if body is not None and body.get("method") == "lockstep_facts":
            answer["results"] = [{**result, "dtype": "bfloat16"} for result in answer["results"]]
        return None if gone[0] else (200, answer)

    with (
        replaying("vllm") as one,
        replaying("vllm", fault) as other,
        opened([one.address, other.address], policy, embedded, tmp_path) as engine,
    ):
        sync(engine)
        gone[0] = False
        late = engine.fleet.servers[1]
        engine.weight_sync.bring_up(late)
        assert (late.up, late.left_out) == (False, True)
        assert len(run(engine, requests(), SAMPLED)) == 6
        move(policy)
        sync(engine, 1)
        assert not pushes(other)
    told = capfd.readouterr().err
    assert f"{other.address} is excluded from the run" in told
    assert "bfloat16" in told
