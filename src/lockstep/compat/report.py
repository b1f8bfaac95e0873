"""What became of every setting of a command, as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from lockstep.compat.table import Conversion, Fate, KeyTold
from lockstep.recipe.loader import value_text

_TITLES: dict[Fate, str] = {
    "taken": "taken over",
    "changed": "taken over with another meaning",
    "idle": "no effect here",
    "refused": "refused",
}
_WIDTH = 110


def report(done: Conversion) -> str:
    """All keys that the command sets by what became of them, then the defaults that are written out."""
    settings = done.settings
    method = f", method {done.recipe['method'].value}" if "method" in done.recipe else ""
    lines = [f"{settings.peer} {settings.program}{method}: {len(settings.given)} settings"]
    for fate, title in _TITLES.items():
        some = [told for told in done.told if told.fate == fate]
        if some:
            lines.append(f"{title} ({len(some)}):")
            lines += [line for told in some for line in _told(told, done)]
    unsaid = [key for key, written in done.recipe.items() if not settings.says(*written.sources)]
    if unsaid:
        lines.append(f"defaults of {settings.peer} that are not ours, written out ({len(unsaid)}):")
        lines += [f"  {key}: {value_text(done.recipe[key].value)}" for key in unsaid]
    lines += [line for remark in done.remarks for line in _folded(remark, "")]
    return "\n".join([*lines, f"on the devices of the command: {start(done)}"])


def start(done: Conversion, recipe: str = "RECIPE.yaml") -> str:
    """How the recipe is trained on as many devices as the command has."""
    devices, nodes = done.devices, done.nodes
    if devices * nodes == 1:
        return f"lockstep train {recipe}"
    more = f" --nnodes {nodes} --node-rank RANK --master-addr HOST" if nodes > 1 else ""
    return f"torchrun --nproc-per-node {devices}{more} -m lockstep train {recipe}"


def _told(told: KeyTold, done: Conversion) -> Iterator[str]:
    place = f"{told.given.where}: " if told.given.where else ""
    to = ", ".join(f"{key}: {value_text(done.recipe[key].value)}" for key in told.to)
    arrow = f" -> {to}" if to and told.fate in ("taken", "changed") else ""
    yield f"  {place}{done.settings.spelling(told.key)} = {value_text(told.given.value)}{arrow}"
    if told.note:
        yield from _folded(told.note, "      ")


def _folded(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent or "  ")
