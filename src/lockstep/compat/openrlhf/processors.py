"""What OpenRLHF's `--post_processor` makes of scored answers: the best of each prompt (`rs`), best against worst
(`iter_dpo`), or each with its reward in the prompt (`csft`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.data.prepare.sampled import TEMPLATE
from lockstep.errors import Refusal

ScoredAnswer = Mapping[str, Any]
"""`input`, `output` and `reward`."""


def processed(
    kind: str | None, rows: Sequence[ScoredAnswer], template: str | None, normalize: bool
) -> list[dict[str, Any]]:
    if kind == "rs":
        return [
            {"input": best["input"], "output": best["output"], "reward": best["reward"]}
            for best, _ in _best_and_worst(rows)
        ]
    if kind == "iter_dpo":
        return [
            {
                "prompt": best["input"],
                "chosen": best["output"],
                "chosen_reward": best["reward"],
                "rejected": worst["output"],
                "rejected_reward": worst["reward"],
            }
            for best, worst in _best_and_worst(rows)
        ]
    if kind == "csft":
        return _conditional(_normalized(rows) if normalize else rows, template or TEMPLATE)
    return [dict(row) for row in rows]


def _best_and_worst(rows: Sequence[ScoredAnswer]) -> list[tuple[ScoredAnswer, ScoredAnswer]]:
    """Of each prompt, in the order in which prompts come; of equal rewards the first counts."""
    found: dict[str, list[ScoredAnswer]] = {}
    for row in rows:
        found.setdefault(row["input"], []).append(row)
    return [
        (max(group, key=lambda row: row["reward"]), min(group, key=lambda row: row["reward"]))
        for group in found.values()
    ]


def _normalized(rows: Sequence[ScoredAnswer]) -> list[dict[str, Any]]:
    """Rewards of mean 0 and deviation 1 (with n - 1)."""
    rewards = [row["reward"] for row in rows]
    mean = math.fsum(rewards) / len(rewards)
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards) - 1))
    if deviation == 0:
        raise Refusal.at("--normalize_reward", "all rewards are equal: there is nothing to divide by", "remove it")
    return [{**row, "reward": (row["reward"] - mean) / deviation} for row in rows]


def _conditional(rows: Sequence[ScoredAnswer], template: str) -> list[dict[str, Any]]:
    return [
        # What the prompt itself says is put in last: a brace in it is text.
        {**row, "input": template.replace("{reward}", f"{row['reward']:.2f}").replace("{input}", row["input"])}
        for row in rows
    ]
