"""Trajectories of several turns on the built-in engine: the cache of a turn is reused, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import SIZES, Recorder, gigabytes, load, prompts, slow_sample, write_model
from transformers import DeepseekV3Config, MistralConfig, Qwen2Config

from hybrid_models import hybrid_config
from lockstep.device.base import Device
from lockstep.device.cpu import Cpu
from lockstep.model.check import build_miniature
from lockstep.model.miniature import VOCABULARY, miniature_config
from lockstep.model.policy import Policy
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout.engine import PrefillCounts
from lockstep.rollout.native import native_engine as engine_module
from lockstep.rollout.native.cached_spans import CachedSpan
from lockstep.rollout.native.intake import Intake
from lockstep.rollout.native.native_engine import NativeEngine
from lockstep.rollout.native.runner import Round, Runner
from lockstep.rollout.native.scheduler import Scheduler
from lockstep.types import Completion, Request, Sampling
from played_turns import Played, Script

SAMPLING = Sampling(max_tokens=6, temperature=0.8, stop_ids=(7, 9, 11, 13), seed=3)
MOST = 6


def scripts(vocabulary: int = 256) -> list[Script]:
    """Seven trajectories of one to four turns; some tools answer at once, one returns nothing at all."""
    texts = [[token % vocabulary for token in ids] for ids in prompts(24, longest=11, seed=5)]
    made = []
    for number in range(7):
        count = number % 4
        seen = [texts[(7 + 3 * number + turn) % 24] for turn in range(count)]
        if number == 3:
            seen[1] = []
        polls = [(5 * number + 3 * turn) % 7 for turn in range(count)]
        made.append(Script(texts[number // 2 * 2], seen, polls))
    return made


def engine_of(policy: Policy, device: Device | None = None, **settings: Any) -> NativeEngine:
    settings = {"block_tokens": 4, "max_sequences": 3} | settings
    return NativeEngine(policy, device or Cpu(), RolloutSettings(**settings), lambda ids: "")


def assert_plain(policy: Policy, played: Played, turns: list[list[Completion]], sampling: Sampling = SAMPLING) -> None:
    """Every turn is what transformers' forward over all its tokens gives."""
    for number, (script, made) in enumerate(zip(played.scripts, turns, strict=True)):
        assert len(made) == len(script.observations) + 1
        for turn, one in enumerate(made):
            request = script.request(number, [before.ids for before in made[:turn]], MOST)
            ids, logprobs = slow_sample(policy, request, 0, sampling)
            assert one.ids == ids
            torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(logprobs), atol=2e-4, rtol=1e-3)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Policy:
    return load(write_model(tmp_path_factory.mktemp("qwen2") / "model", Qwen2Config(**SIZES), tiny_folder))


def new_tokens(played: Played) -> int:
    """Prompt tokens that no earlier turn has, without the last token of the first prompts, which are the input of the
    first decoding pass; equal first prompts of one take count once each."""
    return sum(len(s.prompt) - 1 + sum(map(len, s.observations)) for s in played.scripts)


@pytest.mark.parametrize("device", [Cpu, Recorder])
def test_turns_are_those_of_transformers_and_only_new_tokens_are_computed(policy: Policy, device: type[Device]) -> None:
    engine = engine_of(policy, device())
    played = Played(engine, scripts(), MOST)
    assert_plain(policy, played, played.play(SAMPLING))
    assert played.waited > 1
    counts = engine.prompt_counts()
    assert counts.evicted == 0
    assert counts.reused > 100
    # Trajectories with the same first prompt share its prefill if they start together.
    assert new_tokens(played) / 2 < counts.computed <= new_tokens(played)


@pytest.mark.slow
def test_turns_over_several_rounds_start_while_other_rows_decode(policy: Policy) -> None:
    """Rounds of eight passes on recorded graphs: the new tokens of a turn are computed between two rounds of others,
    before the first of them is read."""
    ahead: list[int] = []

    class Counting(Runner):
        def schedule_ahead(self, last: Round, sequences: Any) -> Round | None:
            launched = super().schedule_ahead(last, sequences)
            ahead.append(sum(s.session is not None and s.prompt == len(s.tokens) for s in sequences) if launched else 0)
            return launched

    long = Sampling(max_tokens=30, temperature=0.8, stop_ids=(7,), seed=3)
    engine = engine_of(policy, Recorder(), max_sequences=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "Runner", Counting)
        played = Played(engine, scripts(), 30)
        turns = played.play(long)
    assert_plain(policy, played, turns, long)
    assert sum(ahead) > 2
    assert engine.prompt_counts().computed <= new_tokens(played)


def test_without_sessions_everything_is_computed_again(policy: Policy) -> None:
    engine = engine_of(policy)
    played = Played(engine, scripts(), MOST, sessions=False)
    assert_plain(policy, played, played.play(SAMPLING))
    assert engine.prompt_counts().reused == 0
    assert engine.prompt_counts().computed == sum(len(request.ids) - 1 for request in played.requests)


