"""Our own run folders: metrics, and the evidence beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from lockstep.errors import Refusal
from lockstep.parity.compare.log import Evidence
from lockstep.parity.compare.logs.curves import Points
from lockstep.run.folder import RunFolder
from lockstep.run.metrics import read_metrics

SAMPLES = 20


def is_run_folder(path: Path) -> bool:
    folder = RunFolder(path)
    return folder.recipe.is_file() and folder.metrics.is_file()


def points(path: Path) -> Points:
    file = RunFolder(path).metrics
    try:
        steps = read_metrics(file)
    except (TypeError, ValueError) as error:
        raise Refusal.at(str(file), f"a value is not a number: {error}", "restore the file") from None
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
        env = json.loads(folder.env.read_text(encoding="utf-8")) if folder.env.is_file() else {}
    except (yaml.YAMLError, ValueError) as error:
        why = " ".join(str(error).split())
        raise Refusal.at(str(path), f"its recipe or env.json is damaged: {why}", "restore the file") from None
    for file, content in (*recipes.items(), (folder.env, env)):
        if not isinstance(content, dict):
            raise Refusal.at(str(file), "holds no keys", "restore the file")
    earlier = {last: recipes[path] for path, last in files.items() if last is not None}
    return Evidence(recipes[folder.recipe], env, _samples(folder.samples), earlier)


def _samples(file: Path) -> list[dict[str, Any]]:
    """The first lines of training; one that is cut short ends them."""
    if not file.is_file():
        return []
    found: list[dict[str, Any]] = []
    with file.open(encoding="utf-8", errors="replace") as text:
        for line in text:
            try:
                sample = json.loads(line)
            except ValueError:
                break
            if isinstance(sample, dict) and sample.get("kind") == "train":
                found.append(sample)
            if len(found) == SAMPLES:
                break
    return found
