"""The metrics of a step's rollouts: lengths, tokens, failures and the parts of the reward."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.types import FAILED, Score, Summary


def rollout_metrics(every: Sequence[Summary], rollouts: Sequence[Summary], failed: int) -> dict[str, float]:
    """Of the `rollouts` that are learned from; tokens are counted over `every` one that was generated. A response that
    its rollout function failed to make has no length."""
    rollouts = [rollout for rollout in rollouts if rollout.stop != FAILED]
    lengths = torch.tensor([rollout.written for rollout in rollouts], dtype=torch.float64)
    prompts = torch.tensor([rollout.prompt_tokens for rollout in rollouts], dtype=torch.float64)
    metrics = {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "response_length/clip_ratio": sum(r.stop == "length" for r in rollouts) / len(rollouts),
        "prompt_length/mean": float(prompts.mean()),
        "prompt_length/max": float(prompts.max()),
        "prompt_length/min": float(prompts.min()),
        "perf/total_num_tokens": float(sum(r.length for r in every)),
        "reward/failed": float(failed),
    }
    parts: dict[str, list[float]] = {}
    for rollout in rollouts:
        if isinstance(rollout.score, Score):
            for name, value in rollout.score.parts.items():
                parts.setdefault(name, []).append(value)
    return metrics | {f"reward/{name}/mean": sum(values) / len(values) for name, values in parts.items()}


def straggler_metrics(ranks: Sequence[tuple[float, int]]) -> dict[str, float]:
    """From every rank's seconds of generation, and the prompts that it took from another's share."""
    seconds = [seconds for seconds, _ in ranks]
    if len(ranks) == 1 or not sum(seconds):
        return {}
    return {
        "perf/gen_straggler": max(seconds) * len(seconds) / sum(seconds),
        "perf/gen_taken_prompts": float(sum(taken for _, taken in ranks)),
    }
