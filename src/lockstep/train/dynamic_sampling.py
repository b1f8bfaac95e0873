"""Dynamic sampling: which groups of responses are worth a place in the step, and which are replaced by others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lockstep.algorithms.advantage import informative
from lockstep.recipe.keys_online import DynamicSampling
from lockstep.train.experience import part_of
from lockstep.types import Prompt, Score, Summary


def teaches(group: Sequence[Summary], prompts: Mapping[int, Prompt], settings: DynamicSampling) -> bool:
    """Scores that are not all equal, or whose mean is between two bounds."""
    metric, key = settings.metric, "algorithm.dynamic_sampling.metric"
    scores = torch.tensor(
        [
            one.score.total if metric is None else part_of(one, prompts, metric, key)
            for one in group
            if isinstance(one.score, Score)
        ]
    )
    if settings.between is not None:
        low, high = settings.between
        return len(scores) > 0 and low < float(scores.double().mean()) < high
    return bool(informative(scores, torch.zeros(len(scores), dtype=torch.long)).any())
