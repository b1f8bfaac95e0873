"""Has the server the weights that it was given? It continues fixed prompts, and the trainer scores what it wrote.

Names, sums and versions can all be right while the engine computes with something else (a packed copy, a cache of
earlier weights); what it says of tokens cannot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from lockstep.data.batching import micro_batch, to_device
from lockstep.kernels.rotary import fixed_length
from lockstep.kernels.sampling import Truncation
from lockstep.model.policy import Policy, Scoring
from lockstep.rollout.servers.adapter import Answer, WantedSample
from lockstep.rollout.servers.plugin.lockstep_group import bit_sum
from lockstep.types import Example, Origin, Sampling

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 16
# Far enough from 1 that log-probs before and after the division by it cannot be taken for each other.
TEMPERATURE = 0.7


@dataclass(frozen=True)
class Bounds:
    """Of the difference of log-probs, over the tokens of a probe."""

    mean: float
    largest: float


# What rounding makes of the same weights: never asked to be less than the first, never allowed to be more than the
# second. Between them it is what two pushes of the same weights show, with room.
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


@dataclass(frozen=True)
class ProbeResult:
    """One probe: the tokens, and what engine and trainer say of each."""

    ids: Sequence[Sequence[int]]
    engine_K: torch.Tensor
    trainer_K: torch.Tensor

    @property
    def off(self) -> Bounds:
        off_K = (self.engine_K - self.trainer_K).abs().nan_to_num(nan=torch.inf)
        return Bounds(float(off_K.mean()), float(off_K.max()))


def fingerprint(weights: Iterable[tuple[str, torch.Tensor]]) -> tuple[int, ...]:
    """Tells whether any weight has changed: of each tensor the sum of its bits as whole numbers."""
    with torch.no_grad():
        return tuple(torch.stack([bit_sum(tensor).cpu() for _, tensor in weights]).tolist())


def probe_requests(policy: Policy, adapter: str | None, sampling: Sampling | None = None) -> list[WantedSample]:
    """What is asked of the server: at a temperature of its own, or as `sampling` says."""
    vocabulary = policy.causal_lm.get_input_embeddings().weight.shape[0]
    fixed = fixed_length(policy.causal_lm.config.get_text_config(decoder=True)) or PROMPT_TOKENS + NEW_TOKENS
    prompt = min(PROMPT_TOKENS, max(1, fixed - NEW_TOKENS))
    new = min(NEW_TOKENS, fixed - prompt)
    how = sampling or Sampling(max_tokens=new, temperature=TEMPERATURE)
    rows = [[(7 * row + 5 * i + 2) % vocabulary for i in range(prompt)] for row in range(PROMPTS)]
    return [WantedSample(ids, how, new, seed, adapter) for seed, ids in enumerate(rows, start=1)]


@torch.no_grad()
def probed(
    policy: Policy, device: torch.device, asked: Sequence[WantedSample], answers: Sequence[Answer]
) -> ProbeResult:
    """The trainer's scores of what the server wrote, in the distribution that was sampled from."""
    how = asked[0].sampling
    truncation = Truncation(how.top_k, how.top_p, how.min_p)
    rows = [
        Example([*wanted.ids, *answer.ids], [0] * len(wanted.ids) + [1] * len(answer.ids), Origin("probe", number))
        for number, (wanted, answer) in enumerate(zip(asked, answers, strict=True))
    ]
    before, training = policy.scoring, policy.training
    truncated = truncation.active and how.score_truncated
    policy.scoring = Scoring(temperature=how.temperature, truncation=truncation if truncated else None)
    policy.eval()
    try:
        said_K = policy(to_device(micro_batch(rows, packed=True, pad_id=0), device)).logprobs_K.float().cpu()
    finally:
        policy.scoring = before
        policy.train(training)
    engine_K = torch.tensor([logprob for answer in answers for logprob in answer.logprobs])
    return ProbeResult([answer.ids for answer in answers], engine_K, said_K)


def calibrated(first: ProbeResult, second: ProbeResult, dtype: torch.dtype) -> Bounds:
    """The bounds of the probes to come, from two pushes of the same weights."""
    least, most = LEAST[dtype], MOST[dtype]
    mean, largest = max(first.off.mean, second.off.mean), max(first.off.largest, second.off.largest)
    return Bounds(
        min(most.mean, max(least.mean, ROOM * mean)),
        min(most.largest, max(least.largest, ROOM * largest)),
    )


def repeat_noise(first: ProbeResult, second: ProbeResult) -> float:
    """By how much the engine's own log-probs differ between two pushes of the same weights."""
    same = _shared(first, second)
    return float((first.engine_K[same] - second.engine_K[same]).abs().max()) if len(same) else float("inf")


def why_refused(now: ProbeResult, before: ProbeResult | None, bounds: Bounds, noise: float) -> str | None:
    """What is wrong with an answer to the probe; None where nothing is."""
    off = now.off
    if not (off.mean <= bounds.mean and off.largest <= bounds.largest):
        at = int((now.engine_K - now.trainer_K).abs().nan_to_num(nan=torch.inf).argmax())
        return (
            f"its log-probs of the probe differ from the trainer's by {off.mean:.3g} on average and {off.largest:.3g} "
            f"at most (bounds {bounds.mean:.3g} and {bounds.largest:.3g}): token {at} has log-prob "
            f"{now.engine_K[at].item():.6g} in the engine and {now.trainer_K[at].item():.6g} in the trainer"
        )
    if before is not None and _stands_still(now, before, noise):
        return "its log-probs of the probe are those of the weights before the last update"
    return None


def _stands_still(now: ProbeResult, before: ProbeResult, noise: float) -> bool:
    """An update may move log-probs by less than the bounds: then the engine must at least have moved when the trainer
    has, by more than rounding alone moves either."""
    same = _shared(now, before)
    if len(same) < sum(map(len, now.ids)):
        return False  # other tokens: it has moved
    engine = float((now.engine_K - before.engine_K).abs().max())
    trainer = float((now.trainer_K - before.trainer_K).abs().max())
    return engine <= noise and trainer > 4 * max(noise, 1e-6)


def _shared(a: ProbeResult, b: ProbeResult) -> torch.Tensor:
    """The tokens, by their number, that stand behind the same beginnings in both."""
    found: list[int] = []
    start = 0
    for one, other in zip(a.ids, b.ids, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))
        if len(one) != len(other):
            return torch.tensor(found, dtype=torch.long)
        found += range(start, start + same)
        start += len(one)
    return torch.tensor(found, dtype=torch.long)
