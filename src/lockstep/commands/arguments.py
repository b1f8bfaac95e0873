"""Arguments of commands, most of them shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def recipe_names(incomplete: str) -> list[str]:
    """Completes built-in recipes, folders and YAML files that start with the typed text."""
    from glob import escape, glob

    built_in = [file.stem for file in (Path(__file__).parents[1] / "recipes").glob("*.yaml")]
    paths = [name for end in ("*/", "*.yaml", "*.yml") for name in glob(escape(incomplete) + end)]
    return sorted([*(name for name in built_in if name.startswith(incomplete)), *paths])


RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="A YAML file, or the name of a built-in recipe.", autocompletion=recipe_names
    ),
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to override.")]
ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A model folder, a run, a checkpoint, an adapter, a GGUF file, a hub name."),
]
PromptKey = Annotated[str | None, typer.Option(metavar="COLUMN", help="Column of the prompts [detected by name].")]
LabelKey = Annotated[str | None, typer.Option(metavar="COLUMN", help="Column of the ground truth [detected by name].")]
ScriptWords = Annotated[
    list[str] | None,
    typer.Argument(metavar="[NAME=VALUE]...", help="Shell variables and arguments to run the script with."),
]
Verify = Annotated[
    bool, typer.Option("--verify", help="Print what becomes of every key and of every default that differs.")
]
VerifyJson = Annotated[bool, typer.Option("--json", help="Print the table of --verify as JSON.")]
PeerVersion = Annotated[
    str | None,
    typer.Option(metavar="VERSION", help="Release that the script is written for, such as 0.5; else its keys decide."),
]
EnvironmentOption = Annotated[
    str | None,
    typer.Option(metavar="FILE.py:CLASS", help="Environment that the model has a conversation with."),
]
EnvironmentArguments = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="Argument of the environment or of the agent; may be repeated."),
]
AgentOption = Annotated[
    str | None,
    typer.Option(metavar="FILE.py:NAME", help="Agent that talks to the model over OpenAI's API, or command:PROGRAM."),
]
ToolOption = Annotated[
    list[str] | None, typer.Option(metavar="FILE.py:NAME", help="Tool that the model may call; may be repeated.")
]
MaxTurns = Annotated[int | None, typer.Option(min=1, help="Maximum turns of the model in a conversation [16].")]


def named_value(words: str, option: str, form: str) -> tuple[str, str]:
    """Splits `NAME=VALUE`; `form` is the expected form, such as NAME=VALUE, for the error message."""
    left, sign, right = words.rpartition("=")
    if not (left and sign and right):
        raise typer.BadParameter(f"{words!r} is not of the form {form}", param_hint=option)
    return left, right
