"""A run folder stands for the model it exported."""

from __future__ import annotations

from pathlib import Path

from lockstep.errors import Refusal


def model_folder(path: str) -> str:
    """The Hugging Face folder behind `path`, which may be a run folder."""
    folder = Path(path)
    if (folder / "config.json").is_file() or not (folder / "recipe.yaml").is_file():
        return path
    if (folder / "export" / "config.json").is_file():
        return str(folder / "export")
    raise Refusal.at(path, "this run has not exported its model yet", f"lockstep export {path} DIR")
