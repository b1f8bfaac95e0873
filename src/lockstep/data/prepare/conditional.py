"""Conditional SFT (arXiv 2308.12050): every response is learned, with its reward as a part of the prompt.

A model that has read prompts with the rewards of their responses is asked for a good one by writing a high reward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lockstep.data.prepare.scored import ScoredQuestion, ScoredResponse
from lockstep.data.prepare.write import answered
from lockstep.errors import Refusal
from lockstep.types import Message, Row

TEMPLATE = "{input} <rm_score>: {reward} "
_FIELDS = ("{input}", "{reward}")


def refuse_template(template: str) -> None:
    missing = [name for name in _FIELDS if name not in template]
    if missing:
        raise Refusal.at("--reward-template", f"has no place for {' and '.join(missing)}", f"for example {TEMPLATE!r}")


def normalised(groups: Sequence[ScoredQuestion]) -> list[ScoredQuestion]:
    """Rewards less their mean, over their deviation (with n - 1), of all responses that can be used."""
    rewards = [response.reward for group in groups for response in group.responses]
    mean = math.fsum(rewards) / max(len(rewards), 1)
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / max(len(rewards) - 1, 1)
    if variance == 0:
        raise Refusal.at("--normalize", "all rewards are equal: there is nothing to divide by", "remove it")

    def scaled(response: ScoredResponse) -> ScoredResponse:
        return replace(response, reward=(response.reward - mean) / math.sqrt(variance))

    return [replace(group, responses=[scaled(response) for response in group.responses]) for group in groups]


def conditioned(prompt: Sequence[Message], reward: float, template: str) -> list[Message]:
    """The prompt with the reward, in two decimals, written into its last message."""
    *before, last = prompt
    # What the prompt itself says is put in last: a brace in it is text.
    text = template.replace("{reward}", f"{reward:.2f}").replace("{input}", str(last["content"]))
    return [*before, {**last, "content": text}]


def conditional_rows(group: ScoredQuestion, responses: Sequence[ScoredResponse], template: str) -> list[Row]:
    return [
        {"messages": [*conditioned(group.prompt, r.reward, template), *answered(r.text)], "reward": r.reward}
        for r in responses
    ]
