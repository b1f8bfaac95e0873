"""Writes the model card of an exported model, with summary, curves and settings of its run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from lockstep.masking import masked_tree
from lockstep.recipe.renamed_keys import stored_recipe
from lockstep.run.folder import RunFolder
from lockstep.run.metrics import read_metrics

# Number of steps that are averaged at the start and at the end, because rewards of single steps are noisy.
ENDS = 5
AVERAGED = (("reward", "critic/score/mean"), ("divergence", "actor/reward_kl_penalty"))
SINGLE = (
    "train/loss",
    "val/loss",
    "val/pair_accuracy",
    "val/label_accuracy",
    "val/step_accuracy",
    "val/margin",
    "val/divergence",
    "val/accuracy",
)


def before_and_after(history: Sequence[tuple[int, dict[str, float]]]) -> list[tuple[str, str]]:
    """Returns table rows: the name of a metric, and its first and last value as `first -> last`."""
    rows = []
    for label, name in AVERAGED:
        values = _values(history, name)
        if len(values) > 1 and any(values):
            count = min(ENDS, len(values) // 2)
            first, last = (sum(part) / count for part in (values[:count], values[-count:]))
            over = f" (mean of {count} steps at either end)" if count > 1 else ""
            rows.append((label, f"{first:.4g} -> {last:.4g}{over}"))
    for name in SINGLE:
        values = _values(history, name)
        if len(values) > 1:
            rows.append((name, f"{values[0]:.4g} -> {values[-1]:.4g}"))
    return rows


def _values(history: Sequence[tuple[int, dict[str, float]]], name: str) -> list[float]:
    return [metrics[name] for _, metrics in history if name in metrics]


History = Sequence[tuple[int, dict[str, float]]]

# The metrics that the model card plots. metrics.jsonl has all metrics.
SHOWN = (
    "train/loss",
    "val/loss",
    "critic/score/mean",
    "val/accuracy",
    "val/reward",
    "val/pair_accuracy",
    "val/label_accuracy",
    "val/step_accuracy",
    "response_length/mean",
)
PANELS, WIDTH, HEIGHT, MARGIN = 4, 360, 200, 44
POINTS = 300
"""Maximum number of points of a curve. In longer curves, each point is the average of several steps."""


def curves_svg(history: History) -> str | None:
    """Returns an SVG with one panel per metric. Returns None if no metric was logged at least twice."""
    curves = {name: _points(history, name) for name in SHOWN}
    drawn = [(name, points) for name, points in curves.items() if len(points) > 1][:PANELS]
    if not drawn:
        return None
    columns = min(2, len(drawn))
    rows = -(-len(drawn) // columns)
    panels = "".join(
        f'<g transform="translate({WIDTH * (i % columns)},{HEIGHT * (i // columns)})">{_panel(name, points)}</g>'
        for i, (name, points) in enumerate(drawn)
    )
    width, height = WIDTH * columns, HEIGHT * rows
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11"><rect width="{width}" height="{height}" fill="#fff"/>{panels}</svg>\n'
    )


def _points(history: History, name: str) -> list[tuple[float, float]]:
    found = [(float(step), metrics[name]) for step, metrics in history if name in metrics]
    return [(step, value) for step, value in found if math.isfinite(value)]


def _panel(name: str, points: list[tuple[float, float]]) -> str:
    each = -(-len(points) // POINTS)
    parts = [points[i : i + each] for i in range(0, len(points), each)]
    shown = [tuple(sum(axis) / len(part) for axis in zip(*part, strict=True)) for part in parts]
    low, high = min(y for _, y in shown), max(y for _, y in shown)
    first, last = shown[0][0], shown[-1][0]
    across, up = (last - first) or 1.0, (high - low) or 1.0
    wide, tall = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
    places = " ".join(
        f"{MARGIN + wide * (x - first) / across:.1f},{MARGIN + tall * (1 - (y - low) / up):.1f}" for x, y in shown
    )
    mean = f" (mean of {each} steps)" if each > 1 else ""
    bottom, right = HEIGHT - MARGIN, WIDTH - MARGIN
    return (
        f'<text x="{MARGIN}" y="{MARGIN - 12}" font-weight="bold">{escape(name + mean)}</text>'
        f'<path d="M{MARGIN} {MARGIN}V{bottom}H{right}" fill="none" stroke="#999"/>'
        f'<text x="{MARGIN - 4}" y="{MARGIN + 8}" text-anchor="end">{high:.3g}</text>'
        f'<text x="{MARGIN - 4}" y="{bottom}" text-anchor="end">{low:.3g}</text>'
        f'<text x="{MARGIN}" y="{bottom + 14}">step {points[0][0]:.0f}</text>'
        f'<text x="{right}" y="{bottom + 14}" text-anchor="end">{points[-1][0]:.0f}</text>'
        f'<polyline points="{places}" fill="none" stroke="#1f6feb" stroke-width="1.5"/>'
    )


CARD, CURVES = "README.md", "curves.svg"
PACKAGES = ("torch", "transformers", "peft")
_REPORT = re.compile(r'<script type="application/json" id="comparison">(.*?)</script>', re.DOTALL)


def card_files(run: RunFolder, step: int, *, adapter: bool = False) -> dict[str, str]:
    """Returns the files of the model card: file name to content. Returns an empty dict if the run has no recipe."""
    if not run.recipe.is_file():
        return {}
    recipe = _stored_values(run.recipe)
    history = read_metrics(run.metrics) if run.metrics.exists() else []
    picture = curves_svg(history)
    lines = [*_head(recipe, adapter), *_title(run, recipe, step, history, adapter)]
    if picture is not None:
        lines += ["", f"![Curves of the run]({CURVES})"]
    env = run.read_env()
    lines += [*_results(history, step), *_data(env), *_comparisons(run), *_environment(env), *_recipes(run)]
    return {CARD: "\n".join(lines) + "\n", **({} if picture is None else {CURVES: picture})}


def _stored_values(recipe: Path) -> dict[str, Any]:
    text = recipe.read_text(encoding="utf-8")
    # The C loader is ten times as fast. Wheels of PyYAML include it.
    values: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return values


def _head(recipe: dict[str, Any], adapter: bool) -> list[str]:
    """Returns the metadata header that the Hugging Face hub reads."""
    metadata: dict[str, Any] = {"library_name": "peft" if adapter else "transformers"}
    base = str(recipe["model"]["path"])
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", base) and not Path(base).exists():
        metadata["base_model"] = base
    metadata["tags"] = ["lockstep", str(recipe["method"])]
    return ["---", yaml.safe_dump(metadata, sort_keys=False).strip(), "---"]


def _title(
    run: RunFolder, recipe: dict[str, Any], step: int, history: Sequence[tuple[int, Any]], adapter: bool
) -> list[str]:
    last = max((number for number, _ in history), default=step)
    what = "A LoRA adapter for" if adapter else "Trained from"
    format = recipe["model"].get("quantize") if adapter else None
    base = f" It was trained on the {format} weights of this model." if format else ""
    return [
        f"# {_cell(run.path.resolve().name)}",
        "",
        f"{what} `{_short(recipe['model']['path'])}` by lockstep, method `{recipe['method']}`: the weights after step "
        f"{step} of {last}.{base} The values below are from the files of the run.",
    ]


def _results(history: Sequence[tuple[int, dict[str, float]]], step: int) -> list[str]:
    # Metrics of steps after `step` are left out, because the exported weights are those of `step`.
    rows = [("", f"first and last, up to step {step}"), *before_and_after([one for one in history if one[0] <= step])]
    at = next((metrics for number, metrics in history if number == step), {})
    measured = [(name, f"{value:.6g}") for name, value in at.items() if name.startswith("val/")]
    return [*_table("What training changed", rows), *_table(f"Validation after step {step}", [("", ""), *measured])]


def _data(env: dict[str, Any]) -> list[str]:
    rows: list[tuple[str, ...]] = [("part", "file", "rows", "SHA-256")]
    data = env.get("data", {})
    for part in ("train", "val"):
        for source in data.get(part, []):
            for file in source.get("files", []):
                digest = f"`{str(file['sha256'])[:16]}`"
                if file["rows"] is None:
                    streamed = ("streamed", f"{digest} of the size, the start and the end of the file")
                    rows.append((part, _short(file["name"]), *streamed))
                else:
                    rows.append((part, _short(file["name"]), f"{file['rows']:,}", digest))
    kept = data.get("kept", {})
    counts = []
    if kept and "limit" not in kept:  # streamed rows are not counted
        counts = [f"\n{kept['rows']:,} rows with {kept['tokens']:,} tokens in all were used for training."]
    found = _table("Data", rows)
    return [*found, *counts] if found else []


def _comparisons(run: RunFolder) -> list[str]:
    """Returns the section about the last `lockstep compare A B` in which this run was B."""
    report = run.path / "report.html"
    found = _REPORT.search(report.read_text(encoding="utf-8", errors="replace")) if report.is_file() else None
    if found is None:
        return []
    try:
        result = json.loads(found[1])
        row = (Path(str(result["a"])).name, str(result["verdict"]), str(result["reason"]))
    except (ValueError, KeyError, TypeError):
        return []
    return _table("Comparison", [("with", "verdict", "reason"), row])


def _environment(env: dict[str, Any]) -> list[str]:
    device, packages = env.get("device", {}), env.get("packages", {})
    rows = [("", "")]
    rows += [("device", str(device.get("chip") or device.get("name")))] if device else []
    rows += [("processes", str(env["world_size"]))] if "world_size" in env else []
    rows += [("lockstep", str(env["lockstep"]))] if "lockstep" in env else []
    rows += [(name, str(packages[name])) for name in PACKAGES if packages.get(name)]
    rows += (
        [("initial weights", f"`{str(env['model']['weights'])[:16]}`")] if env.get("model", {}).get("weights") else []
    )
    return _table("Environment", rows)


def _recipes(run: RunFolder) -> list[str]:
    """Returns the section with the recipe, and the earlier recipes if the run was resumed with changed keys."""
    lines = ["", "## Recipe", "", "Folders in paths and hosts in addresses are omitted."]
    parts = [(f"Up to step {last}:", path) for last, path in run.earlier_recipes().items()]
    for title, path in [*parts, ("From there on:" if parts else "", run.recipe)]:
        values = _without_folders(masked_tree(stored_recipe(_stored_values(path))))
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        fence = "~" * (max(map(len, re.findall(r"~+", text)), default=0) + 4)
        lines += ["", *([title, ""] if title else []), f"{fence}yaml", text.rstrip(), fence]
    return lines


def _without_folders(value: Any) -> Any:
    """Removes folders and hosts from values, because a card may be published."""
    if isinstance(value, dict):
        return {name: _without_folders(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_folders(inner) for inner in value]
    if isinstance(value, str) and "://" in value:
        return f"{value.partition('://')[0]}://..."  # removes the host and credentials
    return _short(value) if isinstance(value, str) and value.startswith(("/", "~", "..")) else value


def _short(path: object) -> str:
    text = str(path)
    if not text.startswith(("/", "~", "..")):
        return _cell(text)
    # If the path is the folder `export` of a run, the result also contains the name of the run.
    parts = Path(text).parts
    return _cell("/".join(parts[-2:]) if parts[-1] == "export" and len(parts) > 1 else parts[-1])


def _table(title: str, rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a section with a table. Returns no lines if the table has only a header."""
    if len(rows) < 2:
        return []
    return ["", f"## {title}", "", *_lines(rows)]


def _lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for number, row in enumerate(rows):
        yield "| " + " | ".join(_cell(one) for one in row) + " |"
        if number == 0:
            yield "|" + " --- |" * len(row)


def _cell(text: str) -> str:
    """Escapes text for a Markdown table cell: removes line breaks, and escapes `|` and `<`."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
