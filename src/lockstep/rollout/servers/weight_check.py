"""The weight check: compares the log-probs of the server and of the trainer for tokens that the server generates.

Even if tensor names, checksums and versions are right, the engine may compute with different weights, such as a packed
copy or a stale cache. If the weights differ, the engine's log-probs differ from the trainer's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from lockstep.data.batching import micro_batch, to_device
from lockstep.kernels.rotary import fixed_length
from lockstep.kernels.sampling import Truncation
from lockstep.model.check import ROUNDING_RATIO
from lockstep.model.policy import Policy, Scoring, in_fp32
from lockstep.model.text_model import text_config
from lockstep.rollout.servers.adapter import Answer, WantedSample
from lockstep.rollout.servers.plugin.lockstep_group import bit_sum
from lockstep.types import Example, Origin, Sampling

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 16
# The number of prompts if errors are compared with those of rounding. Measured with SmolLM2-135M in bf16, the ratio of
# the errors of two correct implementations is 1.03 with a standard deviation of 0.17 with 4 prompts, and 0.06 with 32.
# If the output of one attention layer is 10 % too large, it is at least 1.6 with 4 prompts, and at least 2.3 with 32.
MORE_PROMPTS = 32
# The largest ratio of the errors of GROUP_TOKENS tokens among them, relative to the trainer's error of these or of all
# tokens. A wrong row of the embedding changes few tokens: with the tiny model, the ratio of all is at most 1.5, and
# that of a group 3 to 9.
GROUP_TOKENS, GROUP_RATIO = 64, 2.5
# The sampling temperature of a weight check, which differs enough from 1 to detect log-probs without temperature
# scaling.
TEMPERATURE = 0.7


@dataclass(frozen=True)
class Bounds:
    """Mean and maximum of the absolute log-prob difference between engine and trainer, over the tokens of a weight
    check."""

    mean: float
    largest: float


# Bounds of the log-prob difference between engine and trainer for equal weights. The bounds are ROOM times the larger
# difference that two checks of the same weights found, clamped to LEAST and MOST.
LEAST = {
    torch.float32: Bounds(2e-5, 1e-4),
    torch.bfloat16: Bounds(0.02, 0.15),
    torch.float16: Bounds(0.004, 0.03),
}
MOST = {
    torch.float32: Bounds(3e-4, 3e-3),
    torch.bfloat16: Bounds(0.06, 0.6),
    torch.float16: Bounds(0.02, 0.2),
}
ROOM = 4.0
# A larger mean difference between engine and trainer is not attributed to rounding.
LARGEST_ROUNDING = 0.5
# The share of the tokens with the largest errors that do not count when errors are compared with those of rounding.
OUTLIERS = 1 / 16
# The bounds for a server with `rollout.precision`, and the smallest change of log-probs that is not attributed to the
# rounding of weights.
LOW_PRECISION_LEAST, LOW_PRECISION_MOST = Bounds(0.05, 0.5), Bounds(0.25, 3.0)
LOW_PRECISION_NOISE = 0.01


def most_of(dtype: torch.dtype, precision: str | None) -> Bounds:
    """Returns the largest bounds for a server with the trained weights, or with weights quantised to `precision`."""
    return MOST[dtype] if precision is None else LOW_PRECISION_MOST


@dataclass(frozen=True)
class CheckResult:
    """The generated tokens of one weight check with their log-probs in the engine and in the trainer."""

    ids: Sequence[Sequence[int]]
    rollout_logprobs_K: torch.Tensor
    trainer_K: torch.Tensor
    exact_K: torch.Tensor | None = None
    """The trainer's log-probs with fp32 copies of its weights."""
    larger: CheckResult | None = None
    """The check with MORE_PROMPTS and fp32, which decides if the difference exceeds the bounds."""

    @property
    def off(self) -> Bounds:
        off_K = (self.rollout_logprobs_K - self.trainer_K).abs().nan_to_num(nan=torch.inf)
        return Bounds(float(off_K.mean()), float(off_K.max()))

    def passes(self, bounds: Bounds) -> bool:
        """Returns whether the difference is within the bounds, or is rounding: some models have large rounding errors
        in half precision. The engine's error, relative to the log-probs in fp32, is then about as large as the
        trainer's."""
        off = self.off
        if off.mean <= bounds.mean and off.largest <= bounds.largest:
            return True
        return off.mean <= LARGEST_ROUNDING and self.larger is not None and self.larger.is_rounding

    @property
    def is_rounding(self) -> bool:
        if self.exact_K is None or not self.off.mean <= LARGEST_ROUNDING:
            return False
        engine, trainer = self.rounding_errors(self.exact_K)
        return engine <= ROUNDING_RATIO * trainer and self.largest_ratio(self.exact_K) <= GROUP_RATIO

    def largest_ratio(self, exact_K: torch.Tensor) -> float:
        """Returns the largest ratio of the errors of engine and trainer in a group of GROUP_TOKENS tokens. Where the
        trainer's error is smaller than that of all tokens, the latter counts."""
        _, usual = self.rounding_errors(exact_K)
        count = max(1, len(exact_K) // GROUP_TOKENS)
        groups = (all_K.tensor_split(count) for all_K in (self.rollout_logprobs_K, self.trainer_K, exact_K))
        errors = (_mean_errors(*group) for group in zip(*groups, strict=True))
        return max(engine / max(trainer, usual, 1e-9) for engine, trainer in errors)

    def rounding_errors(self, exact_K: torch.Tensor) -> tuple[float, float]:
        """Returns the mean errors of the engine and of the trainer, relative to the log-probs in fp32, without the
        largest errors. Rounding can exchange the order of two likely tokens, which changes their log-probs a lot; other
        weights change most log-probs."""
        return _mean_errors(self.rollout_logprobs_K, self.trainer_K, exact_K)


def _mean_errors(rollout_K: torch.Tensor, trainer_K: torch.Tensor, exact_K: torch.Tensor) -> tuple[float, float]:
    counted = len(exact_K) - math.ceil(len(exact_K) * OUTLIERS)
    engine, trainer = (
        float((found_K - exact_K).abs().sort().values[:counted].mean()) for found_K in (rollout_K, trainer_K)
    )
    return engine, trainer


def fingerprint(weights: Iterable[tuple[str, torch.Tensor]]) -> tuple[int, ...]:
    """Returns the `bit_sum` of each tensor, to detect changed weights."""
    with torch.no_grad():
        return tuple(torch.stack([bit_sum(tensor).cpu() for _, tensor in weights]).tolist())


def check_requests(
    policy: Policy, adapter: str | None, sampling: Sampling | None = None, prompts: int = PROMPTS
) -> list[WantedSample]:
    """Returns the requests of a weight check, with the given `sampling` or, by default, at the temperature
    TEMPERATURE."""
    vocabulary = policy.causal_lm.get_input_embeddings().weight.shape[0]
    max_length = fixed_length(text_config(policy.causal_lm.config)) or PROMPT_TOKENS + NEW_TOKENS
    prompt = min(PROMPT_TOKENS, max(1, max_length - NEW_TOKENS))
    new_tokens = min(NEW_TOKENS, max_length - prompt)
    chosen = sampling or Sampling(max_tokens=new_tokens, temperature=TEMPERATURE)
    rows = [[(7 * row + 5 * i + 2) % vocabulary for i in range(prompt)] for row in range(prompts)]
    return [WantedSample(ids, chosen, new_tokens, seed, adapter) for seed, ids in enumerate(rows, start=1)]


@torch.no_grad()
def checked(
    policy: Policy,
    device: torch.device,
    requests: Sequence[WantedSample],
    answers: Sequence[Answer],
    *,
    fp32: bool = False,
) -> CheckResult:
    """Computes the trainer's log-probs of the tokens that the server generated, under the sampling distribution; with
    `fp32` from fp32 copies of the weights."""
    sampling = requests[0].sampling
    truncation = Truncation(sampling.top_k, sampling.top_p, sampling.min_p)
    rows = [
        Example([*wanted.ids, *answer.ids], [0] * len(wanted.ids) + [1] * len(answer.ids), Origin("probe", number))
        for number, (wanted, answer) in enumerate(zip(requests, answers, strict=True))
    ]
    before, training = policy.scoring, policy.training
    truncated = truncation.active and sampling.score_truncated
    policy.scoring = Scoring(temperature=sampling.temperature, truncation=truncation if truncated else None)
    policy.eval()
    try:
        with in_fp32(policy) if fp32 else nullcontext():
            trainer_K = policy(to_device(micro_batch(rows, packed=True, pad_id=0), device)).logprobs_K.float().cpu()
    finally:
        policy.scoring = before
        policy.train(training)
    rollout_logprobs_K = torch.tensor([logprob for answer in answers for logprob in answer.logprobs])
    return CheckResult([answer.ids for answer in answers], rollout_logprobs_K, trainer_K)


def can_score_in_fp32(policy: Policy, precision: str | None) -> bool:
    """Returns whether the trainer can compute log-probs with fp32 copies of its weights that show what is rounding. It
    cannot if the weights are in fp32 already, if the server quantises them to `precision`, or if they are sharded."""
    from torch.distributed.tensor import DTensor

    parameters = list(policy.parameters())
    half = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in parameters)
    return half and precision is None and not any(isinstance(parameter, DTensor) for parameter in parameters)


