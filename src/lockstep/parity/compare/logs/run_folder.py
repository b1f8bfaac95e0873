"""Our own run folders: metrics, and the evidence beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from lockstep.errors import Refusal
from lockstep.masking import masked_tree
from lockstep.parity.compare.log import Evidence
from lockstep.parity.compare.logs.curves import Points
from lockstep.run.folder import RunFolder, read_object
from lockstep.run.metrics import read_metrics

SAMPLES = 20


def is_run_folder(path: Path) -> bool:
    folder = RunFolder(path)
    return folder.recipe.is_file() and folder.metrics.is_file()


def refuse_lost_metrics(path: Path) -> None:
    """Refuse a run folder without its metrics: something else in it would be read as a log."""
    folder = RunFolder(path)
    if folder.recipe.is_file() and folder.checkpoints.is_dir() and not folder.metrics.exists():
        raise Refusal.at(folder.metrics, "is missing, and with it the curves of the run", "restore the file")


def points(path: Path) -> Points:
    file = RunFolder(path).metrics
    steps = read_metrics(file)
    if not steps:
        raise Refusal.at(file, "holds no step", "was the run cut off at once?")
    found = Points()
    for step, values in steps:
        found.add(step, values)
    return found


def evidence(path: Path) -> Evidence:
    """Recipe and environment of the run, and its first training samples. Only the recipe must be there."""
    folder = RunFolder(path)
    files = {folder.recipe: None, **{path: last for last, path in folder.earlier_recipes().items()}}
    try:
        recipes = {path: yaml.safe_load(path.read_text(encoding="utf-8")) for path in files}
    except (yaml.YAMLError, ValueError) as error:
        why = " ".join(str(error).split())
        raise Refusal.at(folder.recipe, f"is damaged: {why}", "restore the file") from None
    for file, content in recipes.items():
        if not isinstance(content, dict):
            raise Refusal.at(file, "holds no keys", "restore the file")
    env = read_object(folder.env) if folder.env.is_file() else {}
    # An earlier version may have stored secrets; they must not reach a report.
    recipes, env = {path: masked_tree(recipe) for path, recipe in recipes.items()}, masked_tree(env)
    earlier = {last: recipes[path] for path, last in files.items() if last is not None}
    return Evidence(recipes[folder.recipe], env, _samples(folder.samples), earlier)


def _samples(file: Path) -> list[dict[str, Any]]:
    """The first lines of training; a last one that a kill cut short is left out, any other damage is refused."""
    if not file.is_file():
        return []
    found: list[dict[str, Any]] = []
    with file.open(encoding="utf-8", errors="replace") as text:
        for number, line in enumerate(text, start=1):
            try:
                sample = json.loads(line)
            except ValueError:
                sample = None
            if not isinstance(sample, dict) and line.endswith("\n"):
                why = f"not a line of this log: {line[:60]!r}"
                raise Refusal.at(f"{file} line {number}", why, "restore the file, or remove the line")
            if isinstance(sample, dict) and sample.get("kind") == "train":
                sample.pop("token_details", None)  # a page and a table of evidence show responses, not tokens
                found.append(sample)
            if len(found) == SAMPLES:
                break
    return found
