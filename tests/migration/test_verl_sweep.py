"""Random commands of verl 0.4.1 and 0.9.1: the migrated recipe makes verl's update, or the conversion is refused."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from lockstep.compat.conversion_output import checked
from lockstep.compat.verl.convert_verl import convert_verl
from lockstep.errors import Refusal
from lockstep.recipe import Recipe

from .batch import EACH, PROMPTS, Gradients, Ours, adapted, distance, gradients
from .verl_sweep import OursAgain, SweepBatch, SweptUpdate, drawn_command

pytestmark = pytest.mark.peers

PARTS, EACH_PART = 8, 40
WITHIN = 1e-4
LARGEST = 1e-5


@cache
def batch_of(model: Path, each: int, drift: float) -> SweepBatch:
    return SweepBatch(model, each, drift)


@cache
def built(model: Path) -> Ours:
    """The models of all recipes: a policy and a critic."""
    batch = batch_of(model, EACH, 0.4)
    return Ours(recipe_of(f"{batch.common()} algorithm.adv_estimator=gae", model), batch)


def recipe_of(text: str, model: Path) -> Recipe:
    return adapted(checked(convert_verl("main_ppo", text.split())), model)


def drift_of(text: str) -> float:
    """How far the policy moved since the old log-probs: not at all where verl decides by the current log-probs and the
    recipe by the old ones. At a distance of 0 the penalty of kl_cov, an absolute value, would have no gradient."""
    if "kl_cov" in text:
        return 1e-3
    return 0.0 if "clip_cov" in text or "bypass_mode" in text else 0.4


def finite(values: Gradients) -> bool:
    return all(bool(value.isfinite().all()) for value in values.values())


def apart(ours: tuple[float, Gradients], theirs: tuple[float, Gradients]) -> float:
    largest = [max(float(g.abs().max()) for g in found.values()) for found in (ours[1], theirs[1])]
    moved = 0.0 if max(largest) < LARGEST else distance(ours[1], theirs[1])
    return max(moved, abs(ours[0] - theirs[0]) / max(1.0, abs(theirs[0])))


def outcome(seed: int, model: Path) -> tuple[str, str]:
    """The outcome of a random command, and what is different."""
    version, text = drawn_command(seed)
    batch = batch_of(model, 1 if seed % 7 == 0 else EACH, drift_of(text))
    text = f"{batch.common()} {text}"
    try:
        recipe = recipe_of(text, model)
    except Refusal:
        return "refused", ""
    theirs = SweptUpdate(version, text.split(), batch)
    expected = theirs.policy()
    if not finite(expected[1]):
        return "not finite in verl", ""
    ours = OursAgain(recipe, batch, built(model))
    # The report says that verl 0.4 adds up the sequences of a micro-batch.
    times = PROMPTS * EACH if version == "0.4.1" and "sum-norm" in text else 1
    loss, found = ours.policy()
    far = apart((times * loss, {name: times * value for name, value in found.items()}), expected)
    if recipe.algorithm.advantage == "gae":
        assert ours.models.critic is not None
        loss, found = ours.critic()
        value = theirs.value_loss(ours.values())
        value.backward()
        wanted = float(value.detach()), gradients(ours.models.critic.module)
        far = max(far, apart((times * loss, {name: times * one for name, one in found.items()}), wanted))
    return ("same", "") if far <= WITHIN else ("different", f"{seed} ({version}) by {far:.2g}: {text}")


@pytest.mark.parametrize("part", range(PARTS))
def test_a_random_command_makes_verls_update_or_is_refused(part: int, tiny_folder: Path) -> None:
    found = [outcome(seed, tiny_folder) for seed in range(part * EACH_PART, (part + 1) * EACH_PART)]
    counts = Counter(kind for kind, _ in found)
    print(dict(counts))
    assert not [text for _, text in found if text]
    assert counts["same"] >= 0.8 * EACH_PART, counts
    assert counts["not finite in verl"] <= 1