def calibrated(first: CheckResult, second: CheckResult, dtype: torch.dtype, precision: str | None = None) -> Bounds:
    """Computes the bounds of later weight checks from the checks of two pushes of the same weights."""
    least, most = LEAST[dtype] if precision is None else LOW_PRECISION_LEAST, most_of(dtype, precision)
    mean, largest = max(first.off.mean, second.off.mean), max(first.off.largest, second.off.largest)
    return Bounds(
        min(most.mean, max(least.mean, ROOM * mean)),
        min(most.largest, max(least.largest, ROOM * largest)),
    )


def repeat_noise(first: CheckResult, second: CheckResult, precision: str | None = None) -> float:
    """Returns the largest difference of the engine's log-probs between two pushes of the same weights; inf if no tokens
    can be compared. A small update may leave all weights in `precision` unchanged."""
    same = _common_tokens(first, second)
    if not len(same):
        return float("inf")
    noise = float((first.rollout_logprobs_K[same] - second.rollout_logprobs_K[same]).abs().max())
    return noise if precision is None else max(noise, LOW_PRECISION_NOISE)


def why_rejected(now: CheckResult, before: CheckResult | None, bounds: Bounds, noise: float) -> str | None:
    """Returns why a weight check fails, or None if it passes. `before` is the last check of the same server."""
    if not now.passes(bounds):
        now = now.larger or now
        off = now.off
        at = int((now.rollout_logprobs_K - now.trainer_K).abs().nan_to_num(nan=torch.inf).argmax())
        in_fp32 = ""
        if now.exact_K is not None:
            engine, trainer = now.rounding_errors(now.exact_K)
            ratio = now.largest_ratio(now.exact_K)
            in_fp32 = (
                f", {now.exact_K[at].item():.6g} in the trainer with fp32 weights (mean error of most tokens: "
                f"engine {engine:.3g}, trainer {trainer:.3g}; of {GROUP_TOKENS} tokens at most {ratio:.3g} times the "
                "trainer's)"
            )
        return (
            f"its log-probs of the weight check differ from the trainer's by {off.mean:.3g} on average and "
            f"{off.largest:.3g} at most (bounds {bounds.mean:.3g} and {bounds.largest:.3g}): token {at} has log-prob "
            f"{now.rollout_logprobs_K[at].item():.6g} in the engine and {now.trainer_K[at].item():.6g} in the trainer"
            f"{in_fp32}"
        )
    if before is not None and _is_unchanged(now, before, noise):
        return "its log-probs of the weight check still match the weights before the last update"
    return None


