"""What a resume compares: keys, models by content, and the learning rate of the next step."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import Refusal
from lockstep.recipe import Recipe
from lockstep.recipe.loader import resolved
from lockstep.recipe.measure import facts_of
from lockstep.recipe.methods import with_method_defaults
from lockstep.recipe.section import Section
from lockstep.run.checkpoint import State
from lockstep.train.resume import (
    learning_rate_changes,
    model_fingerprints,
    model_paths,
    refuse_changed_models,
    refuse_changed_recipe,
    refuse_unlike_machines,
)


def recipe(method: str = "sft", **groups: Any) -> Recipe:
    values = {"method": method, "model": {"path": "base"}, "data": {"train": "rows.jsonl"}, "run": {"steps": 10}}
    return Recipe(**with_method_defaults({**values, **groups}))


def state(written: Recipe, models: dict[str, Any] | None = None, step: int = 4, planned: int = 10) -> State:
    return State(
        step=step, rows_seen=0, recipe=resolved(written), data={}, world_size=1, planned=planned, models=models or {}
    )


ROLES: dict[str, tuple[Recipe, dict[str, str]]] = {
    "sft": (recipe(), {"model.path": "base"}),
    "adapter": (
        recipe(model={"path": "base", "lora": {"adapter": "peft"}}),
        {"model.path": "base", "model.lora.adapter": "peft"},
    ),
    "dpo": (recipe("dpo"), {"model.path": "base", "preference.reference": "base"}),
    "dpo, another reference": (
        recipe("dpo", preference={"reference": "ref"}),
        {"model.path": "base", "preference.reference": "ref"},
    ),
    "dpo, stored": (
        recipe("dpo", preference={"reference": "ref", "precompute": True}),
        {"model.path": "base", "preference.reference": "ref"},
    ),
    "distill": (
        recipe("distill", distill={"teacher": "large"}),
        {"model.path": "base", "distill.teacher": "large"},
    ),
    "ppo": (
        recipe(
            "ppo",
            critic={"path": "value"},
            reward={"model": ["one", "two"], "process": "steps"},
            algorithm={"kl": {"where": "reward", "reference": "ref"}},
        ),
        {
            "model.path": "base",
            "critic.path": "value",
            "algorithm.kl.reference": "ref",
            "reward.model.0": "one",
            "reward.model.1": "two",
            "reward.process": "steps",
        },
    ),
}


@pytest.mark.parametrize("name", ROLES)
def test_every_model_of_a_run_has_a_role(name: str) -> None:
    made, wanted = ROLES[name]
    assert model_paths(made) == wanted


@pytest.fixture
def folders(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("base", "value", "ref", "one", "two", "steps"):
        shutil.copytree(tiny_folder, tmp_path / name)
    return tmp_path


def fingerprints(made: Recipe) -> dict[str, Any]:
    return model_fingerprints(model_paths(made), lambda _: None)


@pytest.mark.parametrize("key", ROLES["ppo"][1])
def test_a_change_of_any_model_is_refused_unless_it_is_accepted(folders: Path, key: str) -> None:
    made, paths = ROLES["ppo"]
    before = fingerprints(made)
    file = folders / paths[key] / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    now = fingerprints(made)
    with pytest.raises(Refusal) as caught:
        refuse_changed_models(before, now, accepted=False)
    (problem,) = caught.value.problems
    assert problem.where == f"{key} {paths[key]}"
    assert refuse_changed_models(before, now, accepted=True) == {key: ["model.safetensors has other content"]}
    assert refuse_changed_models(now, now, accepted=False) == {}


def test_machines_with_other_weights_at_one_path_are_refused(folders: Path) -> None:
    first = fingerprints(recipe())
    (folders / "base" / "extra.safetensors").write_bytes(b"fetched by another program")
    refuse_unlike_machines([first, None, fingerprints(recipe())])
    (folders / "base" / "config.json").write_text("{}")
    with pytest.raises(Refusal, match=r"base \[not-shared\]: config\.json .*rank 2.* rank 0"):
        refuse_unlike_machines([first, None, fingerprints(recipe())])


def test_another_path_of_the_same_role_is_compared_by_content_where_there_are_fingerprints() -> None:
    before, now = recipe("dpo"), recipe("dpo", preference={"reference": "moved"})
    told = {key: {"path": "base", "files": {}} for key in model_paths(before)}
    (change,) = refuse_changed_recipe(state(before, told), resolved(now), model_paths(now))
    assert (change.key, change.before, change.now) == ("preference.reference", None, "moved")
    with pytest.raises(Refusal, match=r"preference\.reference"):
        refuse_changed_recipe(state(before), resolved(now), model_paths(now))


def test_another_number_of_reward_models_is_refused() -> None:
    before, now = recipe("grpo", reward={"model": "one"}), recipe("grpo", reward={"model": ["one", "two"]})
    told = {key: {"path": "one", "files": {}} for key in model_paths(before)}
    with pytest.raises(Refusal, match=r"reward\.model"):
        refuse_changed_recipe(state(before, told), resolved(now), model_paths(now))
    same = recipe("grpo", reward={"model": ["one"]})
    assert refuse_changed_recipe(state(before, told), resolved(same), model_paths(same))


def keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from keys(inner, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_every_key_that_changes_no_curve_may_change_on_resume() -> None:
    harmless = [key for key in keys(Recipe) if (effect := facts_of(key).effect) and effect.weight == "harmless"]
    assert "model.gradient_checkpointing" in harmless
    assert [key for key in harmless if not facts_of(key).resumable] == []


@pytest.mark.parametrize(
    ("optim", "steps", "told"),
    [
        ({}, 10, None),
        ({"lr": 2e-5}, 10, "step 5 has 1.2e-05 (without the change: 6e-06)"),
        ({"schedule": "constant"}, 10, "step 5 has 1e-05 (without the change: 6e-06)"),
        ({"warmup": 8}, 10, "step 5 has 6.25e-06 (without the change: 6e-06)"),
        ({}, 20, "step 5 has 8e-06 (without the change: 6e-06)"),
    ],
)
def test_what_other_keys_do_to_the_next_step(optim: dict[str, Any], steps: int, told: str | None) -> None:
    """By hand: linear from 1e-5 to 0, so step 5 of 10 has 6/10 of it and of 20 16/20; a warm-up of 8 has 5/8."""
    before = recipe(optim={"schedule": "linear"})
    now = recipe(optim={"schedule": "linear", **optim}, run={"steps": steps})
    found = learning_rate_changes(state(before), steps, now)
    assert (told is None and found == []) or (len(found) == 1 and told in found[0])


def test_the_rate_of_a_critic_is_told_too() -> None:
    before, now = recipe("ppo"), recipe("ppo", critic={"lr": 3e-5})
    (told,) = learning_rate_changes(state(before), 10, now)
    assert re.match("the critic's learning rate .*after step 4", told)
