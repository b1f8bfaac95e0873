"""The engine that requests come to and go from while it runs, beside the one that answers a batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_models import SIZES, Recorder, gigabytes, load, prompts, write_model
from transformers import Qwen2Config

from lockstep.device.cpu import Cpu
from lockstep.model.policy import Policy
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout.native.native_engine import NativeEngine
from lockstep.rollout.native.online_engine import DrawnToken, LiveEngine, LiveSample
from lockstep.types import Request, Sampling

WAYS = (
    Sampling(20, temperature=0.0, seed=1),
    Sampling(9, temperature=0.7, top_p=0.8, seed=2),
    Sampling(20, temperature=1.3, top_k=9, seed=3, stop_ids=(7, 70, 170)),
    Sampling(14, temperature=1.0, repetition_penalty=1.4, seed=4),
)


Asked = list[tuple[list[int], int, Sampling]]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Policy:
    return load(write_model(tmp_path_factory.mktemp("qwen2") / "model", Qwen2Config(**SIZES), tiny_folder))


@pytest.fixture(scope="module")
def asked() -> Asked:
    mixed = [(ids, 1 + key % 3, WAYS[key % 4]) for key, ids in enumerate(prompts(9, seed=3))]
    return mixed + [(ids, 1, replace(WAYS[0], max_tokens=40)) for ids in prompts(4, seed=4)]


@pytest.fixture(scope="module")
def expected(policy: Policy, asked: Asked) -> list[list[list[int]]]:
    return [batch(policy, ids, n, sampling) for ids, n, sampling in asked]


def batch(policy: Policy, ids: list[int], n: int, sampling: Sampling) -> list[list[int]]:
    """What the batch engine answers to the request alone."""
    engine = NativeEngine(policy, Cpu(), RolloutSettings(), lambda ids: "")
    made = sorted(engine.generate([Request(ids, 1, n)], sampling), key=lambda one: one.sample)
    return [one.ids for one in made]


def alone(engine: LiveEngine, orders: Asked, gone: set[int]) -> tuple[list[list[int]], list[DrawnToken]]:
    """Orders that come one by one, a round apart; those numbered in `gone` leave after three more rounds."""
    samples: dict[int, list[LiveSample]] = {}
    told: list[DrawnToken] = []
    rounds, waiting = 0, list(enumerate(orders))
    while waiting or engine.busy:
        if waiting:
            number, (ids, n, sampling) = waiting.pop(0)
            samples[number] = engine.add(ids, n, sampling, key=1, likeliest=2 if number == 1 else None)
        for number in gone & samples.keys():
            if rounds == number + 3:
                for sample in samples[number]:
                    engine.cancel(sample)
        told += [one for _, found in engine.step() for one in found]
        rounds += 1
        assert rounds < 5000
    return [sample.tokens[sample.prompt :] for number in samples for sample in samples[number]], told


@pytest.mark.daily("Recorder-settings2")
@pytest.mark.parametrize(
    ("device", "settings"),
    [
        (Cpu, {}),
        (Cpu, {"block_tokens": 4, "cache_gb": gigabytes(24, 4), "prefill_tokens": 11, "max_sequences": 5}),
        (Recorder, {}),
        (Recorder, {"block_tokens": 4, "cache_gb": gigabytes(24, 4), "prefill_tokens": 11, "max_sequences": 5}),
    ],
)
def test_each_gets_what_it_would_get_alone(
    policy: Policy, asked: Asked, expected: list[list[list[int]]], device: type[Cpu], settings: dict[str, object]
) -> None:
    """Whatever the others ask for, and whoever goes away. With recorded passes too, which only those share who are
    drawn alike: at the end the greedy ones are alone."""
    longest = max(len(ids) + sampling.max_tokens for ids, _, sampling in asked)
    engine = LiveEngine(NativeEngine(policy, device(), RolloutSettings(**settings), lambda ids: ""), longest)
    before = engine.free
    made, told = alone(engine, asked, gone={2, 5})
    number = 0
    for order, texts in enumerate(expected):
        for text in texts:
            cut = order in (2, 5)
            assert made[number] == (text[: len(made[number])] if cut else text), order
            number += 1
    assert (engine.free, engine.scheduler.prefixes) == (before, {})
    if settings:
        assert engine.scheduler.preempted > 0
    scored = [one for one in told if one.logprob is not None]
    assert len(scored) == 2 * 9
    assert all(one.likeliest[0][1] >= one.logprob for one in scored)


def test_recorded_passes_are_used_where_all_are_drawn_alike(policy: Policy) -> None:
    device = Recorder()
    engine = LiveEngine(NativeEngine(policy, device, RolloutSettings(), lambda ids: ""), 64)
    asked = [(ids, 2, WAYS[0]) for ids in prompts(3, seed=5)]
    made, _ = alone(engine, asked, gone=set())
    assert made == [text for ids, n, sampling in asked for text in batch(policy, ids, n, sampling)]
    assert device.captured > 0


def test_a_sample_that_was_drawn_beside_others_goes_on_in_recorded_passes(policy: Policy) -> None:
    """What the device holds of it is older than what the host has, after rounds that were not recorded."""
    device = Recorder()
    engine = LiveEngine(NativeEngine(policy, device, RolloutSettings(), lambda ids: ""), 96)
    first, second = prompts(2, seed=6)
    long = replace(WAYS[0], max_tokens=60)
    (sample,) = engine.add(first, 1, long, key=1)
    lengths = []
    while engine.busy:
        if len(sample.tokens) - sample.prompt >= 16 and not lengths:
            lengths.append(len(sample.tokens))
            engine.add(second, 1, replace(WAYS[1], max_tokens=5), key=1)
        engine.step()
    assert device.captured > 0
    assert [sample.tokens[sample.prompt :]] == batch(policy, first, 1, long)


def test_what_does_not_fit_is_an_error_of_the_caller(policy: Policy) -> None:
    engine = LiveEngine(NativeEngine(policy, Cpu(), RolloutSettings(max_sequences=2), lambda ids: ""), 32)
    for ids, sampling in (([], Sampling(4)), ([1] * 30, Sampling(3)), ([1], Sampling(0))):
        with pytest.raises(ValueError, match="exceed the limit 32"):
            engine.add(ids, 1, sampling, key=1)
    assert not engine.busy
    assert not any(torch.count_nonzero(tensor) for tensor in engine.cache.tensors)
