"""The web pages of the run viewer and of a comparison report, built from the files of this folder."""

from __future__ import annotations

from importlib.resources import files

SCRIPTS = {
    "viewer": ("state", "curves", "samples", "recipe", "page"),
    "compare": ("chart", "page"),
}


def script_of(page: str) -> str:
    """Returns the JavaScript of a page: shared and page-specific files, joined in one function scope."""
    names = ["elements", "chart", *(f"{page}_{name}" for name in SCRIPTS[page])]
    parts = [resource(f"{name}.js") for name in names]
    return '(() => {\n"use strict";\n' + "\n".join(parts) + "\n})();\n"


def style_of(page: str) -> str:
    return resource("base.css") + "\n" + resource(f"{page}.css")


def resource(name: str) -> str:
    return (files("lockstep.page") / name).read_text(encoding="utf-8")
