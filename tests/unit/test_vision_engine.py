"""The built-in engine with images: prefill with features, decode with the position offset, shared prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import native, run

from image_rows import CPU, check_generated, example, generated, picture, settings
from lockstep.data.batching import micro_batch
from lockstep.device.cpu import Cpu
from lockstep.errors import Refusal
from lockstep.model.check import CHECK_TOLERANCE
from lockstep.model.load import load_policy
from lockstep.model.policy import Policy, in_fp32
from lockstep.model.towers.tiny_vision import write_tiny_vlm
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout import engine_check
from lockstep.rollout.engine_check import check_engine
from lockstep.rollout.native import decode_batch
from lockstep.rollout.native.native_engine import NativeEngine
from lockstep.rollout.native.runner import Runner
from lockstep.types import Completion, Example, Request, Sampling

END = 257


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vlm") / "model"
    write_tiny_vlm(made, hidden=64)
    return made


@pytest.fixture(scope="module")
def policy(folder: Path) -> Policy:
    return load_policy(settings(folder, vision="freeze"), CPU, Cpu().attention, 0).eval()


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[Example]:
    wide, tall = picture(1, 56, 112), picture(2, 140, 84)
    texts = {"what is # here?": [wide], "compare # and #: ": [tall, wide], "only text ": [], "# first? ": [tall]}
    return [example(folder, text, images) for text, images in texts.items()]


def asked(rows: list[Example], n: int = 1) -> list[Request]:
    return [Request(list(one.ids), 100 + key, n, images=one.images) for key, one in enumerate(rows)]


GREEDY = Sampling(max_tokens=12, temperature=0.0, stop_ids=(END,))


@pytest.mark.parametrize("budget", [None, 5])
def test_greedy_tokens_equal_those_of_transformers(
    folder: Path, policy: Policy, rows: list[Example], budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the prefill is divided inside of images."""
    keys: dict[str, Any] = {} if budget is None else {"prefill_tokens": budget}
    done = run(native(policy, folder, **keys), asked(rows), GREEDY)
    check_generated(done, generated(folder, rows, 12, END))


def test_log_probs_of_samples_are_those_of_the_trainer(folder: Path, policy: Policy, rows: list[Example]) -> None:
    sampling = Sampling(max_tokens=10, temperature=1.0, stop_ids=(END,), seed=3)
    done = run(native(policy, folder), asked(rows, 3), sampling)
    assert len({tuple(one.ids) for one in done}) > len(rows)
    for one in done:
        prompt = rows[one.request]
        full = Example(
            [*prompt.ids, *one.ids], [0] * len(prompt) + [1] * len(one.ids), prompt.origin, images=prompt.images
        )
        with torch.no_grad():
            wanted = policy(micro_batch([full], packed=True, pad_id=0)).logprobs_K
        torch.testing.assert_close(torch.tensor(one.logprobs), wanted, atol=2e-4, rtol=0)


def test_a_wrong_offset_changes_the_log_probs(
    folder: Path, policy: Policy, rows: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = run(native(policy, folder), asked(rows[:1]), GREEDY)
    monkeypatch.setattr(decode_batch, "position_offset", lambda images: 0)
    wrong = run(native(policy, folder), asked(rows[:1]), GREEDY)
    assert abs(right[0].logprobs[0] - wrong[0].logprobs[0]) > 1e-4


# -- the check of the engine in bf16, for a model with large logits


def noisy_policy(folder: Path, dtype: str = "bf16") -> Policy:
    """A model whose logits are about 200, where neighbouring bf16 numbers differ by 1: one place of the residual stream
    is the same at all tokens, and the output head multiplies it."""
    policy = load_policy(settings(folder, vision="freeze", dtype=dtype), CPU, Cpu().attention, 0)
    model: Any = policy.causal_lm
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        model.get_input_embeddings().weight[:, 0] = 1
        for layer in model.model.language_model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        model.lm_head.weight[:, 0] = 200
    return policy


class Precise(NativeEngine):
    """The built-in engine with fp32 arithmetic: correct, and rounded otherwise than the trainer."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        with in_fp32(self.policy):
            yield from super().generate(requests, sampling)


class WrongInHalf(NativeEngine):
    """An engine whose log-probs are wrong in bf16 only, by as much as `CHECK_TOLERANCE` does not allow."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        half = next(self.policy.parameters()).dtype == torch.bfloat16
        for made in super().generate(requests, sampling):
            yield replace(made, logprobs=[logprob - 0.3 * half for logprob in made.logprobs])


def opened(kind: type[NativeEngine], policy: Policy) -> NativeEngine:
    return kind(policy, Cpu(), RolloutSettings(), str)


@torch.no_grad()
def test_the_rounding_of_large_logits_is_accepted_and_leaves_the_weights_alone(folder: Path) -> None:
    policy = noisy_policy(folder)
    engine = opened(Precise, policy)
    made, wanted, _ = engine_check._two_scores(engine, policy, CPU)
    assert (made - wanted).abs().max() > CHECK_TOLERANCE[torch.bfloat16]
    before = [(one.data_ptr(), one.dtype, one.clone()) for one in policy.parameters()]
    check_engine(engine, policy, CPU, str(folder), paged_on=None)
    after = [(one.data_ptr(), one.dtype, one) for one in policy.parameters()]
    assert [one[:2] for one in after] == [one[:2] for one in before]
    assert all(torch.equal(one[2], other[2]) for one, other in zip(after, before, strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in policy.layers())


@pytest.mark.daily("offset-NativeEngine")
@pytest.mark.parametrize("kind", [NativeEngine, Precise])
@pytest.mark.parametrize("mutation", ["offset", "lengths"])
def test_a_broken_engine_is_refused_although_the_logits_are_large(
    folder: Path, kind: type[NativeEngine], mutation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect is smaller than the rounding errors."""
    policy, fed = noisy_policy(folder), Runner._fed

    def broken(self: Runner, state: decode_batch.DecodeState, lengths_B: torch.Tensor) -> torch.Tensor:
        if mutation == "lengths":  # a token does not see itself
            return fed(self, state, (lengths_B - 1).clamp(min=1))
        state.offsets_B.add_(3)
        try:
            return fed(self, state, lengths_B)
        finally:
            state.offsets_B.sub_(3)

    monkeypatch.setattr(Runner, "_fed", broken)
    with pytest.raises(Refusal, match="log-probabilities differ from the trainer's"):
        check_engine(opened(kind, policy), policy, CPU, str(folder), paged_on=None)


def test_an_engine_that_is_wrong_in_bf16_only_is_refused(folder: Path) -> None:
    policy = load_policy(settings(folder, vision="freeze", dtype="bf16"), CPU, Cpu().attention, 0)
    with pytest.raises(Refusal, match=r"differ from the trainer's by 0\.3"):
        check_engine(opened(WrongInHalf, policy), policy, CPU, str(folder), paged_on=None)
    check_engine(opened(NativeEngine, policy), policy, CPU, str(folder), paged_on=None)
