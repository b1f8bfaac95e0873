"""Converted scripts of public projects pass `--smoke` on the tiny model: each distinct recipe trains two steps.

What a script names and is not here is replaced: model and rows by `--smoke`, reward functions and servers by a function
that returns 1 for a digit. Recipes that differ only in sizes, rates and names are one case.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.commands.smoke import smoke_test
from lockstep.compat.conversion_output import checked
from lockstep.recipe.loader import checked_recipe, resolved
from real_scripts import RealScript, real_scripts, recorded

REWARD = """
def score(data_source, solution_str, ground_truth, extra_info=None, **arguments):
    return float(any(sign.isdigit() for sign in solution_str))
"""
# Keys that change only sizes, rates, names and places.
PLAIN = (
    "seed",
    "name",
    "folder",
    "path",
    "project",
    "every",
    "steps",
    "lr",
    "micro_batch_size",
    "tokens",
    "max_tokens",
)


def values_of(script: RealScript, folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = resolved(checked(script.convert()))
    values["device"] = "cpu"
    reward = values.get("reward") or {}
    if reward.get("function") or reward.get("remote"):
        (folder / "stand_in.py").write_text(REWARD, encoding="utf-8")
        reward.update(function=f"{folder / 'stand_in.py'}:score", remote=None)
    return values


def kind(value: Any) -> Any:
    """The recipe without numbers of sizes and rates: words, switches and whether a number is zero remain."""
    if isinstance(value, dict):
        return {key: kind(inner) for key, inner in value.items() if key not in PLAIN}
    if isinstance(value, list):
        return [kind(inner) for inner in value[:1]]
    return value if isinstance(value, str | bool | None) else value != 0


def named_files(values: dict[str, Any]) -> bool:
    """Whether the recipe needs tools or an environment of the project, which are not here."""
    rollout = values.get("rollout") or {}
    return bool(rollout.get("tools") or rollout.get("environment"))


@pytest.mark.slow
def test_each_distinct_recipe_trains_two_steps(tmp_path: Path) -> None:
    seen: set[str] = set()
    failed = []
    for name, script in real_scripts().items():
        if recorded()[name] != "converted":
            continue
        values = values_of(script, tmp_path)
        key = json.dumps(kind({**values, "data": {}, "run": {}, "log": {}, "checkpoint": {}}), sort_keys=True)
        if key in seen or named_files(values):
            continue
        seen.add(key)
        try:
            smoke_test(checked_recipe(values))
        except Exception as error:  # noqa: BLE001  # all failures are listed
            failed.append(f"{name}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)
    assert len(seen) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("program", ["train_sft", "train_ppo_ray"])
def test_a_script_of_openrlhf_passes(program: str, tmp_path: Path) -> None:
    scripts = [one for one in real_scripts().values() if one.program == program and recorded()[one.name] == "converted"]
    smoke_test(checked_recipe(values_of(scripts[0], tmp_path)))
