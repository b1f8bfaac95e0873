"""`lockstep eval` on rows that are judged rather than answered: pairs and rankings, and the steps of solutions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.algorithms.process import good_probability
from lockstep.algorithms.reduce import sum_by
from lockstep.data.read import RowSet
from lockstep.data.updates import Update, even_groups
from lockstep.device.base import Device
from lockstep.errors import Refusal
from lockstep.evaluate.rows import GROUP, measure
from lockstep.methods import METHODS
from lockstep.model.heads import load_value_model
from lockstep.model.load import load_config, load_policy, load_tokenizer
from lockstep.model.policy import Policy
from lockstep.parallel.world import World
from lockstep.recipe import Recipe
from lockstep.recipe.schema import Model
from lockstep.reward.process import PROCESS, read_judging
from lockstep.run.progress import Console
from lockstep.train.models import Models, Packing
from lockstep.train.prepare import shared_and_moving
from lockstep.types import Item, Steps

TOKENS = 8192


def kind_of(folder: str, rows: RowSet) -> str | None:
    """What the model and the rows ask for: the method whose rows these are; None for questions to answer."""
    if (Path(folder) / PROCESS).is_file():
        return "prm"
    if any(name.endswith("ForSequenceClassification") for name in load_config(folder).architectures or []):
        return "rm"
    return "dpo" if {"chosen", "rejected"} <= set(rows.columns) else None


def score_rows(
    method: str,
    folder: str,
    data: str,
    rowset: RowSet,
    *,
    rows: int | None,
    reference: str | None,
    out: Path | None,
    dtype: str,
    device: Device,
    world: World,
    console: Console,
) -> dict[str, float]:
    """The method's metrics over the rows, without its loss's settings; every row's numbers go to `out`."""
    if reference is not None and method != "dpo":
        raise Refusal.at("--reference", "only a language model's preference is measured against one", "remove it")
    recipe = _recipe(method, folder, data, dtype, reference)
    tokenizer, config = load_tokenizer(folder), load_config(folder)
    limit = getattr(config, "max_position_embeddings", None) or 2**31
    with console.task("Encoding rows", len(rowset)) as task:
        read = METHODS[recipe.method].reader(recipe)
        found = read(recipe.data.train, recipe.data, tokenizer, limit, task.advance, [rowset])
    for note in found.notes:
        console.say(note)
    items = found.items[:rows]
    torch_device = device.torch_device(world.local_rank)
    module = _load(recipe, folder, device, torch_device)
    standard = None if reference is None else _load(recipe, reference, device, torch_device)
    assert standard is None or isinstance(standard, Policy)
    longest = max(len(example) for example in found.examples)
    tokens = max(TOKENS, 2 * longest * max(len(i.examples) for i in items))
    configs = [config, *([] if reference is None else [load_config(reference)])]
    # Padded rows share no beginning, so each of their sequences has positions of its own.
    padded = bool(shared_and_moving(found, *configs))
    packing = Packing(world, None if padded else tokens, max(1, tokens // longest // 2) if padded else None, 0)
    models = Models(module, packing, torch_device, reference=standard, longest=longest)
    metrics = measure(items, METHODS[recipe.method].objective(recipe), models)
    del metrics["loss"]  # of settings that nobody chose
    if out is not None:
        lines = [line for group in even_groups(items, GROUP) for line in _lines(method, group, models)]
        if world.main:
            out.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return {"rows": float(len(items)), **metrics}


def _recipe(method: str, folder: str, data: str, dtype: str, reference: str | None) -> Recipe:
    values: dict[str, Any] = {
        "method": method if method != "dpo" or reference else "cpo",
        "model": {"path": folder, "dtype": dtype},
        "data": {"train": data, "require_end": False},
    }
    if method == "prm":
        values["prm"] = read_judging(Path(folder))
    elif method == "dpo":
        # Without a reference, mean log-probabilities: sums would prefer whatever is shorter.
        values["preference"] = {"beta": 1.0} if reference else {"loss": "cpo", "beta": 1.0, "average": True}
    return Recipe.model_validate(values)


def _load(recipe: Recipe, folder: str, device: Device, torch_device: torch.device) -> nn.Module:
    settings = Model(path=folder, dtype=recipe.model.dtype)
    if METHODS[recipe.method].model == "value":
        return load_value_model(settings, folder, torch_device, device.attention, 0, key="MODEL")
    return load_policy(settings, torch_device, device.attention, seed=0)


def _lines(method: str, items: Sequence[Item], models: Models) -> list[dict[str, Any]]:
    """A line for each row: the scores of its responses, or the probability that each step is good."""
    update = models.arrange(items)
    if method == "rm":
        scores_S = models.over_targets(models.module, update, lambda values: values)
    elif method == "prm":
        return _step_lines(items, models.logprobs(update))
    else:
        scores_S = _sums(update, models.logprobs(update))
        if models.reference is not None:
            scores_S = scores_S - _sums(update, models.reference_logprobs(update))
        else:
            scores_S = scores_S / update.lengths_S
    shares = scores_S.split([len(item.examples) for item in items])
    return [{"row": str(i.origin), "scores": share.tolist()} for i, share in zip(items, shares, strict=True)]


def _step_lines(items: Sequence[Item], logprobs_K: torch.Tensor) -> list[dict[str, Any]]:
    lines = []
    solutions = [item for item in items if isinstance(item, Steps)]
    for item, share in zip(solutions, logprobs_K.split([i.example.targets for i in solutions]), strict=True):
        good = good_probability(share.view(len(item.labels), -1)).tolist()
        lines.append({"row": str(item.origin), "steps": good, "labels": [label[0] for label in item.labels]})
    return lines


def _sums(update: Update[Any], values_K: torch.Tensor) -> torch.Tensor:
    return sum_by(values_K, update.sequence_K, len(update.examples))