def why_not_repeated(answers: Sequence[Answer], before: CheckResult, bounds: Bounds) -> str | None:
    """Returns why a server fails that got the weights of the check `before` again, or None if it passes. The trainer's
    log-probs are those of `before`, so only tokens that are sampled again are compared. If `before` passed because its
    difference was rounding, the engine's log-probs of `before` are compared instead."""
    logprobs_K = torch.tensor([logprob for answer in answers for logprob in answer.logprobs])
    now = CheckResult([answer.ids for answer in answers], logprobs_K, before.trainer_K)
    same = _common_tokens(now, before)
    if not len(same):
        return "none of its tokens of the weight check are those that these weights sampled before"
    expected_K = before.trainer_K if before.larger is None else before.rollout_logprobs_K
    return why_rejected(CheckResult(now.ids, logprobs_K[same], expected_K[same]), None, bounds, 0.0)


def _is_unchanged(now: CheckResult, before: CheckResult, noise: float) -> bool:
    """Returns whether the engine still has the previous weights. A small update may change log-probs by less than the
    bounds of the check. So this function compares changes: if the trainer's log-probs changed by more than 4 times
    `noise`, but the engine's log-probs by at most `noise`, the engine has the previous weights."""
    same = _common_tokens(now, before)
    if len(same) < sum(map(len, now.ids)):
        return False  # different tokens were sampled, so the weights have changed
    engine = float((now.rollout_logprobs_K - before.rollout_logprobs_K).abs().max())
    trainer = float((now.trainer_K - before.trainer_K).abs().max())
    return engine <= noise and trainer > 4 * max(noise, 1e-6)


def _common_tokens(a: CheckResult, b: CheckResult) -> torch.Tensor:
    """Returns the token indices of the common prefixes, up to the first response whose lengths differ."""
    indices: list[int] = []
    start = 0
    for one, other in zip(a.ids, b.ids, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))
        if len(one) != len(other):
            return torch.tensor(indices, dtype=torch.long)
        indices += range(start, start + same)
        start += len(one)
    return torch.tensor(indices, dtype=torch.long)
