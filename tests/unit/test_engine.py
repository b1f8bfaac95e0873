"""The built-in engine: samples depend on nothing but their counter, the cache is shared and freed."""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import SIZES, Recorder, gigabytes, load, native, prompts, run, slow_sample, write_model
from transformers import Qwen2Config

from lockstep.device.base import Memory
from lockstep.device.cpu import Cpu
from lockstep.kernels.attention.kv_cache import KVCache, uniform_layout
from lockstep.model.policy import Policy
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout.native import native_engine as engine_module
from lockstep.rollout.native.native_engine import NativeEngine, prefill_budget, prefill_bytes
from lockstep.rollout.native.runner import Round, Runner
from lockstep.types import PAUSED, Completion, PartialResponse, Request, Sampling
from refusals import refuses

SAMPLING = Sampling(max_tokens=24, temperature=0.8, stop_ids=(7, 9, 11, 13, 15, 17), seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen2") / "model", Qwen2Config(**SIZES), tiny_folder)


@pytest.fixture(scope="module")
def policy(folder: Path) -> Policy:
    return load(folder)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return [Request(ids, 100 + key, 4) for key, ids in enumerate(prompts(8))]


@pytest.fixture(scope="module")
def usual(policy: Policy, folder: Path, requests: list[Request]) -> list[Completion]:
    """What every other way to generate must give as well."""
    return run(native(policy, folder), requests, SAMPLING)


def assert_same(ours: list[Completion], theirs: list[Completion]) -> None:
    assert [(c.request, c.sample, c.ids, c.stop) for c in ours] == [
        (c.request, c.sample, c.ids, c.stop) for c in theirs
    ]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=0, atol=2e-4)


def test_a_generation_that_is_paused_goes_on_to_the_same_samples(
    policy: Policy, folder: Path, requests: list[Request], usual: list[Completion]
) -> None:
    engine, rounds = native(policy, folder, max_sequences=7), itertools.count(1)
    engine.pause = lambda: next(rounds) % 6 == 0
    left = {n: {sample: PartialResponse() for sample in range(request.n)} for n, request in enumerate(requests)}
    done, pauses = [], 0
    while left:
        numbers = list(left)
        asked = [replace(requests[number], partial_responses=dict(left[number])) for number in numbers]
        for made in engine.generate(asked, SAMPLING):
            one = replace(made, request=numbers[made.request])
            if one.stop == PAUSED:
                left[one.request][one.sample] = PartialResponse(one.ids, one.logprobs)
                pauses += 1
                assert pauses < 1000, "it never comes to an end"
            else:
                done.append(one)
                del left[one.request][one.sample]
        left = {number: samples for number, samples in left.items() if samples}
    assert pauses > 10
    assert_same(sorted(done, key=lambda one: (one.request, one.sample)), usual)


