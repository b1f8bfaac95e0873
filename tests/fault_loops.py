"""Faults before an update: rows, generation, rewards and advantages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fault_scene import Inject, Scene, around_method, patched, wrap
from lockstep.algorithms.advantage import ESTIMATORS, Estimate, Signals
from lockstep.kernels.attention.layout import DecodePass
from lockstep.reward.scorer import Scorer
from lockstep.rollout.native.decode_batch import DecodeState
from lockstep.rollout.native.scheduler import Scheduler
from lockstep.tape.tape_recorder import restore_learner
from lockstep.types import Example, MicroBatch

# -- rows


def rows(change: Callable[[Example], Example]) -> Inject:
    """The first row of an offline update."""

    def inject(scene: Scene) -> None:
        def rows(original: Any, offline: Any, step: int) -> Any:
            first, *rest = original(offline, step)
            return [change(first), *rest]

        wrap(scene.replay, "rows", rows)

    return inject


def prompt_trained(row: Example) -> Example:
    first = list(row.loss_mask).index(1)
    return replace(row, loss_mask=[int(i == first - 1 or flag) for i, flag in enumerate(row.loss_mask)])


def last_untrained(row: Example) -> Example:
    last = max(i for i, flag in enumerate(row.loss_mask) if flag)
    return replace(row, loss_mask=[int(flag and i != last) for i, flag in enumerate(row.loss_mask)])


def truncated(row: Example) -> Example:
    return replace(row, ids=row.ids[:-2], loss_mask=row.loss_mask[:-2])


def response_mask(scene: Scene) -> None:
    """Online: the mask is one token early, so that the prompt's last token is trained and the last of all is not."""

    def examples(original: Any, rollout: Any) -> list[Example]:
        return [last_untrained(prompt_trained(example)) for example in original(rollout)]

    patched(scene, "lockstep.train.experience", "make_examples", examples)


def packed_batch(change: Callable[[MicroBatch], MicroBatch]) -> Inject:
    """Rows that are right, and a line of them that is not."""

    def inject(scene: Scene) -> None:
        patched(scene, "lockstep.data.batching", "_packed", lambda original, *rows: change(original(*rows)))

    return inject


def shifted(batch: MicroBatch) -> MicroBatch:
    """Every token is predicted from the place after the right one."""
    return replace(batch, predictors_K=(batch.predictors_K + 1).clamp(max=batch.input_ids_NT.numel() - 1))


def running_on(batch: MicroBatch) -> MicroBatch:
    """The positions of a sequence begin where those of the sequence before it end."""
    return replace(batch, position_ids_NT=torch.arange(batch.input_ids_NT.numel())[None])


def moved_ends(batch: MicroBatch) -> MicroBatch:
    """Each sequence but the first begins one token late, with what belongs to the one before it."""
    first, *rest = batch.lengths
    return replace(batch, lengths=(first + 1, *rest[:-1], rest[-1] - 1)) if rest else batch


# -- generation


def sampling(**changes: Any) -> Inject:
    def inject(scene: Scene) -> None:
        wrap(
            scene.training.generator.engine,
            "generate",
            lambda original, requests, how: original(requests, replace(how, **changes)),
        )

    return inject


def stale_engine(scene: Scene) -> None:
    """The engine runs a copy of the weights, of the step before."""
    learner, engine = scene.training.models.trained, scene.training.generator.engine
    now = scene.replay.tape.read_weights(2)
    restore_learner(learner, scene.replay.tape.read_weights(1), "tape")
    engine.policy = copy.deepcopy(scene.policy)  # type: ignore[attr-defined]
    restore_learner(learner, now, "tape")


def decode_positions(scene: Scene) -> None:
    engine: Any = scene.training.generator.engine

    def hidden(original: Any, tokens: Any, positions: Any, layout: Any) -> Any:
        return original(tokens, positions + 1 if isinstance(layout, DecodePass) else positions, layout)

    def runner(original: Any, *args: Any) -> Any:
        made = original(*args)
        wrap(made, "_hidden", hidden)
        return made

    wrap(engine, "_runner", runner)


def wrong_block(scene: Scene) -> None:
    """Who was preempted reads another's block afterwards."""
    engine: Any = scene.training.generator.engine
    preempted: set[int] = set()
    around_method(
        scene,
        Scheduler,
        "_preempt",
        lambda original, scheduler, sample: (preempted.add(id(sample)), original(scheduler, sample)),
    )

    def state(original: Any, samples: Any, *args: Any) -> Any:
        made = original(samples, *args)
        for row, sample in enumerate(samples):
            if id(sample) in preempted:
                made.table_BM[row, 0] = (made.table_BM[row, 0] + 1) % engine._cache_kept.blocks
        return made

    around_method(scene, DecodeState, "of", state)


# -- rewards


def judged_text(change: Callable[[str], str]) -> Inject:
    def inject(scene: Scene) -> None:
        def submit(original: Any, scorer: Any, question: Any, text: str, *trajectory: Any) -> Any:
            return original(scorer, question, change(text), *trajectory)

        around_method(scene, Scorer, "submit", submit)

    return inject


def reward_weight(factor: float) -> Inject:
    def inject(scene: Scene) -> None:
        def total(original: Any, scorer: Any, *given: Any) -> Any:
            score = original(scorer, *given)
            return replace(score, total=factor * score.total)

        around_method(scene, Scorer, "_sum", total)

    return inject


def no_overlong(scene: Scene) -> None:
    patched(scene, "lockstep.reward.row_rewards", "overlong_penalty", lambda original, *args: 0.0)


# -- advantages


def estimator(name: str, compute: Callable[..., Estimate]) -> Inject:
    return lambda scene: scene.patch.setitem(ESTIMATORS, name, compute)


def gae_with(**changes: float) -> Inject:
    original = ESTIMATORS["gae"]
    return estimator("gae", lambda signals, **keys: original(signals, **{**keys, **changes}))


def over_the_batch(signals: Signals, **keys: float) -> Estimate:
    """The mean of all responses in the place of the group's."""
    return ESTIMATORS["dr_grpo"](replace(signals, group_S=torch.zeros_like(signals.group_S)), **keys)


def biased_deviation(signals: Signals, **keys: float) -> Estimate:
    """Divided by n, not by n - 1."""
    original = _GRPO(signals, **keys)
    size_S = torch.bincount(signals.group_S)[signals.group_S].double()
    factor_K = (size_S / (size_S - 1)).sqrt()[signals.sequence_K].to(original.advantages_K.dtype)
    return replace(original, advantages_K=original.advantages_K * factor_K)


def misplaced_reward(scene: Scene) -> None:
    """The score stands on the first token, not on the last."""
    from lockstep.train.experience import Experience

    scene.patch.setattr(
        Experience,
        "last_K",
        property(lambda self: torch.tensor([0, *(len(r.ids) for r in self.rollouts[:-1])]).cumsum(0)),
    )


_GRPO = ESTIMATORS["grpo"]
