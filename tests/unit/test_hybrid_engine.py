"""The built-in engine keeps one state per sequence for recurrent layers: its tokens are those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import Recorder, prompts, run, slow_sample
from transformers import LlamaConfig

from hybrid_models import DAILY, FURTHER, hybrid_config
from lockstep.device.base import Device
from lockstep.device.cpu import Cpu
from lockstep.kernels import mixer_states
from lockstep.kernels.mixer_states import EMPTY, RESERVED, PrefillStates, StateChunk, StateSlots
from lockstep.model.check import build_miniature
from lockstep.model.miniature import VOCABULARY, miniature_config
from lockstep.model.policy import Policy
from lockstep.model.trials import Unfit
from lockstep.preflight.state_sizes import recurrent_activations, state_bytes
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout.engine_check import check_engine_architecture
from lockstep.rollout.hf import HfEngine
from lockstep.rollout.native.native_engine import NativeEngine
from lockstep.rollout.native.online_engine import LiveEngine
from lockstep.rollout.native.state_plan import plan_states
from lockstep.types import Request, Sampling
from refusals import refuses

CPU = torch.device("cpu")
FAMILIES = [*DAILY, *(pytest.param(name, marks=pytest.mark.slow) for name in FURTHER)]
SAMPLING = Sampling(max_tokens=14, seed=3, stop_ids=(7,))

pytestmark = pytest.mark.usefixtures("nothing_remembered")


def engine_of(policy: Policy, device: Device | None = None, **settings: Any) -> NativeEngine:
    return NativeEngine(policy, device or Cpu(), RolloutSettings(block_tokens=4, **settings), lambda ids: "")


def asked(n: int = 1) -> list[Request]:
    """Among them a prompt of one token, whose samples start without a state."""
    lists = [[5], *([token % VOCABULARY for token in ids] for ids in prompts(5, longest=14, seed=4))]
    return [Request(ids, key, n) for key, ids in enumerate(lists)]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return build_miniature(hybrid_config("bamba"), "sdpa", CPU).policy


@pytest.fixture(scope="module")
def expected(policy: Policy) -> list[tuple[list[int], list[float]]]:
    return [slow_sample(policy, request, number, SAMPLING) for request in asked(3) for number in range(3)]


def assert_same(made: Any, expected: list[tuple[list[int], list[float]]]) -> None:
    assert [one.ids for one in made] == [ids for ids, _ in expected]
    for one, (_, logprobs) in zip(made, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(logprobs), atol=2e-4, rtol=1e-3)


@pytest.mark.daily("bamba", "lfm2")
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str) -> None:
    check_engine_architecture(hybrid_config(family), "sdpa", Cpu(), CPU)


@pytest.mark.daily("qwen3_next", "lfm2")
@pytest.mark.parametrize("family", DAILY)
def test_greedy_tokens_are_those_of_generate(family: str) -> None:
    policy = build_miniature(hybrid_config(family), "sdpa", CPU).policy
    made = run(engine_of(policy), asked(), Sampling(max_tokens=12, temperature=0))
    with policy.generating() as model:
        for one, request in zip(made, asked(), strict=True):
            ids = torch.tensor([request.ids])
            theirs = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, min_new_tokens=12, do_sample=False
            )
            assert one.ids == theirs[0, len(request.ids) :].tolist()


def test_a_decode_step_multiplies_all_sequences_at_once(policy: Policy) -> None:
    """With the strides of a transposed view, torch multiplies each sequence alone with the weights of a projection."""
    strides: set[tuple[int, ...]] = set()
    mixer = next(mixer.module for mixer in policy.decoder.mixers if hasattr(mixer.module, "in_proj"))
    width = mixer.in_proj.in_features
    hook = mixer.in_proj.register_forward_pre_hook(
        lambda _, given: strides.add(given[0].stride()) if given[0].shape[:2] == (6, 1) else None
    )
    try:
        run(engine_of(policy), asked(), SAMPLING)
    finally:
        hook.remove()
    assert strides == {(width, width, 1)}


@pytest.mark.slow
@pytest.mark.parametrize("device", [Cpu, Recorder])
@pytest.mark.parametrize("settings", [{}, {"max_sequences": 4}, {"max_sequences": 2, "prefill_tokens": 3}])
def test_samples_of_groups_are_those_of_each_alone(
    policy: Policy, expected: Any, device: type[Device], settings: dict[str, Any]
) -> None:
    assert_same(run(engine_of(policy, device(), **settings), asked(3), SAMPLING), expected)


@pytest.mark.daily("Cpu-12")
@pytest.mark.parametrize(("device", "blocks"), [(Cpu, 12), (Recorder, 9)])
def test_a_preempted_sequence_goes_on_from_the_state_of_its_prompt(
    policy: Policy, expected: Any, device: type[Device], blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NativeEngine, "_blocks", lambda *_: blocks)
    engine = engine_of(policy, device())
    assert_same(run(engine, asked(3), SAMPLING), expected)
    assert engine.preempted > 0


@pytest.mark.slow
def test_a_module_that_ignores_its_state_on_several_tokens_runs_token_by_token() -> None:
    """Jamba's Mamba layers start anew when they get several tokens."""
    policy = build_miniature(hybrid_config("jamba"), "sdpa", CPU).policy
    made = run(engine_of(policy, prefill_tokens=3), asked(), SAMPLING)
    assert_same(made, [slow_sample(policy, request, 0, SAMPLING) for request in asked()])
    assert {mixer.continues for mixer in policy.decoder.mixers} == {False}
    other = build_miniature(hybrid_config("bamba"), "sdpa", CPU).policy
    run(engine_of(other, prefill_tokens=3), asked(), SAMPLING)
    assert {mixer.continues for mixer in other.decoder.mixers} == {True}