@pytest.mark.parametrize("captured", [False, True])
def test_requests_that_are_taken_as_rows_become_free_give_the_same_samples(
    policy: Policy, folder: Path, requests: list[Request], usual: list[Completion], captured: bool
) -> None:
    """The first two at once, of short prompts; the others, the longest among them, as there is room."""
    order = sorted(range(len(requests)), key=lambda n: len(requests[n].ids))

    class Rest:
        longest_prompt = max(len(request.ids) for request in requests)
        left, rooms = order[2:], []

        def take(self, room: int, wait: bool = False) -> list[Request]:
            self.rooms.append(room)
            taken = [self.left.pop(0) for _ in range(min(len(self.left), room // 4))]
            return [requests[n] for n in taken]

    engine = native(policy, folder, max_sequences=9)
    if captured:
        engine.device = Recorder()
    engine.further = rest = Rest()
    done = [
        replace(one, request=order[one.request]) for one in engine.generate([requests[n] for n in order[:2]], SAMPLING)
    ]
    assert_same(sorted(done, key=lambda c: (c.request, c.sample)), usual)
    assert not rest.left
    assert max(rest.rooms) <= 9


def test_samples_vary_in_length_and_end_as_they_should(usual: list[Completion]) -> None:
    assert [(c.request, c.sample) for c in usual] == [(r, s) for r in range(8) for s in range(4)]
    assert {c.stop for c in usual} == {"token", "length"}
    for made in usual:
        assert len(made.logprobs) == len(made.ids)
        assert (made.ids[-1] in SAMPLING.stop_ids) == (made.stop == "token")
        assert not set(made.ids[:-1]) & set(SAMPLING.stop_ids)
        assert made.stop == "token" or len(made.ids) == 24
    assert len({tuple(c.ids) for c in usual}) == len(usual)


def test_a_plain_forward_for_every_token_gives_the_same(
    policy: Policy, requests: list[Request], usual: list[Completion]
) -> None:
    for made in usual[::3]:
        ids, logprobs = slow_sample(policy, requests[made.request], made.sample, SAMPLING)
        assert made.ids == ids
        torch.testing.assert_close(torch.tensor(made.logprobs), torch.tensor(logprobs), rtol=0, atol=2e-4)


@pytest.mark.daily("settings1", "settings2", "settings3")
@pytest.mark.parametrize(
    "settings",
    [
        {"max_sequences": 1},
        {"max_sequences": 3, "prefill_tokens": 16},
        {"prefill_tokens": 1},
        {"prefill_tokens": 7, "block_tokens": 4},
        {"block_tokens": 1},
        {"block_tokens": 4},
        {"block_tokens": 64},
    ],
)
def test_batch_budget_and_blocks_do_not_matter(
    policy: Policy, folder: Path, requests: list[Request], usual: list[Completion], settings: dict[str, Any]
) -> None:
    assert_same(run(native(policy, folder, **settings), requests, SAMPLING), usual)


@pytest.mark.slow
@pytest.mark.parametrize("spare", [0, 3, 20])
def test_preemption_does_not_matter(
    policy: Policy, folder: Path, requests: list[Request], usual: list[Completion], spare: int
) -> None:
    longest = max(len(r.ids) for r in requests) + SAMPLING.max_tokens
    least = -(-longest // 4) + 1
    engine = native(policy, folder, block_tokens=4, cache_gb=gigabytes(least + spare, 4), prefill_tokens=64)
    assert_same(run(engine, requests, SAMPLING), usual)
    assert engine.preempted > 0


def test_requests_alone_give_what_they_give_together(
    policy: Policy, folder: Path, requests: list[Request], usual: list[Completion]
) -> None:
    engine = native(policy, folder)
    for number in (0, 5):
        alone = run(engine, [requests[number]], SAMPLING)
        assert [c.ids for c in alone] == [c.ids for c in usual if c.request == number]
    # Sample 0 of a single response is sample 0 of four.
    single = run(engine, [Request(r.ids, r.key) for r in requests], SAMPLING)
    assert [c.ids for c in single] == [c.ids for c in usual if c.sample == 0]


def test_a_prompt_is_prefilled_once(policy: Policy, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    prefill = Runner.prefill
    monkeypatch.setattr(
        Runner,
        "prefill",
        lambda self, work: (counted.append(sum(stop - part.cached for part, stop in work)), prefill(self, work))[1],
    )
    lengths = [21, 6, 1]
    run(native(policy, folder), [Request(list(range(n)), n, 5) for n in lengths], SAMPLING)
    assert sum(counted) == sum(n - 1 for n in lengths)


def test_with_memory_to_spare_nobody_is_preempted(policy: Policy, folder: Path, requests: list[Request]) -> None:
    engine = native(policy, folder, block_tokens=4)
    list(engine.generate(requests, Sampling(max_tokens=24)))
    assert engine.preempted == 0


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[torch.Tensor]]:
    """The storage of every cache that is made, without holding it."""
    made: list[weakref.ref[torch.Tensor]] = []
    build = KVCache.__init__

    def remember(self: KVCache, *args: Any, **named: Any) -> None:
        build(self, *args, **named)
        made.append(weakref.ref(self.tensors[0]))

    monkeypatch.setattr(KVCache, "__init__", remember)
    return made


def test_nothing_holds_the_cache_afterwards(
    policy: Policy, folder: Path, requests: list[Request], caches: list[weakref.ref[torch.Tensor]]
) -> None:
    engine = native(policy, folder)
    policy.train()
    list(engine.generate(requests, SAMPLING))
    stopped = engine.generate(requests, SAMPLING)
    next(stopped)
    assert not policy.training
    assert caches[1]() is not None
    stopped.close()
    gc.collect()
    assert len(caches) == 2
    assert all(cache() is None for cache in caches)
    assert policy.training


def test_an_error_while_generating_leaves_the_policy_as_it_was(
    policy: Policy, folder: Path, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Runner, samples: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Runner, "decode", fail)
    policy.train()
    with pytest.raises(RuntimeError, match="out of memory"):
        list(native(policy, folder).generate(requests, SAMPLING))
    assert policy.training


def test_a_cache_too_small_is_refused(policy: Policy, folder: Path) -> None:
    engine = native(policy, folder, cache_gb=gigabytes(5, 16))
    request = [Request(list(range(60)), 0)]
    with refuses("rollout.cache_gb", "not-enough-memory", "90 tokens"):
        list(engine.generate(request, Sampling(max_tokens=30)))
    # 64 tokens are four blocks and the prefix's last one.
    assert len(run(engine, request, Sampling(max_tokens=4))[0].ids) == 4


def test_changed_weights_are_used_at_once(folder: Path, requests: list[Request]) -> None:
    policy = load(folder)
    engine = native(policy, folder)
    before = run(engine, requests[:2], SAMPLING)
    with torch.no_grad():
        policy.causal_lm.get_output_embeddings().weight[65] += 3 * torch.ones(32)
        policy.causal_lm.get_decoder().layers[0].self_attn.v_proj.weight.mul_(1.5)
    after = run(engine, requests[:2], SAMPLING)
    assert [c.ids for c in before] != [c.ids for c in after]
    for made in after[:3]:
        assert made.ids == slow_sample(policy, requests[made.request], made.sample, SAMPLING)[0]


def test_no_requests_and_no_tokens(policy: Policy, folder: Path) -> None:
    assert list(native(policy, folder).generate([], SAMPLING)) == []
    with pytest.raises(ValueError, match="request 1 has no prompt"):
        list(native(policy, folder).generate([Request([1], 0), Request([], 1)], SAMPLING))


@pytest.mark.daily("settings0", "settings2")
@pytest.mark.parametrize("settings", [{}, {"max_sequences": 3}, {"max_sequences": 33, "block_tokens": 1}])
def test_captured_passes_give_what_eager_ones_give(
    policy: Policy, requests: list[Request], usual: list[Completion], settings: dict[str, Any]
) -> None:
    device = Recorder()
    engine = NativeEngine(policy, device, RolloutSettings(**settings), lambda ids: "")
    assert_same(run(engine, requests, SAMPLING), usual)
    # A recording for each bucket of the batch, not for each batch.
    assert 1 <= device.captured <= 6


def test_the_device_goes_on_while_the_host_reads(
    policy: Policy, requests: list[Request], usual: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No round is given in vain at the end: all that is given before a look is read."""
    given, read = [], []
    schedule_ahead, read_round = Runner.schedule_ahead, Round.read
    monkeypatch.setattr(Runner, "schedule_ahead", lambda *args: given.append(schedule_ahead(*args)) or given[-1])
    monkeypatch.setattr(Round, "read", lambda self: read.append(self) or read_round(self))
    assert_same(run(NativeEngine(policy, Recorder(), RolloutSettings(), lambda ids: ""), requests, SAMPLING), usual)
    ahead = [one for one in given if one is not None]
    assert ahead
    assert all(any(one is other for other in read) for one in ahead)


@pytest.mark.slow
def test_captured_passes_under_preemption_and_with_stop_strings(policy: Policy, folder: Path) -> None:
    requests = [Request(ids, key, 3) for key, ids in enumerate(prompts(7, seed=5))]
    sampling = Sampling(max_tokens=21, seed=8, stop_strings=("a", "\x03", "Z"), stop_ids=(7,))
    eager = native(policy, folder)
    expected = run(eager, requests, sampling)
    assert {"string", "length"} <= {c.stop for c in expected}
    tight = RolloutSettings(block_tokens=4, cache_gb=gigabytes(16, 4), prefill_tokens=20)
    engine = NativeEngine(policy, Recorder(), tight, eager.decode)
    assert_same(run(engine, requests, sampling), expected)
    assert engine.preempted > 0


def test_a_single_token_and_a_single_sample(policy: Policy, folder: Path) -> None:
    sampling = Sampling(max_tokens=1, seed=1)
    requests = [Request([5], 0), Request([5, 6], 1)]
    expected = run(native(policy, folder), requests, sampling)
    assert [c.ids for c in expected] == [slow_sample(policy, r, 0, sampling)[0] for r in requests]
    captured = NativeEngine(policy, Recorder(), RolloutSettings(), lambda ids: "")
    assert_same(run(captured, requests, sampling), expected)


def test_a_kept_cache_and_its_passes_are_used_again_until_the_weights_move(folder: Path) -> None:
    """`free_cache: false` on a device that captures: only the first call captures, until the weights move."""
    policy, device = load(folder), Recorder()
    engine = NativeEngine(policy, device, RolloutSettings(free_cache=False), lambda ids: "")
    requests = [Request([5, 6, 7], 0)]
    first = run(engine, requests, SAMPLING)
    captured = device.captured
    assert captured > 0
    assert_same(run(engine, requests, SAMPLING), first)
    assert device.captured == captured
    # Changed in place, as an optimizer does: the recorded passes see it.
    weight = policy.causal_lm.get_output_embeddings().weight
    with torch.no_grad():
        weight.mul_(-1)
    changed = run(engine, requests, SAMPLING)
    assert [c.ids for c in changed] != [c.ids for c in first]
    assert device.captured == captured
    weight.data = weight.data.clone()
    assert_same(run(engine, requests, SAMPLING), changed)
    assert device.captured > captured


def test_what_the_host_alone_looks_at_records_nothing_anew(policy: Policy, folder: Path) -> None:
    device = Recorder()
    kept = NativeEngine(policy, device, RolloutSettings(free_cache=False), native(policy, folder).decode)
    requests = [Request([5, 6, 7], 0)]
    run(kept, requests, replace(SAMPLING, max_tokens=24))
    captured = device.captured
    for changed in ({"max_tokens": 9}, {"seed": 11}, {"stop_strings": ("a", "e", "\x03")}, {"max_tokens": 20}):
        sampling = replace(SAMPLING, **changed)
        assert_same(run(kept, requests, sampling), run(native(policy, folder), requests, sampling))
    assert device.captured == captured
    # How tokens are drawn is a part of what is recorded.
    warmer = replace(SAMPLING, temperature=1.5)
    assert_same(run(kept, requests, warmer), run(native(policy, folder), requests, warmer))
    assert device.captured > captured


def test_a_small_cache_is_kept_where_passes_are_recorded_over_it(
    policy: Policy, requests: list[Request], caches: list[weakref.ref[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Recorder()
    engine = NativeEngine(policy, device, RolloutSettings(), lambda ids: "")
    run(engine, requests, SAMPLING)
    captured = device.captured
    run(engine, requests, SAMPLING)
    assert device.captured == captured
    assert caches[0]() is not None
    # One that takes more than a twentieth of the memory is given back.
    monkeypatch.setattr(engine_module, "KEPT_SHARE", 0.0)
    run(engine, requests, SAMPLING)
    gc.collect()
    assert caches[0]() is None


@pytest.mark.slow
def test_a_large_batch_that_shrinks_moves_into_smaller_passes(policy: Policy, folder: Path) -> None:
    """200 rows end one after another: their places are given to those behind them, and smaller passes are recorded."""
    requests = [Request([5 + key, 6, 7], key, 1, 0, 1 + key % 40) for key in range(200)]
    sampling = Sampling(max_tokens=40, seed=3)
    device = Recorder()
    made = run(NativeEngine(policy, device, RolloutSettings(max_sequences=150), lambda ids: ""), requests, sampling)
    assert [len(one.ids) for one in made] == [1 + key % 40 for key in range(200)]
    assert_same(made, run(native(policy, folder), requests, sampling))
    assert 2 <= device.captured <= 8


def test_a_policy_that_is_asked_to_be_plain_draws_plainly(policy: Policy) -> None:
    class Fast(Cpu):
        attention, sampler = "flash_varlen", "triton"

    cache = KVCache(uniform_layout(2, 2, 8), 4, 4, torch.zeros(()))
    assert policy.kernel == "sdpa"
    assert Runner(policy, cache, SAMPLING, Fast(), 4, 16).sampler == "plain"
    assert Runner(policy, cache, SAMPLING, Cpu(), 4, 16).sampler == Cpu.sampler == "plain"


class Large(Cpu):
    """A device of so many bytes that takes long passes over prompts."""

    prefill_tokens = 65_536

    def __init__(self, total: int) -> None:
        self.total = total

    def memory(self) -> Memory:
        return Memory(self.total, self.total, 0, 0)


def test_prompt_tokens_of_a_pass_follow_the_memory() -> None:
    """A token takes 2 x (3 x 18,944 + 4 x 3,584) + 8 x 3,584 = 171,008 bytes in the 7B shape in bf16."""
    config = Qwen2Config(hidden_size=3584, intermediate_size=18944)
    assert prefill_bytes(config, 1, 2) == 171_008
    settings = RolloutSettings()
    assert prefill_budget(settings, Cpu(), config, 2) == 8192
    assert prefill_budget(settings, Large(141 * 10**9), config, 2) == 65_536
    # An eighth of 24 GB holds 17,543 tokens: two pieces of 8,192.
    assert prefill_budget(settings, Large(24 * 10**9), config, 2) == 16_384
    assert prefill_budget(settings, Large(10**9), config, 2) == 8192
    assert prefill_budget(RolloutSettings(prefill_tokens=77), Large(10**9), config, 2) == 77
