"""What may go wrong between a run and a vLLM server: a push that is not whole, a server that is lost."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from engine_session import GREEDY, SAMPLED, load, move, opened, requests, run, sync
from lockstep.errors import Refusal
from lockstep.rollout.servers import weight_sync
from lockstep.rollout.servers.adapter import Answer, PushedWeights, WantedSample
from lockstep.rollout.servers.fleet import Server
from lockstep.rollout.servers.server_engine import ServerEngine
from lockstep.rollout.servers.server_process import ServerProcess
from lockstep.rollout.servers.weight_source import WeightSource
from lockstep.rollout.servers.weight_transports import write_weights
from lockstep.types import Completion, Request, Sampling

LEFT_OUT = "model.layers.1.self_attn.k_proj.weight"


def spoiled(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[..., PushedWeights]:
    """Weights that are not those of the policy by the time they are on their way."""

    def write(folder: Path, weights, dtype: torch.dtype) -> PushedWeights:
        tensors = {name: tensor.detach().clone() for name, tensor in weights}
        change(tensors)
        return write_weights(folder, WeightSource(weights.policy, tensors.items(), None), dtype)

    return write


def refused(engine) -> str:
    with pytest.raises(Refusal) as caught:
        sync(engine, 1)
    return str(caught.value)


@pytest.fixture
def pushed(server, embedded: Path, tmp_path: Path):
    """An engine whose server has the weights, which then move a little."""
    policy = load(embedded)
    with opened(server.url, policy, embedded, tmp_path) as engine:
        sync(engine)
        move(policy, by=0.01)
        yield engine


@pytest.mark.parametrize("name", [LEFT_OUT, "model.norm.weight", "model.embed_tokens.weight"])
def test_a_corrupted_tensor_is_caught(pushed, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].mul_(1.5)

    monkeypatch.setattr(weight_sync, "write_weights", spoiled(change))
    assert "log-probs of the weight check differ" in refused(pushed)


def test_a_bit_that_is_lost_on_the_way_is_caught(
    pushed, server, embedded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose change no probe would see: the lowest of a weight's mantissa."""

    def write(folder: Path, weights, dtype: torch.dtype) -> PushedWeights:
        whole = write_weights(folder, weights, dtype)
        (file,) = whole.files
        content = bytearray(file.read_bytes())
        content[-4] ^= 1
        file.write_bytes(content)
        return whole

    monkeypatch.setattr(weight_sync, "write_weights", write)
    last = list(dict(pushed.policy.stored.named_parameters()))[-1]
    assert f"{last} in the files differs" in refused(pushed)
    assert "incomplete" in pushed.server_adapter.version(pushed.fleet.servers[0].client)
    # The next run on that server: its first push is whole.
    monkeypatch.undo()
    with opened(server.url, load(embedded), embedded, tmp_path) as engine:
        sync(engine)


