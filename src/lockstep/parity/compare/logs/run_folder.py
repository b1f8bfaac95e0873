"""Our own run folders: metrics, and the evidence beside them. Also recordings, which `lockstep_record.py` makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from lockstep.errors import Refusal
from lockstep.masking import masked_tree
from lockstep.parity.compare.log import Evidence
from lockstep.parity.compare.logs import table
from lockstep.parity.compare.logs.curves import Points
from lockstep.run.folder import RunFolder, read_object
from lockstep.run.metrics import read_metrics

SAMPLES = 20
# Of a recording: what says that it is one, and its curves.
RECORDED, CURVES = "tape.json", "metrics.jsonl"


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


def ranks_of(folder: Path) -> dict[int, Path]:
    """The tapes of a recording by rank; empty where the folder is none."""
    if _is_recorded(folder):
        return {0: folder}
    inner = {path.name[5:]: path for path in folder.glob("rank_*")} if folder.is_dir() else {}
    return {int(rank): inner[rank] for rank in sorted(inner) if rank.isdigit() and _is_recorded(inner[rank])}


def _is_recorded(folder: Path) -> bool:
    try:
        values = json.loads((folder / RECORDED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and "recorder" in values


def recorded_points(path: Path) -> Points:
    """The curves of a recording: of several ranks the means, at the steps that all of them have."""
    sides = []
    for folder in ranks_of(path).values():
        file = folder / CURVES
        if not file.is_file():
            raise Refusal.at(file, "is missing: no update was recorded", "was the run cut off at once?")
        rows = table.json_lines(str(file), file.read_text(encoding="utf-8"))
        sides.append(table.points(str(file), rows).series())
    found = Points()
    for name in sides[0]:
        curves = [dict(zip(s[name].steps.tolist(), s[name].values.tolist(), strict=True)) for s in sides if name in s]
        shared = [step for step in curves[0] if len(curves) == len(sides) and all(step in one for one in curves)]
        for step in shared:
            found.add(step, {name: sum(one[step] for one in curves) / len(curves)})
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
