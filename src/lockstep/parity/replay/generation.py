"""Do two engines say the same? Judged token by token, up to where they part.

Sampling adds noise to log-probabilities and takes the largest sum; the noise is a function of the position alone and
the same on every device. So while two engines agree they draw the same tokens, and where they draw different ones, the
two sums must lie within rounding of each other: A preferred `a`, B preferred `b`, and neither saw the other far behind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lockstep.kernels.sampling import gumbel_noise, sequence_keys
from lockstep.parity.replay.checks import Check
from lockstep.parity.replay.loop import by_prompt_and_sample
from lockstep.types import Rollout


def judge_generation(
    step: int,
    a: Sequence[Rollout],
    b: Sequence[Rollout],
    allowed: float,
    *,
    seed: int,
    first_key: int,
    vocabulary: int,
    greedy: bool,
    known_noise: bool = True,
) -> Check:
    """`first_key` is the data position of the step's first prompt, from which sampling derives its noise.

    Without `known_noise`, that of a serving engine, responses are judged up to where they part, and the parting is not.
    """
    ours, theirs = by_prompt_and_sample(a), by_prompt_and_sample(b)
    missing = sorted(ours.keys() ^ theirs.keys())
    if missing:
        prompt_index, sample = missing[0]
        where = f"{len(missing)} responses are on one side only, the first to prompt {prompt_index}, sample {sample}"
        return Check("generation", step, "responses", math.inf, allowed, where)
    differences: list[float] = []
    worst, where = 0.0, ""
    parted = 0
    for key, one in ours.items():
        other = theirs[key]
        keys = sequence_keys(seed, first_key + key[0], key[1])
        shared = _shared(one.ids, other.ids)
        errors = [abs(x - y) for x, y in zip(one.logprobs[:shared], other.logprobs[:shared], strict=True)]
        if shared < max(len(one.ids), len(other.ids)):
            parted += 1
            # An end token is a token too: where one side just stops, no tie explains it.
            ended = shared == min(len(one.ids), len(other.ids))
            if known_noise:
                errors.append(math.inf if ended else _preference_gap(one, other, shared, keys, vocabulary, greedy))
        differences += errors
        if errors and max(errors) > worst:
            worst = max(errors)
            token = errors.index(worst)
            where = (
                f"prompt {key[0]}, sample {key[1]}, token {token}: {_said(one, token)} against {_said(other, token)}"
            )
    size = torch.tensor(differences, dtype=torch.float64)
    error = float(size.square().mean().sqrt()) if len(size) else 0.0
    unjudged = "" if known_noise else ", which is not judged: the engine's noise is its own"
    what = f"tokens and the engine's log-probabilities ({parted} of {len(ours)} responses part{unjudged})"
    return Check("generation", step, what, error, allowed, where)


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    both = min(len(a), len(b))
    return next((i for i in range(both) if a[i] != b[i]), both)


def _said(rollout: Rollout, token: int) -> str:
    if token >= len(rollout.ids):
        return "nothing"
    return f"{rollout.ids[token]} ({rollout.logprobs[token]:.6g})"


def _preference_gap(
    one: Rollout, other: Rollout, position: int, keys: tuple[int, int], vocabulary: int, greedy: bool
) -> float:
    """How far apart the two winning sums are; 0 for a tie."""
    tokens = one.ids[position], other.ids[position]
    scores = one.logprobs[position], other.logprobs[position]
    if greedy:
        return abs(scores[0] - scores[1])
    noise = gumbel_noise(torch.tensor([keys], dtype=torch.int32), torch.tensor([position]), vocabulary)[0]
    return abs((scores[0] + float(noise[tokens[0]])) - (scores[1] + float(noise[tokens[1]])))
