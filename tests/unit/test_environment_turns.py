"""Conversations with environments on the built-in engine: caches are reused, and turns continue with newer weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import environment_classes
from lockstep.data.batching import micro_batch
from lockstep.device.cpu import Cpu
from lockstep.environments.conversation import ChatFormat
from lockstep.environments.host import EnvironmentHosts
from lockstep.environments.loop import EnvironmentEngine
from lockstep.environments.running import Pausing, spread_versions
from lockstep.environments.setup import host_setup
from lockstep.model.load import load_policy, load_tokenizer
from lockstep.model.policy import Policy, evaluating
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.schema import Model
from lockstep.rollout.native.native_engine import NativeEngine
from lockstep.rollout.native.scheduler import Scheduler
from lockstep.types import Completion, Example, Origin, Question, Request, Sampling

TURNS = 3
SAMPLING = Sampling(max_tokens=150, temperature=1.0, seed=5)


@pytest.fixture
def policy(tiny_folder: Path) -> Policy:
    return load_policy(Model(path=str(tiny_folder)), torch.device("cpu"), Cpu().attention, seed=0)


@contextmanager
def conversing(policy: Policy, folder: Path, **keys: Any) -> Iterator[tuple[EnvironmentEngine, NativeEngine]]:
    """Turns of 12 tokens."""
    settings = RolloutSettings(
        environment=f"{environment_classes.__file__}:Echo",
        environment_args={"turns": TURNS, "answer": "go on"},
        **{"environment_workers": 1, "turn_tokens": 12, "max_sequences": 3, "block_tokens": 4, **keys},
    )
    tokenizer = load_tokenizer(str(folder))
    native, hosts = NativeEngine(policy, Cpu(), settings, tokenizer.decode), EnvironmentHosts(host_setup(settings))
    chat = ChatFormat(tokenizer, frozenset({tokenizer.eos_token_id}), settings.history)
    try:
        yield EnvironmentEngine(native, hosts, settings, chat, len(tokenizer)), native
    finally:
        hosts.close()


def request(row: int, n: int = 1) -> Request:
    chat = [{"role": "user", "content": f"row {row}"}]
    return Request([5], 100 + row, n, question=Question("x", chat, str(row), Origin("rows.jsonl", row)))


@torch.no_grad()
def scored(policy: Policy, made: Completion) -> torch.Tensor:
    assert made.prompt_ids is not None
    mask = [0] * len(made.prompt_ids) + list(made.loss_mask)
    row = Example([*made.prompt_ids, *made.ids], mask, Origin("test", 0))
    with evaluating(policy):
        return policy(micro_batch([row], packed=True, pad_id=0)).logprobs_K


def of_policy(values: Any, made: Completion) -> torch.Tensor:
    return torch.tensor([value for value, mask in zip(values, made.loss_mask, strict=True) if mask])


def test_each_turn_computes_only_what_is_new(policy: Policy, tiny_folder: Path) -> None:
    with conversing(policy, tiny_folder, max_sequences=8) as (engine, native):
        made = list(engine.generate([request(0, 2), request(1, 2)], SAMPLING))
        counts = native.prompt_counts()
    new = sum(len(one.prompt_ids or ()) + one.loss_mask.count(0) for one in made)
    assert sum(len(one.ids) for one in made) > 4 * 30
    # Both samples of a prompt share its prefill, if they start together.
    assert counts.computed <= new
    assert counts.reused > new
    for one in made:
        torch.testing.assert_close(scored(policy, one), of_policy(one.logprobs, one), rtol=0, atol=1e-4)
        assert not one.versions


@pytest.mark.slow
def test_a_cache_that_just_fits_is_not_refused(policy: Policy, tiny_folder: Path) -> None:
    """Room for longer prompts is made only within the cache and the length that the rotary embedding allows."""
    most = Sampling(max_tokens=20, seed=5)
    with conversing(policy, tiny_folder) as (engine, native):
        (free,) = engine.generate([request(0)], most)
        assert free.prompt_ids is not None
        longest = len(free.prompt_ids) + most.max_tokens
        least = Scheduler.least_blocks(longest, 4) * native.block_bytes()
    with conversing(policy, tiny_folder, cache_gb=least / 1e9) as (engine, native):
        assert longest <= native.longest_sequence() < longest + 4
        assert [one.ids for one in engine.generate([request(0)], most)] == [free.ids]
    config = policy.causal_lm.config
    rope, config.rope_parameters = config.rope_parameters, {**config.rope_parameters, "rope_type": "dynamic"}
    positions, config.max_position_embeddings = config.max_position_embeddings, longest
    try:
        with conversing(policy, tiny_folder) as (engine, native):
            assert native.longest_sequence() == longest
            assert [one.ids for one in engine.generate([request(0)], most)] == [free.ids]
    finally:
        config.rope_parameters, config.max_position_embeddings = rope, positions


def test_a_trajectory_goes_on_under_new_weights_and_every_token_names_its_own(
    policy: Policy, tiny_folder: Path
) -> None:
    """The weights change every eleven rounds, in the middle of turns; a request comes with each of the first two."""
    policies, rounds, wanted = [copy.deepcopy(policy)], count(1), [False]
    later = [(request(7), True), (request(8), False)]
    starts: list[int] = []

    def pause() -> bool:
        wanted[0] |= next(rounds) % 11 == 0
        return wanted[0]

    def between() -> list[tuple[Request, bool]]:
        wanted[0] = False
        generator = torch.Generator().manual_seed(len(policies))
        with torch.no_grad():
            for _, parameter in policy.trainable():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        policies.append(copy.deepcopy(policy))
        return [later.pop()] if later else []

    with conversing(policy, tiny_folder) as (engine, native):
        native.pause = pause
        engine.pausing = Pausing(pause, between, lambda: len(policies) - 1, lambda waiting: waiting)
        made = list(engine.generate([request(row, 2) for row in range(2)], SAMPLING))
    assert sorted((one.request, one.sample) for one in made) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0)]
    assert len(policies) > 3
    for one in made:
        assert one.trajectory is not None
        assert len(one.trajectory.turns) == TURNS
        versions, logprobs = of_policy(one.versions, one), of_policy(one.logprobs, one)
        assert versions.tolist() == sorted(versions.tolist())
        own = torch.stack([scored(each, one) for each in policies])[versions, torch.arange(len(versions))]
        torch.testing.assert_close(own, logprobs, rtol=0, atol=1e-4)
        for turn in one.trajectory.turns:
            starts.append(len(set(one.versions[turn.start : turn.stop])))
    assert max(starts) > 1, "no turn was paused"


def test_tokens_of_the_environment_have_the_version_before_them() -> None:
    assert spread_versions([4, 4, 6], [0, 1, 1, 0, 0, 1, 0]) == [4, 4, 4, 4, 4, 6, 6]
    assert spread_versions([], [1, 0]) == []
    with pytest.raises(ValueError, match="2 versions of weights for 3"):
        spread_versions([1, 2], [1, 1, 1])
