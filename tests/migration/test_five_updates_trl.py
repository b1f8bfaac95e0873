"""Recipes against TRL's trainers: five steps of GRPO, DPO, KTO and reward models, on the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conftest import REWARD, question_rows, write_jsonl
from hand_rollouts import recipe_of
from lockstep.algorithms import advantage, divergence
from lockstep.recipe import Recipe
from lockstep.types import Example, ScoredExample

from .five_updates import (
    EACH,
    LONGEST,
    PROMPTS,
    STEPS,
    Trained,
    chosen,
    compared,
    other_trainer,
    train_offline,
    train_online,
    value_model,
)

pytestmark = pytest.mark.peers

ROWS = 8
OURS: dict[str, Any] = {
    "optim__lr": 1e-3,
    "optim__betas": [0.9, 0.99],
    "optim__eps": 1e-8,
    "optim__weight_decay": 0.1,
    "optim__schedule": "constant",
    "optim__clip": 1.0,
    "model__dtype": "fp32",
}
THEIRS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "adam_beta1": 0.9,
    "adam_beta2": 0.99,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.1,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1.0,
    "warmup_steps": 0,
}
GRPO: dict[str, Any] = {
    "num_generations": EACH,
    "num_iterations": 2,
    "beta": 0.1,
    "max_completion_length": LONGEST,
    "use_bias_correction_kl": False,
}
# TRL has no third bound.
KL = {
    "algorithm__dual_clip": None,
    "algorithm__kl__where": "loss",
    "algorithm__kl__coefficient": 0.1,
    "algorithm__kl__estimator": "k3",
}
# The method, our settings, and TRL's for the same.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "GRPO": ("grpo", {**KL, "algorithm__aggregation": "seq_mean_token_mean"}, {**GRPO, "loss_type": "grpo"}),
    "GRPO, mean over tokens": ("grpo", KL, {**GRPO, "loss_type": "bnpo"}),
    "GRPO, our deviation": ("grpo", KL, {**GRPO, "loss_type": "bnpo"}),
    "DPO": ("dpo", {"preference__beta": 0.2}, {"beta": 0.2}),
    # TRL's IPO takes means of log-probabilities.
    "IPO": (
        "dpo",
        {"preference__beta": 0.2, "preference__loss": "ipo", "preference__average": True},
        {"beta": 0.2, "loss_type": "ipo"},
    ),
    "KTO": ("kto", {"preference__beta": 0.2}, {"beta": 0.2}),
    "KTO, weights": (
        "kto",
        {"preference__beta": 0.2, "preference__desirable": 1.3},
        {"beta": 0.2, "desirable_weight": 1.3},
    ),
    "RM": ("rm", {"rm__center_rewards_coef": 0.01}, {"center_rewards_coefficient": 0.01}),
    "linear schedule": ("dpo", {"optim__schedule": "linear"}, {"lr_scheduler_type": "linear"}),
}
# The same rows, but another setting on TRL's side.
WRONG: dict[str, dict[str, Any]] = {
    "weight decay": {"weight_decay": 0.0},
    "betas": {"adam_beta2": 0.9},
    "gradient clip": {"max_grad_norm": 0.1},
    "warm-up": {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2},
    "schedule": {"lr_scheduler_type": "linear"},
    "beta": {"beta": 0.25},
}
WITHIN = 5e-4
Runs = dict[str, tuple[Trained, dict[str, Any]]]


def recipe_for(name: str, model: Path, folder: Path) -> Recipe:
    method, ours, _ = CASES[name]
    common = {**OURS, "run__folder": str(folder / "runs"), "run__steps": STEPS, **ours}
    if method == "grpo":
        (folder / "reward.py").write_text(REWARD, encoding="utf-8")
        rows = write_jsonl(folder / "rows.jsonl", question_rows(PROMPTS * STEPS))
        more = {
            "batch__prompts": PROMPTS,
            "rollout__n": EACH,
            "rollout__max_tokens": LONGEST,
            "algorithm__epochs": 2,
            "reward__function": f"{folder / 'reward.py'}:letters",
        }
    else:
        rows, more = write_jsonl(folder / "rows.jsonl", rows_of(method)), {"batch__rows_per_update": ROWS}
    return recipe_of(str(model), method, data__train=str(rows), **more, **common)


def online(name: str, recipe: Recipe) -> Trained:
    """TRL adds 1e-4 to the deviation of a group's scores, lockstep and verl 1e-6. Only TRL has no bound of k3."""
    with pytest.MonkeyPatch.context() as patched:
        if name != "GRPO, our deviation":
            patched.setattr(advantage, "STD_FLOOR", 1e-4)
            patched.setattr(divergence, "K3_BOUND", float("inf"))
        return train_online(recipe)