@pytest.mark.slow
def test_prompts_of_many_lengths_run_in_a_few_groups(policy: Policy) -> None:
    """Lengths 1 to 24 are powers of two: 16, 8, 4, 2 and 1, at the start of a sequence or after it."""
    chunks, first = [], 0
    for count in range(1, 25):
        chunks.append(StateChunk(first, count, RESERVED + count, fresh=True))
        first += count
    groups = PrefillStates(StateSlots([], 24, CPU), chunks)._split_groups
    assert [(group[0].count, group[0].fresh) for group in groups] == [
        (16, True), (8, True), (8, False), (4, True), (4, False), (2, True), (2, False), (1, True), (1, False)
    ]  # fmt: skip
    assert sorted(t for group in groups for one in group for t in range(one.first, one.first + one.count)) == list(
        range(first)
    )
    # Two lengths are two groups.
    few = PrefillStates(StateSlots([], 24, CPU), [StateChunk(0, 7, 2, True), StateChunk(7, 7, 3, True)])
    assert [[one.count for one in group] for group in few._split_groups] == [[7, 7]]
    asked_long = [Request([(3 * i + n) % VOCABULARY for i in range(n)], n) for n in range(2, 26)]
    made = run(engine_of(policy), asked_long, Sampling(max_tokens=4, seed=3))
    assert_same(made, [slow_sample(policy, one, 0, Sampling(max_tokens=4, seed=3)) for one in asked_long])


def nothing(*_: Any) -> None:
    pass


FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "sequences do not start from the state of their prompt": (StateSlots, "copy", nothing),
    "states are not kept": (StateSlots, "write", nothing),
    "a module that ignores its state gets several tokens": (mixer_states, "_continues", lambda *_: True),
    "a chunk starts anew": (PrefillStates, "_run", None),
}


@pytest.mark.daily("a chunk starts anew", "states are not kept")
@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_notices_a_wrong_state(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, wrong = FAULTS[fault]
    if wrong is None:
        right = PrefillStates._run

        def wrong(self: Any, mixer: Any, named: Any, group: Any) -> Any:
            return right(self, mixer, named, [replace(one, fresh=True) for one in group])

    monkeypatch.setattr(where, name, wrong)
    with pytest.raises(Unfit, match="greedy tokens or log-probs of the engine"):
        check_engine_architecture(hybrid_config("jamba"), "sdpa", Cpu(), CPU)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*DAILY, *FURTHER])
def test_states_that_are_not_kept_are_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateSlots, "write", nothing)
    with pytest.raises(Unfit, match="greedy tokens or log-probs of the engine"):
        check_engine_architecture(hybrid_config(family), "sdpa", Cpu(), CPU)


def test_the_online_engine_gives_the_same_samples(policy: Policy, expected: Any) -> None:
    engine = LiveEngine(engine_of(policy, max_sequences=5), 40)
    samples = [one for request in asked(3) for one in engine.add(request.ids, 3, SAMPLING, key=request.key)]
    while engine.busy:
        engine.step()
        for sample in samples:
            if not sample.stop and sample.tokens[-1] in SAMPLING.stop_ids:
                engine.cancel(sample)
    assert [one.tokens[one.prompt :] for one in samples] == [ids for ids, _ in expected]


