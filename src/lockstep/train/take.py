"""The experience of a step: prompts taken, answered, judged, and, with dynamic sampling, replaced where all agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lockstep.algorithms.advantage import informative
from lockstep.data.dataset import Loader
from lockstep.errors import Refusal
from lockstep.recipe import Recipe
from lockstep.reward.scorer import Scorer
from lockstep.reward.shaping import overlong_penalty
from lockstep.rollout.collect import collect
from lockstep.train.experience import Experience, experience_of
from lockstep.train.generation import ready, training_sampling
from lockstep.train.session import Session
from lockstep.types import Failure, Prompt, Rollout, Sampling, Score


@dataclass(frozen=True)
class Taken:
    """The responses to learn from, those that could not be scored, and where the next step begins in the data."""

    experience: Experience
    failed: list[Rollout]
    position: int
    metrics: dict[str, float]


def take_experience(loader: Loader[Prompt], session: Session, scorer: Scorer, recipe: Recipe) -> Taken:
    position, wanted = int(session.carried["position"]), recipe.batch.prompts
    rounds = recipe.algorithm.dynamic_sampling.rounds
    kept: list[list[Rollout]] = []
    uniform: list[list[Rollout]] = []
    every: list[Rollout] = []
    used = 0
    while len(kept) < wanted and used < rounds:
        missing = wanted - len(kept)
        prompts = loader.between(position, position + missing)
        answered = _answer(prompts, position, session, scorer, recipe)
        position += missing
        used += 1
        every += answered
        for group in _groups(answered):
            (kept if rounds == 1 or _mixed(group) else uniform).append(group)
    # The rounds are used up: groups that teach nothing fill the step, so that its size stays what it is.
    filled = kept + uniform[: wanted - len(kept)]
    rollouts = [replace(rollout, place=place) for place, group in enumerate(filled) for rollout in group]
    greedy = _greedy(rollouts, session, scorer, recipe) if recipe.algorithm.advantage == "remax" else None
    every += greedy or []
    failed = [rollout for rollout in every if isinstance(rollout.score, Failure)]
    _refuse_failures(failed, len(every), recipe.reward.max_failures)
    experience = experience_of(rollouts, None if greedy is None else _baselines(greedy))
    if not experience.sequences:
        raise _failures(failed, len(every), "and none is left to learn from")
    metrics = counted(every, rollouts, failed, recipe)
    if rounds > 1:
        metrics |= {
            "train/num_gen_batches": float(used),
            "train/uniform_groups": float(len(uniform)),
            "train/filled_groups": float(len(filled) - min(len(kept), wanted)),
        }
    return Taken(experience, failed, position, metrics)


def _answer(
    prompts: Sequence[Prompt], first_key: int, session: Session, scorer: Scorer, recipe: Recipe
) -> list[Rollout]:
    keys = [first_key + place for place in range(len(prompts))]
    sampling = training_sampling(recipe, session.speaking.stop_ids)
    return _generate(prompts, keys, recipe.rollout.n, sampling, session, scorer, recipe)


def _generate(
    prompts: Sequence[Prompt],
    keys: Sequence[int],
    n: int,
    sampling: Sampling,
    session: Session,
    scorer: Scorer,
    recipe: Recipe,
) -> list[Rollout]:
    """Responses with the score that they are trained on."""
    speaker, world = session.speaking, session.world
    with ready(speaker.policy, world, session.torch_device):
        rollouts = collect(speaker.engine, scorer, prompts, keys, n, sampling, world, speaker.decode, session.phases)
    settings = recipe.algorithm.overlong
    if not settings.buffer:
        return rollouts
    return [_shaped(rollout, recipe.rollout.max_tokens, settings.buffer, settings.factor) for rollout in rollouts]


def rescored(rollouts: Sequence[Rollout], scorer: Scorer, recipe: Recipe) -> list[Score | Failure]:
    """What responses are worth by this run's rewards, however they came about."""
    waiting = [scorer.submit(rollout.prompt.question, rollout.text) for rollout in rollouts]
    scorer.flush()
    settings = recipe.algorithm.overlong
    found = []
    for rollout, future in zip(rollouts, waiting, strict=True):
        judged = replace(rollout, score=future.result())
        if settings.buffer:
            judged = _shaped(judged, recipe.rollout.max_tokens, settings.buffer, settings.factor)
        found.append(judged.score)
    return found


def _shaped(rollout: Rollout, limit: int, buffer: int, factor: float) -> Rollout:
    if isinstance(rollout.score, Failure):
        return rollout
    penalty = overlong_penalty(len(rollout.ids), limit, buffer, factor)
    parts = {**rollout.score.parts, "overlong": penalty}
    return replace(rollout, score=Score(rollout.score.total + penalty, parts))


def _greedy(rollouts: Sequence[Rollout], session: Session, scorer: Scorer, recipe: Recipe) -> list[Rollout]:
    """The likeliest response to each prompt of the step, at the prompt's place."""
    prompts = {rollout.place: rollout.prompt for rollout in rollouts}
    places = sorted(prompts)
    sampling = replace(training_sampling(recipe, session.speaking.stop_ids), temperature=0.0)
    greedy = _generate([prompts[place] for place in places], places, 1, sampling, session, scorer, recipe)
    return [replace(rollout, place=places[rollout.place]) for rollout in greedy]


def _baselines(greedy: Sequence[Rollout]) -> dict[int, float]:
    """The greedy response's score by place; a prompt whose greedy response could not be scored has none."""
    return {rollout.place: rollout.score.total for rollout in greedy if isinstance(rollout.score, Score)}


def _groups(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.place, []).append(rollout)
    return list(groups.values())


def _mixed(group: Sequence[Rollout]) -> bool:
    scores = torch.tensor([r.score.total for r in group if isinstance(r.score, Score)])
    return bool(informative(scores, torch.zeros(len(scores), dtype=torch.long)).any())


def _refuse_failures(failed: Sequence[Rollout], total: int, most: float) -> None:
    if len(failed) > most * total:
        raise _failures(failed, total, f"over reward.max_failures={most:g}")


def _failures(failed: Sequence[Rollout], total: int, consequence: str) -> Refusal:
    first = failed[0]
    assert isinstance(first.score, Failure)
    return Refusal.at(
        f"reward.{first.score.part}",
        f"{len(failed)} of {total} responses could not be scored, {consequence}; the first, to "
        f"{first.prompt.question.origin}: {first.score.told}; response: {first.text[:200]!r}",
        "mend the reward, or raise reward.max_failures; the last checkpoint is untouched",
    )


def counted(
    every: Sequence[Rollout], rollouts: Sequence[Rollout], failed: Sequence[Rollout], recipe: Recipe
) -> dict[str, float]:
    lengths = torch.tensor([rollout.written for rollout in rollouts], dtype=torch.float64)
    prompts = torch.tensor([len(rollout.prompt.ids) for rollout in rollouts], dtype=torch.float64)
    metrics = {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "response_length/clip_ratio": sum(r.stop == "length" for r in rollouts) / len(rollouts),
        "prompt_length/mean": float(prompts.mean()),
        "prompt_length/max": float(prompts.max()),
        "prompt_length/min": float(prompts.min()),
        "perf/total_num_tokens": float(sum(len(r.ids) + len(r.prompt.ids) for r in every)),
        "reward/failed": float(len(failed)),
    }
    parts: dict[str, list[float]] = {}
    for rollout in rollouts:
        if isinstance(rollout.score, Score):
            for name, value in rollout.score.parts.items():
                parts.setdefault(name, []).append(value)
    return metrics | {f"reward/{name}/mean": sum(values) / len(values) for name, values in parts.items()}