def test_a_tensor_left_out_of_the_files_is_caught(pushed, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(folder: Path, weights, dtype: torch.dtype) -> PushedWeights:
        whole = spoiled(lambda tensors: tensors.pop(LEFT_OUT))(folder, weights, dtype)
        return PushedWeights(whole.files, list(weights.shapes), [0 for _ in weights.shapes])

    monkeypatch.setattr(weight_sync, "write_weights", write)
    assert LEFT_OUT in refused(pushed)


def test_a_tensor_that_nobody_announced_is_missed(pushed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left out of the list too: vLLM's own loader only warns of some of them, the probe sees the rest."""
    write = spoiled(lambda tensors: tensors.pop(LEFT_OUT))
    monkeypatch.setattr(weight_sync, "write_weights", write)
    assert "did not load the weights" in (told := refused(pushed)) or "log-probs of the weight check" in told


def test_weights_that_stay_where_they_were_are_caught(pushed, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update so small that log-probs move within the bounds, and a push that does nothing."""
    sync(pushed, 1)
    before = {name: tensor.detach().clone() for name, tensor in pushed.policy.stored.named_parameters()}
    move(pushed.policy, by=2e-7, seed=5)
    monkeypatch.setattr(
        weight_sync,
        "write_weights",
        lambda folder, weights, dtype: write_weights(folder, WeightSource(weights.policy, before.items(), None), dtype),
    )
    assert "weights before the last update" in refused(pushed)


@dataclass
class Watched:
    """Which samples were asked of which server, in this order, and which of them it answered: (address, seed, most
    tokens) of each. What belongs to a probe is left out."""

    asked: list[tuple[str, int, int]] = field(default_factory=list)
    answered: list[tuple[str, int, int]] = field(default_factory=list)

    def times(self) -> Counter[tuple[int, int]]:
        return Counter((seed, most) for _, seed, most in self.asked)


LONG = Sampling(max_tokens=300, temperature=1.0, seed=3)
SHORT_TOKENS = 4


def watched(engine: ServerEngine, monkeypatch: pytest.MonkeyPatch) -> Watched:
    said, sampled = Watched(), engine.fleet.sample

    async def noting(server: Server, wanted: WantedSample) -> Answer:
        one = server.client.address, wanted.seed, wanted.max_tokens
        of_a_step = wanted.sampling.temperature == LONG.temperature
        if of_a_step:
            said.asked.append(one)
        answer = await sampled(server, wanted)
        if of_a_step and answer.ended != "aborted":
            said.answered.append(one)
        return answer

    monkeypatch.setattr(engine.fleet, "sample", noting)
    return said


def mixed(n: int = 2) -> list[Request]:
    """Responses of a few tokens and of many: when the first of them is there, none of the long ones can be."""
    return [*(replace(request, max_tokens=SHORT_TOKENS) for request in requests(n)), *requests(n)]


def ordered(made: list[Completion]) -> list[Completion]:
    return sorted(made, key=lambda one: (one.request, one.sample))


def test_the_first_answers_come_while_the_others_are_generated(
    server, embedded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the server is at when the first answer is here is aborted: the long ones are, and are asked again."""
    policy = load(embedded)
    with opened(server.url, policy, embedded, tmp_path) as engine:
        sync(engine)
        whole = run(engine, mixed(), LONG)
        seen = watched(engine, monkeypatch)
        made = []
        for one in engine.generate(mixed(), LONG):
            if not made:
                client = engine.fleet.servers[0].client
                engine.server_adapter.pause(client)
                engine.server_adapter.resume(client)
            made.append(one)
    assert [len(one.ids) for one in whole] == [SHORT_TOKENS] * 6 + [LONG.max_tokens] * 6
    assert len(made[0].ids) == SHORT_TOKENS
    times = seen.times()
    assert len(times) == 12
    assert {times[sample] for sample in times if sample[1] == LONG.max_tokens} == {2}
    assert 1 in {times[sample] for sample in times if sample[1] == SHORT_TOKENS}
    assert [one.ids for one in ordered(made)] == [one.ids for one in whole]


def test_a_server_that_is_killed_in_mid_step_comes_back(
    embedded: Path, tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that lockstep started itself: what was finished is kept, the rest is drawn again, the same tokens."""
    policy = load(embedded)
    move(policy)
    (tmp_path / "run").mkdir()
    server = {"python": python, "env": {"OMP_NUM_THREADS": "1"}}
    with opened(None, policy, embedded, tmp_path / "run" / "rollout", server=server) as engine:
        sync(engine, 4)
        whole = run(engine, mixed(), LONG)
        short = run(engine, requests(2), SAMPLED)
        assert {one.stop for one in whole} == {"length"}
        starts: list[ServerProcess] = []
        restart = ServerProcess.restart
        monkeypatch.setattr(ServerProcess, "restart", lambda self: (starts.append(self), restart(self)))
        seen = watched(engine, monkeypatch)
        made = []
        for one in engine.generate(mixed(), LONG):
            if not made:
                # Its own supervisor's child: all processes of the server at once.
                engine.fleet.servers[0].process._process.kill()
            made.append(one)
        assert len(starts) == 1
        assert engine.fleet.servers[0].starts == 0  # it has weights again
        # The long ones were all lost, and asked once more; what was here before was not.
        times = seen.times()
        assert len(times) == 12
        assert {times[sample] for sample in times if sample[1] == LONG.max_tokens} == {2}
        assert 1 in {times[sample] for sample in times if sample[1] == SHORT_TOKENS}
        assert len(seen.answered) == len(set(seen.answered)) == 12
        assert [one.ids for one in ordered(made)] == [one.ids for one in whole]
        assert run(engine, requests(2), SAMPLED) == short
        assert not list(Path("/dev/shm").glob(f"lockstep-weights-{os.getpid()}-*"))


def test_two_servers_share_the_samples_and_one_is_enough(
    server, start: Callable, embedded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = start(embedded)
    other.wait()
    policy = load(embedded)
    move(policy)
    with opened([server.url, other.url], policy, embedded, tmp_path) as engine:
        sync(engine, 1)
        seen = watched(engine, monkeypatch)
        both = run(engine, mixed(4), LONG)
        assert Counter(address for address, *_ in seen.asked) == {server.url: 12, other.url: 12}
        seen.asked.clear()
        seen.answered.clear()
        made = []
        for one in engine.generate(mixed(4), LONG):
            if not made:
                threading.Thread(target=other.process.close).start()
            made.append(one)
        # What the dead one had and did not answer, the long ones at least, was asked of the other.
        had, told = ({one[1:] for one in of if one[0] == other.url} for of in (seen.asked, seen.answered))
        lost = had - told
        assert len(had) == 12
        assert lost >= {one for one in had if one[1] == LONG.max_tokens} != set()
        again = {one[1:] for one in seen.answered if one[0] == server.url}
        assert again == {one[1:] for one in seen.asked} - told
        assert {sample for sample, times in seen.times().items() if times == 2} == lost
        assert [one.ids for one in ordered(made)] == [one.ids for one in both]
        move(policy, seed=2)
        sync(engine, 2)  # without the lost one
        assert [one.up for one in engine.fleet.servers] == [True, False]
        assert len(run(engine, requests(1), GREEDY)) == 3
