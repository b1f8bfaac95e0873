"""The figure of docs/vision.md shows the tokens of a real row."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_figure_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make docs` writes it."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    assert import_module("vision_figure").figure() + "\n" == (ROOT / "docs" / "vision-tokens.svg").read_text("utf-8")
