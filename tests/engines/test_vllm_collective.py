"""Weights by a collective to a real vLLM server that lockstep started: pushed, proven, caught, lost in the middle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_session import GREEDY, load, move, opened, requests, run, sync
from lockstep.device.cpu import Cpu
from lockstep.errors import Refusal
from lockstep.model.load import load_tokenizer
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout.native.native_engine import NativeEngine
from lockstep.rollout.servers import weight_transports
from lockstep.rollout.servers.server_engine import ServerEngine
from lockstep.rollout.servers.weight_source import WeightSource
from lockstep.rollout.servers.weight_transports import SHARED_MEMORY, WeightLink

LEFT_OUT = "model.layers.1.self_attn.k_proj.weight"
Bucket = list[tuple[str, torch.Tensor]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, embedded: Path, python: str) -> Iterator[ServerEngine]:
    policy = load(embedded)
    server = {"python": python, "env": {"OMP_NUM_THREADS": "1"}}
    folder = tmp_path_factory.mktemp("run") / "rollout"
    with opened(None, policy, embedded, folder, server=server, weight_sync="collective") as engine:
        yield engine


def assert_generates_with_the_weights(engine: ServerEngine, embedded: Path) -> None:
    made = run(engine, requests(1), GREEDY)
    ours = run(
        NativeEngine(engine.policy, Cpu(), RolloutSettings(), load_tokenizer(str(embedded)).decode), requests(1), GREEDY
    )
    assert [(one.ids, one.stop) for one in made] == [(one.ids, one.stop) for one in ours]
    for one, other in zip(made, ours, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=0, atol=1e-4)


def test_three_pushes_go_by_one_group_and_no_file(
    engine: ServerEngine, embedded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = []
    give = WeightLink.give

    def giving(self: WeightLink, *words: Any) -> None:
        links.append(self)
        assert not list(SHARED_MEMORY.glob("lockstep-weights-*"))
        give(self, *words)

    monkeypatch.setattr(WeightLink, "give", giving)
    for update in range(3):
        move(engine.policy, by=10 ** -(1.5 + update), seed=update)
        sync(engine, update)
        print(f"push {update}: {engine.sync_seconds:.2f} s")
        assert_generates_with_the_weights(engine, embedded)
    # The first time twice, which tells what is noise.
    assert len(links) == 4
    assert len(set(map(id, links))) == 1


def corrupted(sent: Bucket) -> Bucket:
    return [(name, tensor * 1.5 if name == LEFT_OUT else tensor) for name, tensor in sent]


def exchanged(sent: Bucket) -> Bucket:
    """Keys for values: of the same shape, so that nothing but their numbers tells."""
    by_name = dict(sent)
    other = LEFT_OUT.replace("k_proj", "v_proj")
    assert by_name[LEFT_OUT].shape == by_name[other].shape
    places = {LEFT_OUT: other, other: LEFT_OUT}
    return [(name, by_name[places.get(name, name)]) for name, _ in sent]


@pytest.mark.parametrize("change", [corrupted, exchanged])
def test_what_was_not_announced_so_is_caught(
    engine: ServerEngine, monkeypatch: pytest.MonkeyPatch, change: Callable[[Bucket], Bucket]
) -> None:
    flat, names = weight_transports.flat_bucket, [name for name, _ in engine.policy.stored.named_parameters()]

    def changed(tensors: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The checksums of the tensors, and the bytes of others. All tensors are in one bucket."""
        others = [tensor for _, tensor in change(list(zip(names, tensors, strict=True)))]
        head = 8 * len(tensors)
        return torch.cat([flat(tensors, dtype)[:head], flat(others, dtype)[head:]])

    move(engine.policy, by=0.01, seed=7)
    with monkeypatch.context() as patch:
        patch.setattr(weight_transports, "flat_bucket", changed)
        with pytest.raises(Refusal) as caught:
            sync(engine, 4)
    assert "[weight-sync-failed]" in str(caught.value)
    assert "after 4 updates" in str(caught.value)
    assert f"corrupt tensors: ['{LEFT_OUT}'" in str(caught.value)


def without_one(sent: WeightSource) -> WeightSource:
    return WeightSource(sent.policy, [one for one in sent.parameters if one[0] != LEFT_OUT], None)


def test_a_tensor_that_is_not_sent_at_all_is_missed(
    engine: ServerEngine, embedded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give = WeightLink.give
    with monkeypatch.context() as patch:
        patch.setattr(WeightLink, "give", lambda self, sent, dtype: give(self, without_one(sent), dtype))
        with pytest.raises(Refusal) as caught:
            sync(engine, 4)
    assert "did not load the weights" in (said := str(caught.value)) or "log-probs of the weight check" in said
    # A server whose push failed gets a group of its own again, and all weights.
    sync(engine, 5)
    assert_generates_with_the_weights(engine, embedded)


def test_a_server_that_is_killed_in_the_middle_of_a_push_comes_back(
    engine: ServerEngine, embedded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, killed = WeightLink._send_flat, []

    def dying(self: WeightLink, buckets: Any, dtype: torch.dtype) -> None:
        if not killed:
            killed.append(self)
            engine.fleet.servers[0].process._process.kill()
        send(self, buckets, dtype)

    monkeypatch.setattr(WeightLink, "_send_flat", dying)
    move(engine.policy, by=0.02, seed=9)
    sync(engine, 6)
    assert killed
    assert engine.fleet.servers[0].starts == 0  # it has weights again
    assert_generates_with_the_weights(engine, embedded)