@pytest.mark.parametrize("device", [Cpu, Recorder])
@pytest.mark.parametrize(("block", "spare"), [(4, 0), (1, 4)])
def test_a_small_cache_evicts_sessions_and_preempts_and_gives_the_same(
    policy: Policy, device: type[Device], block: int, spare: int
) -> None:
    """One block per running sequence stays free: of one token, less than a turn needs, so sequences are preempted."""
    least = -(-Played(engine_of(policy), scripts(), MOST).longest_sequence // block) + 1
    cache = gigabytes(least + spare, block)
    engine = engine_of(policy, device(), block_tokens=block, cache_gb=cache, max_sequences=7)
    played = Played(engine, scripts(), MOST)
    assert_plain(policy, played, played.play(SAMPLING))
    assert engine.prompt_counts().evicted > 0
    assert (engine.preempted > 0) == (block == 1 and device is Cpu)


def test_a_second_call_starts_without_sessions(policy: Policy) -> None:
    """The weights may have changed in between, so nothing that was cached before is used."""
    engine = engine_of(policy)
    first = Played(engine, scripts()[:1], MOST)
    (turn,) = first.play(SAMPLING)[0]
    ids = [*first.scripts[0].prompt, *turn.ids, 5, 6]
    list(engine.generate([Request(ids, 1, session=0)], SAMPLING))
    assert engine.prompt_counts() == PrefillCounts(computed=len(ids) - 1)


@pytest.mark.slow
@pytest.mark.parametrize("device", [Cpu, Recorder])
@pytest.mark.parametrize("family", ["bamba", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_states_of_recurrent_layers_continue(family: str, device: type[Device]) -> None:
    policy = build_miniature(hybrid_config(family), "sdpa", torch.device("cpu")).policy
    for settings in ({}, {"cache_gb": 1e-3, "prefill_tokens": 3}):
        engine = engine_of(policy, device(), **settings)
        played = Played(engine, scripts(VOCABULARY)[:5], MOST)
        assert_plain(policy, played, played.play(SAMPLING))
        assert engine.prompt_counts().reused > 0


@pytest.mark.parametrize("device", [Cpu, Recorder])
def test_stop_strings_do_not_leave_states_that_are_ahead(device: type[Device]) -> None:
    """The host finds a stop string after the device has gone on, so the states are computed again."""
    policy = build_miniature(hybrid_config("bamba"), "sdpa", torch.device("cpu")).policy
    engine = engine_of(policy, device())
    engine.decode = lambda ids: " ".join(f"<{token}>" for token in ids)
    once = Sampling(max_tokens=MOST, seed=3)
    free = Played(engine, scripts(VOCABULARY)[3:4], MOST).play(once)[0][0]
    played = Played(engine, scripts(VOCABULARY)[3:4], MOST)
    turns = played.play(Sampling(max_tokens=MOST, seed=3, stop_strings=(f"<{free.ids[2]}>",)))[0]
    assert (turns[0].stop, turns[0].ids) == ("string", free.ids[: free.ids.index(free.ids[2]) + 1])
    request = played.scripts[0].request(3, [turns[0].ids], MOST)
    assert played.requests[1].ids == request.ids
    ids, logprobs = slow_sample(policy, played.requests[1], 0, once)
    assert turns[1].ids == ids[: len(turns[1].ids)]
    torch.testing.assert_close(
        torch.tensor(turns[1].logprobs), torch.tensor(logprobs[: len(turns[1].ids)]), atol=2e-4, rtol=1e-3
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_windows_and_latents_continue(name: str, tmp_path: Path, tiny_folder: Path) -> None:
    if name == "mistral":
        policy = load(write_model(tmp_path / "model", MistralConfig(**SIZES, sliding_window=5), tiny_folder))
    else:
        policy = build_miniature(miniature_config(DeepseekV3Config()), "sdpa", torch.device("cpu")).policy
    for device in (Cpu(), Recorder()):
        engine = engine_of(policy, device)
        played = Played(engine, scripts(min(256, policy.causal_lm.config.vocab_size)), MOST)
        assert_plain(policy, played, played.play(SAMPLING))
        assert engine.prompt_counts().reused > 0


def test_trajectories_that_start_with_the_same_prompt_compute_it_once(policy: Policy) -> None:
    engine = engine_of(policy, max_sequences=4)
    prompt = prompts(1, longest=30)[0]
    played = Played(engine, [Script(prompt, [], []) for _ in range(4)], MOST)
    assert_plain(policy, played, played.play(SAMPLING))
    assert engine.prompt_counts().computed == len(prompt) - 1


def test_a_session_that_has_ended_is_freed_although_others_wait(policy: Policy) -> None:
    """No request is taken while sequences wait for a row. An ended session would stay, and others would be evicted."""
    engine, sampling = engine_of(policy), Sampling(max_tokens=2)
    scheduler, intake = Scheduler([], [], blocks=20, block=4, rows=1, budget=100), Intake(sampling)
    scheduler.add(*intake.sequences([Request([1, 2], 0), Request([3, 4], 1)], 0))
    for session in (5, 6):
        scheduler.parked.spans[session] = CachedSpan([1] * 4, [scheduler.pool.take()], 4)
    engine.further = Played(engine, scripts(), MOST)
    engine.end_session(6)
    assert engine._filled(scheduler, intake)
    assert list(scheduler.parked.spans) == [5]
    assert not engine.further.requests


@pytest.mark.slow
def test_a_tool_that_hangs_delays_only_its_own_trajectory(policy: Policy) -> None:
    """One row, and a tool that takes longer than all the others together."""
    engine = engine_of(policy, max_sequences=1)
    slow = Script([5, 6], [[8]], [10**6])
    played = Played(engine, [slow, *scripts()], MOST)
    turns = played.play(SAMPLING)
    assert_plain(policy, played, turns)
    assert [request.session for request in played.requests].index(0, 1) == len(played.requests) - 1
    assert turns[0][1].request == len(played.requests) - 1


def test_a_session_has_one_sample(policy: Policy, tmp_path: Path) -> None:
    engine = engine_of(policy)
    with pytest.raises(ValueError, match="asks for 2 samples"):
        list(engine.generate([Request([5, 6], 0, 2, session=1)], SAMPLING))