def rows_of(method: str) -> list[dict[str, Any]]:
    """Pairs, or single responses with a verdict. No two rows have the same prompt."""
    pairs = [(f"{'so ' * (i % 4)}{i}+{i}?", str(2 * i) * (1 + i % 3), f"no {i}") for i in range(ROWS * STEPS)]
    if method == "kto":
        return [
            {"prompt": p, "completion": (good, bad)[i % 2], "label": i % 2 == 0}
            for i, (p, good, bad) in enumerate(pairs)
        ]
    return [{"prompt": prompt, "chosen": good, "rejected": bad} for prompt, good, bad in pairs]


def divided(example: Example) -> tuple[list[int], list[int]]:
    """The prompt and the trained tokens. What the template writes after the end token is not trained."""
    first, end = example.loss_mask.index(1), len(example.ids) - example.loss_mask[::-1].index(1)
    assert all(example.loss_mask[first:end])
    return list(example.ids[:first]), list(example.ids[first:end])


def judged(example: Example) -> list[int]:
    """The tokens up to that at which a reward model's score is read."""
    assert isinstance(example, ScoredExample)
    return list(example.ids[: example.positions[-1] + 1])


def encoded(method: str, step: list[Any]) -> list[dict[str, Any]]:
    """The rows of an update with the columns of TRL's collators."""
    if method == "grpo":
        return step
    if method == "rm":
        return [{"chosen_ids": judged(i.examples[0]), "rejected_ids": judged(i.examples[1])} for i in step]
    if method == "dpo":
        halves = [(divided(item.examples[0]), divided(item.examples[1])) for item in step]
        return [{"prompt_ids": one[0], "chosen_ids": one[1], "rejected_ids": other[1]} for one, other in halves]
    # TRL pairs a prompt with the response of the row before it, lockstep with that of the row after it.
    rows = [(*divided(item.example), item.desirable) for item in reversed(step)]
    return [
        {"prompt_ids": prompt, "completion_ids": response, "KL_completion_ids": rows[i - 1][1], "label": label}
        for i, (prompt, response, label) in enumerate(rows)
    ]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    ours: dict[str, Trained] = {}
    judge = value_model(tiny_folder, tmp_path_factory.mktemp("judge"))

    def job(name: str, more: dict[str, Any]) -> dict[str, Any]:
        method, _, theirs = CASES[name]
        model = judge if method == "rm" else tiny_folder
        if name not in ours:
            recipe = recipe_for(name, model, tmp_path_factory.mktemp("case"))
            ours[name] = online(name, recipe) if method == "grpo" else train_offline(recipe)
        steps = [encoded(method, step) for step in ours[name].steps]
        settings = {**THEIRS, **theirs, **more}
        return {
            "kind": method,
            "model": str(model),
            "settings": settings,
            "steps": steps,
            "each": 1 + (method == "grpo"),
        }

    wanted = chosen(request)
    jobs = {name: job(name, {}) for name in wanted if name in CASES}
    for name in [name for name in wanted if name in WRONG]:
        jobs[name] = job("DPO", WRONG[name])
        ours[name] = ours["DPO"]
    theirs = other_trainer("trl_trainers", tmp_path_factory.mktemp("trl"), jobs)
    return {name: (ours[name], theirs[name]) for name in jobs}


@pytest.mark.parametrize("name", CASES)
def test_five_steps_are_trls(name: str, runs: Runs) -> None:
    found = compared(f"TRL, {name}", *runs[name])
    most = max(max(one) for one in found.values())
    if name == "GRPO, our deviation":
        assert WITHIN < most < 5e-3, found
    else:
        assert most <= WITHIN, found


@pytest.mark.parametrize("name", WRONG)
def test_another_setting_is_noticed(name: str, runs: Runs) -> None:
    found = compared(f"TRL, wrong {name}", *runs[name])
    assert max(found["actor"]) > 4 * WITHIN, found
