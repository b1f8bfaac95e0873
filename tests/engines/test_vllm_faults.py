"""What may go wrong between a run and a vLLM server: a push that is not whole, a server that is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine_session import GREEDY, SAMPLED, load, move, opened, requests, run, sync
from lockstep.errors import Refusal
from lockstep.rollout.server import handover
from lockstep.rollout.server.dialect import PushedWeights
from lockstep.rollout.server.weights import written_weights
from lockstep.types import Sampling

LEFT_OUT = "model.layers.1.self_attn.k_proj.weight"


def spoiled(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[..., PushedWeights]:
    """Weights that are not those of the policy by the time they are on their way."""

    def write(folder: Path, weights, dtype: torch.dtype) -> PushedWeights:
        tensors = {name: tensor.detach().clone() for name, tensor in weights}
        change(tensors)
        return written_weights(folder, list(tensors.items()), dtype)

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

    monkeypatch.setattr(handover, "written_weights", spoiled(change))
    assert "its log-probs of the probe differ from the trainer's" in refused(pushed)


def test_a_tensor_left_out_of_the_files_is_caught(pushed, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(folder: Path, weights, dtype: torch.dtype) -> PushedWeights:
        whole = spoiled(lambda tensors: tensors.pop(LEFT_OUT))(folder, weights, dtype)
        return PushedWeights(whole.files, [name for name, _ in weights])

    monkeypatch.setattr(handover, "written_weights", write)
    assert LEFT_OUT in refused(pushed)


def test_a_tensor_that_nobody_announced_is_missed(pushed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left out of the list too: vLLM's own loader only warns of some of them, the probe sees the rest."""
    write = spoiled(lambda tensors: tensors.pop(LEFT_OUT))
    monkeypatch.setattr(handover, "written_weights", write)
    assert "did not take the weights" in (told := refused(pushed)) or "log-probs of the probe" in told


def test_weights_that_stay_where_they_were_are_caught(pushed, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update so small that log-probs move within the bounds, and a push that does nothing."""
    sync(pushed, 1)
    before = {name: tensor.detach().clone() for name, tensor in pushed.policy.stored.named_parameters()}
    move(pushed.policy, by=2e-7, seed=5)
    monkeypatch.setattr(
        handover,
        "written_weights",
        lambda folder, weights, dtype: written_weights(folder, list(before.items()), dtype),
    )
    assert "those of the weights before the last update" in refused(pushed)


def test_a_server_that_is_killed_in_mid_step_comes_back(embedded: Path, tmp_path: Path, python: str) -> None:
    """One that lockstep started itself: what was finished is kept, the rest is drawn again, the same tokens."""
    policy = load(embedded)
    move(policy)
    long = Sampling(max_tokens=300, temperature=1.0, seed=3)
    (tmp_path / "run").mkdir()
    server = {"python": python, "env": {"OMP_NUM_THREADS": "1"}}
    with opened(None, policy, embedded, tmp_path / "run" / "rollout", server=server) as engine:
        sync(engine, 4)
        whole = run(engine, requests(2), long)
        short = run(engine, requests(2), SAMPLED)
        assert {one.stop for one in whole} == {"length"}
        made = []
        for one in engine.generate([*requests(2), *requests(2)], long):
            if not made:
                # Its own warden's child: all processes of the server at once.
                engine.fleet.servers[0].process._process.kill()
            made.append(one)
        assert engine.fleet.servers[0].starts == 0  # it has weights again
        made.sort(key=lambda one: (one.request % 3, one.sample, one.request))
        assert [one.ids for one in made[::2]] == [one.ids for one in whole] == [one.ids for one in made[1::2]]
        assert run(engine, requests(2), SAMPLED) == short
        assert not list(Path("/dev/shm").glob("lockstep-weights-*"))


def test_two_servers_share_the_samples_and_one_is_enough(
    server, start: Callable, embedded: Path, tmp_path: Path
) -> None:
    other = start(embedded)
    other.wait()
    policy = load(embedded)
    move(policy)
    long = Sampling(max_tokens=200, temperature=1.0, seed=3)
    with opened([server.url, other.url], policy, embedded, tmp_path) as engine:
        sync(engine, 1)
        both = run(engine, requests(4), long)
        made = []
        for one in engine.generate(requests(4), long):
            if not made:
                threading.Thread(target=other.process.close).start()
            made.append(one)
        made.sort(key=lambda one: (one.request, one.sample))
        assert [one.ids for one in made] == [one.ids for one in both]
        move(policy, seed=2)
        sync(engine, 2)  # without the lost one
        assert [one.up for one in engine.fleet.servers] == [True, False]
        assert len(run(engine, requests(1), GREEDY)) == 3
