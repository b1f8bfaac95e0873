"""Parts of pages: elements, numbers, curves, axes and the look. For the page of a comparison and the one of runs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

SCRIPTS = ("elements.js", "numbers.js", "series.js", "paths.js", "axes.js", "pointer.js")
STYLES = ("base.css",)


def script_of(folder: str, names: Sequence[str]) -> str:
    """The scripts of a page behind those that all share; `folder` is a package whose folder `page` has them. What they
    name is visible inside of the page's script alone."""
    parts = [*(resource("lockstep", name) for name in SCRIPTS), *(resource(folder, name) for name in names)]
    return '(() => {\n"use strict";\n' + "\n".join(parts) + "\n})();\n"


def style_of(folder: str, names: Sequence[str]) -> str:
    """The style of a page behind the one that all share."""
    return "\n".join([*(resource("lockstep", name) for name in STYLES), *(resource(folder, name) for name in names)])


def resource(folder: str, name: str) -> str:
    return (files(folder) / "page" / name).read_text(encoding="utf-8")
