"""Five steps of a migrated recipe by the real training loop, with the responses that another trainer is given.

The engine samples the responses. Each is then cut to a drawn length and gets a drawn score, so that lengths and rewards
differ as they do in a real run. What was trained on is handed to the other trainer, in a process of its own.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hang import HANG
from lockstep.recipe import Recipe
from lockstep.reward.row_rewards import shaped
from lockstep.run.console import Console
from lockstep.train import offline, online
from lockstep.train.experience import build_experience
from lockstep.train.models import Models
from lockstep.train.rollouts import Rollouts
from lockstep.types import Rollout, Score

STEPS, PROMPTS, EACH, LONGEST = 5, 4, 4, 12
Weights = dict[str, torch.Tensor]
SCORES = (1.0, 0.0, 0.5, -0.5, 1.5, 0.25)


@dataclass
class Trained:
    """The weights of each trained model before the first step and after every step, and what the steps were given."""

    weights: dict[str, list[Weights]] = field(default_factory=dict)
    steps: list[list[dict[str, Any]]] = field(default_factory=list)

    def note(self, models: Models) -> None:
        named = {"actor": models.learner, "critic": models.critic}
        for name, learner in named.items():
            if learner is not None:
                found = {_name(n): p.detach().clone() for n, p in learner.module.named_parameters()}
                self.weights.setdefault(name, []).append(found)


def _name(ours: str) -> str:
    """The name that transformers gives a weight."""
    first, rest = ours.split(".", 1)
    return {"model": rest, "decoder": f"model.{rest}", "head": f"score.{rest}"}[first]


def cut(rollouts: Rollouts, recipe: Recipe, draw: random.Random) -> Rollouts:
    def one(rollout: Rollout) -> Rollout:
        length = draw.randint(1, len(rollout.ids))
        score = Score(draw.choice(SCORES))
        ids, logprobs = rollout.ids[:length], rollout.logprobs[:length]
        return shaped(replace(rollout, ids=ids, logprobs=logprobs, loss_mask=(), score=score, stop="token"), recipe)

    return replace(rollouts, experience=build_experience([one(rollout) for rollout in rollouts.experience.rollouts]))


def given(rollout: Rollout) -> dict[str, Any]:
    assert isinstance(rollout.score, Score)
    names = {"prompt": rollout.prompt.ids, "response": rollout.ids, "logprobs": rollout.logprobs}
    return {**names, "score": rollout.score.total, "group": rollout.prompt_index}


def value_model(policy: Path, folder: Path) -> Path:
    """A folder with the policy's decoder and a drawn head, which both sides load."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1, dtype=torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder)
    return folder


def unsaved(recipe: Recipe) -> Recipe:
    """The recipe without checkpoints and without an export."""
    checkpoint = recipe.checkpoint.model_copy(update={"every": None})
    return recipe.model_copy(update={"checkpoint": checkpoint, "run": recipe.run.model_copy(update={"export": False})})


def train_online(recipe: Recipe) -> Trained:
    """Runs `lockstep train` on the recipe. Only the responses are changed, between the engine and the update."""
    trained, draw = Trained(), random.Random(7)
    take, step_of = online.Online.take_rollouts, online.train_step

    def taken(self: online.Online) -> Rollouts:
        return cut(take(self), recipe, draw)

    def stepped(rollouts: Rollouts, opened: online.Online, step: int) -> dict[str, float]:
        models = opened.training.models
        if step == 0:
            trained.note(models)
        trained.steps.append([given(rollout) for rollout in rollouts.experience.rollouts])
        metrics = step_of(rollouts, opened, step)
        trained.note(models)
        return metrics

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(online.Online, "take_rollouts", taken)
        patched.setattr(online, "train_step", stepped)
        online.train_online(unsaved(recipe), Console.silent())
    return trained


def train_offline(recipe: Recipe) -> Trained:
    """Runs `lockstep train` on the recipe of an offline method. The rows are those that the loader gives."""
    trained, step_of = Trained(), offline.train_step

    def stepped(rows: Any, opened: offline.Offline, step: int) -> dict[str, float]:
        models = opened.training.models
        if step == 0:
            trained.note(models)
        trained.steps.append(list(rows))
        metrics = step_of(rows, opened, step)
        trained.note(models)
        return metrics

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(offline, "train_step", stepped)
        offline.train_offline(unsaved(recipe), Console.silent())
    return trained


def other_trainer(program: str, folder: Path, jobs: dict[str, Any]) -> dict[str, dict[str, list[Weights]]]:
    """Runs a file of this folder as a program: it reads the jobs and writes the weights after every step of each."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(jobs, folder / "jobs.pt")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", f"migration.{program}", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return torch.load(folder / "weights.pt", weights_only=True)


def chosen(request: pytest.FixtureRequest) -> list[str]:
    """The cases of this module that pytest is going to run: one process trains all of them."""
    items = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    names = [item.callspec.params["name"] for item in items if hasattr(item, "callspec")]
    return list(dict.fromkeys(names))


def deviations(ours: list[Weights], theirs: list[Weights]) -> list[float]:
    """For every step: the norm of the difference of all weights, divided by the norm of the movement since the start.

    The first steps deviate most. Adam divides a gradient by its own size, so a weight whose gradient is nearly zero
    moves as far as any other, by the rounding of that gradient: one such weight can be nearly all of the deviation."""
    assert len(ours) == len(theirs) == STEPS + 1
    assert theirs[0].keys() - ours[0].keys() <= {"lm_head.weight"}, "a weight of theirs is not trained here"
    assert ours[0].keys() <= theirs[0].keys(), "a weight is trained here only"
    assert _norm(ours[0], theirs[0]) == 0.0, "the two sides start from other weights"
    pairs = zip(ours[1:], theirs[1:], strict=True)
    return [_deviation(mine, other, theirs[0]) for mine, other in pairs]


def _deviation(mine: Weights, other: Weights, first: Weights) -> float:
    """A learning rate of 0 moves no weight on either side."""
    moved = max(_norm(other, first), _norm(mine, first))
    return _norm(mine, other) / moved if moved else 0.0


def _norm(left: Weights, right: Weights) -> float:
    return float(sum(float((left[name].double() - right[name].double()).square().sum()) for name in left)) ** 0.5


def compared(name: str, ours: Trained, theirs: dict[str, list[Weights]]) -> dict[str, list[float]]:
    """The deviations of every trained model. They are kept for the documents, if a folder is named."""
    found = {part: deviations(ours.weights[part], theirs[part]) for part in theirs}
    if folder := os.environ.get("LOCKSTEP_EQUIVALENCE"):
        with (Path(folder) / "equivalence.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, **found}) + "\n")
    return found
