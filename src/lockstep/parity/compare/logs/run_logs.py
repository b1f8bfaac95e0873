"""Readers of lockstep's run folders and of recordings made with `lockstep_record.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from lockstep.errors import Refusal
from lockstep.masking import masked_tree
from lockstep.parity.compare.logs.log_curves import Evidence, Points
from lockstep.parity.compare.logs.table_logs import json_lines, table_points
from lockstep.recipe.renamed_keys import stored_recipe
from lockstep.run.folder import RunFolder, read_object
from lockstep.run.metrics import read_metrics

MAX_SAMPLES = 20
# A recording contains its metadata and its curves.
_RECORDING, _CURVES = "tape.json", "metrics.jsonl"


def is_run_folder(path: Path) -> bool:
    folder = RunFolder(path)
    return folder.recipe.is_file() and folder.metrics.is_file()


def refuse_lost_metrics(path: Path) -> None:
    """Refuses a run folder without metrics.jsonl, because otherwise another file in the folder would be read as the
    log."""
    folder = RunFolder(path)
    if folder.recipe.is_file() and folder.checkpoints.is_dir() and not folder.metrics.exists():
        raise Refusal.at(
            folder.metrics,
            "is missing, and this file contains the curves of the run",
            "restore the file",
            code="missing-file",
        )


def run_points(path: Path) -> Points:
    file = RunFolder(path).metrics
    steps = read_metrics(file)
    if not steps:
        raise Refusal.at(file, "contains no step", "did the run stop before its first step?", code="no-steps")
    found = Points()
    for step, values in steps:
        found.add(step, values)
    return found


def recording_ranks(folder: Path) -> dict[int, Path]:
    """Returns the folders of a recording by rank, or an empty result if the folder is not a recording."""
    if _is_recording(folder):
        return {0: folder}
    inner = {path.name[5:]: path for path in folder.glob("rank_*")} if folder.is_dir() else {}
    return {int(rank): inner[rank] for rank in sorted(inner) if rank.isdigit() and _is_recording(inner[rank])}


def _is_recording(folder: Path) -> bool:
    try:
        values = json.loads((folder / _RECORDING).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and "recorder" in values


def recording_points(path: Path) -> Points:
    """Returns the curves of a recording. Each value is the mean over the ranks, at steps that all ranks recorded."""
    sides = []
    for folder in recording_ranks(path).values():
        file = folder / _CURVES
        if not file.is_file():
            raise Refusal.at(
                file, "is missing: no update was recorded", "did the run stop before its first update?", code="no-steps"
            )
        rows = json_lines(str(file), file.read_text(encoding="utf-8"))
        sides.append(table_points(str(file), rows).series())
    found = Points()
    for name in sides[0]:
        curves = [dict(zip(s[name].steps.tolist(), s[name].values.tolist(), strict=True)) for s in sides if name in s]
        shared = [step for step in curves[0] if len(curves) == len(sides) and all(step in one for one in curves)]
        for step in shared:
            found.add(step, {name: sum(one[step] for one in curves) / len(curves)})
    return found


def read_evidence(path: Path) -> Evidence:
    """Reads recipe, environment and first training samples of a run folder, of which only the recipe must exist."""
    folder = RunFolder(path)
    files = {folder.recipe: None, **{path: last for last, path in folder.earlier_recipes().items()}}
    try:
        recipes = {path: yaml.safe_load(path.read_text(encoding="utf-8")) for path in files}
    except (yaml.YAMLError, ValueError) as error:
        why = " ".join(str(error).split())
        raise Refusal.at(folder.recipe, f"is damaged: {why}", "restore the file", code="damaged-file") from None
    for file, content in recipes.items():
        if not isinstance(content, dict):
            raise Refusal.at(file, "contains no keys", "restore the file", code="damaged-file")
    env = read_object(folder.env) if folder.env.is_file() else {}
    # An earlier version of lockstep may have stored secrets in the run folder. Secrets must not appear in a report.
    recipes, env = {path: stored_recipe(masked_tree(recipe)) for path, recipe in recipes.items()}, masked_tree(env)
    earlier = {last: recipes[path] for path, last in files.items() if last is not None}
    return Evidence(recipes[folder.recipe], env, _samples(folder.samples), earlier)


def _samples(file: Path) -> list[dict[str, Any]]:
    """Reads the first training samples of samples.jsonl. An incomplete last line is skipped. Any other damaged line is
    refused."""
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
                why = f"cannot parse this line of the samples log: {line[:60]!r}"
                raise Refusal.at(
                    f"{file} line {number}", why, "restore the file, or remove the line", code="damaged-file"
                )
            if isinstance(sample, dict) and sample.get("kind") == "train":
                sample.pop("token_details", None)  # reports show only text
                found.append(sample)
            if len(found) == MAX_SAMPLES:
                break
    return found
