"""`lockstep eval` on rows that are judged rather than answered: pairs and rankings, and the steps of solutions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.data.read import RowSet
from lockstep.data.updates import even_groups, row_sizes
from lockstep.device.base import Device
from lockstep.errors import Problem, Refusal
from lockstep.evaluate.validation import GROUP, measure
from lockstep.methods import METHODS
from lockstep.model.heads import load_value_model
from lockstep.model.load import load_config, load_policy, load_tokenizer
from lockstep.model.policy import Policy
from lockstep.parallel.world import World
from lockstep.preflight.prepare import shared_and_moving
from lockstep.recipe import Recipe
from lockstep.recipe.methods import reference_kind
from lockstep.recipe.schema import Model
from lockstep.reward.process import PROCESS, read_judging
from lockstep.run.console import Console
from lockstep.train.models import Models, Packing

TOKENS = 8192


def rows_recipe(folder: str, data: str, rows: RowSet, dtype: str, reference: str | None) -> Recipe | None:
    """The recipe of the method that judges these rows with this model; None for questions to answer."""
    values: dict[str, Any]
    if (Path(folder) / PROCESS).is_file():
        values = {"method": "prm", "prm": read_judging(Path(folder))}
    elif any(name.endswith("ForSequenceClassification") for name in load_config(folder).architectures or []):
        values = {"method": "rm"}
    elif not {"chosen", "rejected"} <= set(rows.columns):
        return None
    elif reference is not None:
        values = {"method": "dpo", "preference": {"beta": 1.0}}
    else:
        # Without a reference, mean log-probabilities: sums would prefer whatever is shorter.
        values = {"method": "cpo", "preference": {"loss": "cpo", "beta": 1.0, "average": True}}
    values |= {"model": {"path": folder, "dtype": dtype}, "data": {"train": data, "require_end": False}}
    recipe = Recipe.model_validate(values)
    if reference is not None and reference_kind(recipe) == "none":
        raise Refusal.at("--reference", "only a language model's preference is measured against one", "remove it")
    return recipe


def score_rows(
    recipe: Recipe,
    rowset: RowSet,
    *,
    rows: int | None,
    reference: str | None,
    out: Path | None,
    device: Device,
    world: World,
    console: Console,
) -> dict[str, float]:
    """The method's metrics over the rows, without its loss's settings; every row's numbers go to `out`."""
    method, folder = METHODS[recipe.method], recipe.model.path
    tokenizer, config = load_tokenizer(folder), load_config(folder)
    limit = getattr(config, "max_position_embeddings", None) or 2**31
    with console.task("Encoding rows", len(rowset)) as task:
        read = method.reader(recipe)
        try:
            found = read(recipe.data.train, recipe.data, tokenizer, limit, task.advance, [rowset])
        except Refusal as refusal:
            raise _without_keys(refusal) from refusal
    for note in found.notes:
        console.say(note)
    items = found.items[:rows]
    torch_device = device.torch_device(world.local_rank)
    module = _load(recipe, folder, device, torch_device)
    standard = None if reference is None else _load(recipe, reference, device, torch_device)
    assert standard is None or isinstance(standard, Policy)
    longest = int(row_sizes(found.items, packed=False).max())
    tokens = max(TOKENS, 2 * longest * max(len(i.examples) for i in items))
    configs = [config, *([] if reference is None else [load_config(reference)])]
    # Padded rows share no beginning, so each of their sequences has positions of its own.
    padded = bool(shared_and_moving(found, *configs))
    packing = Packing(world, None if padded else tokens, max(1, tokens // longest // 2) if padded else None, 0)
    models = Models(module, packing, torch_device, reference=standard, longest=longest)
    metrics = measure(items, method.objective(recipe), models)
    del metrics["loss"]  # of settings that nobody chose
    if out is not None:
        assert method.scores is not None
        lines = [line for group in even_groups(items, GROUP) for line in method.scores(group, models)]
        if world.main:
            out.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return {"rows": float(len(items)), **metrics}


def _without_keys(refusal: Refusal) -> Refusal:
    """There is no recipe whose keys could name the columns."""
    rename = "rename its columns: the page on data lists the names that are found"
    return Refusal([Problem(p.where, p.why, rename if "data." in p.remedy else p.remedy) for p in refusal.problems])


def _load(recipe: Recipe, folder: str, device: Device, torch_device: torch.device) -> nn.Module:
    settings = Model(path=folder, dtype=recipe.model.dtype)
    if METHODS[recipe.method].model == "value":
        return load_value_model(settings, folder, torch_device, device.attention, 0, key="MODEL")
    return load_policy(settings, torch_device, device.attention, seed=0)