def test_the_empty_state_stays_empty_and_all_slots_are_free_at_the_end(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(policy, free_cache=False)
    run(engine, asked(2), SAMPLING)
    assert engine._cache_kept is not None
    states = engine._cache_kept.states
    assert all(not state[EMPTY].any() for module in states.modules for state in module.values())
    # Six prompts with two samples each: a slot per sample, one per prompt, and one to spare.
    assert states.slots == 12 + 6 + 1
    assert states.nbytes == (states.slots + RESERVED) * mixer_states.slot_bytes(policy.decoder.state_shapes())


@pytest.mark.daily(
    "kimi_linear",
    "qwen3_next",
    "mamba2",
    "jamba",
    "lfm2",
    "zamba2",
    "minimax",
    "bailing_hybrid",
    "nemotron_h",
    "falcon_h1",
    "recurrent_gemma",
)
@pytest.mark.parametrize("family", [*DAILY, *FURTHER])
def test_the_size_of_states_is_known_before_weights_load(family: str) -> None:
    small = build_miniature(hybrid_config(family), "sdpa", CPU)
    held = mixer_states.slot_bytes(small.policy.decoder.state_shapes())
    assert state_bytes(miniature_config(hybrid_config(family)), torch.float32) == held > 0


def test_the_memory_plan_counts_states() -> None:
    """Qwen3-Next has 36 linear layers with 32 heads of 128 x 128 numbers in fp32, and a convolution of 4 tokens over
    two groups of 16 x 128 keys and one of 32 x 128 values in bf16."""
    layer = 4 * 32 * 128 * 128 + 2 * 4 * (2 * 16 * 128 + 32 * 128)
    assert state_bytes(hybrid_config("qwen3_next"), torch.bfloat16) == 36 * layer


def test_the_plan_counts_the_activations_of_recurrent_layers() -> None:
    """By hand for Qwen3-Next: 32 heads of 128 x 128, and 8,192 channels of the convolution."""
    found = recurrent_activations(hybrid_config("qwen3_next"))
    assert len(found) == 48
    assert [one is None for one in found[:4]] == [False, False, False, True]
    assert found[0] is not None
    assert not found[0].with_attention
    assert found[0].kept(2, lean=True) == 2 * (8192 + 10 * 4096 + 32 * 64)
    assert found[0].kept(2, lean=False) == 2 * (8192 + 3 * 4096) + 4 * (10 * 4096 + 5 * 32 * 64)
    assert recurrent_activations(hybrid_config("falcon_h1"))[0].with_attention  # type: ignore[union-attr]
    assert state_bytes(LlamaConfig(), torch.bfloat16) == 0


def test_fewer_sequences_run_at_once_if_memory_is_short() -> None:
    assert plan_states(0, 1e9, 64, 8, "memory").rows == 64
    plan = plan_states(1000, 1e9, 64, 8, "memory")
    assert (plan.rows, plan.slots, plan.bytes) == (64, 64 + 8 + 1, 75 * 1000)
    # Half of the room holds 20 slots: 2 are reserved, 1 is spare, 14 + 2 are used.
    short = plan_states(1000, 40_000, 64, 8, "memory")
    assert (short.rows, short.slots) == (14, 14 + 2 + 1)
    with refuses("rollout.cache_gb", "not-enough-memory", "recurrent", remedy="raise rollout.cache_gb"):
        plan_states(1000, 9_000, 64, 8, "rollout.cache_gb")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", "hf"])
def test_states_in_attributes_are_those_of_each_sequence(engine: str) -> None:
    """RecurrentGemma keeps its states in attributes of its modules. transformers' generate neither skips padding there
    nor forgets them."""
    policy = build_miniature(hybrid_config("recurrent_gemma"), "sdpa", CPU).policy
    made_by = engine_of(policy) if engine == "native" else HfEngine(policy.generating, lambda ids: "")
    expected = [slow_sample(policy, request, 0, SAMPLING) for request in asked()]
    for _ in range(2):
        assert_same(run(made_by, asked(), SAMPLING), expected)


@pytest.mark.slow
def test_padded_prompts_would_change_states_in_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = build_miniature(hybrid_config("recurrent_gemma"), "sdpa", CPU).policy
    expected = [slow_sample(policy, request, 0, SAMPLING) for request in asked()]
    monkeypatch.setattr("lockstep.rollout.hf._batches", lambda rows, *_: [rows])
    with pytest.raises(AssertionError):
        assert_same(run(HfEngine(policy.generating, lambda ids: ""), asked(), SAMPLING), expected)
