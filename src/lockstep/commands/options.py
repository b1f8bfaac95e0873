"""Arguments and options that several commands share, and what they refuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.errors import Problem, Refusal, refuse_all
from lockstep.model.load import DTYPES, load_config
from lockstep.rollout.native.limits import refuse_moving_positions
from lockstep.types import Prompt

# Arguments that several verbs take.


def recipe_names(incomplete: str) -> list[str]:
    """For the shell's completion: built-in recipes, and the folders and YAML files that begin so."""
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
PromptKey = Annotated[str | None, typer.Option(metavar="COLUMN", help="The column of the prompts [found by name].")]
LabelKey = Annotated[str | None, typer.Option(metavar="COLUMN", help="That of the ground truth [found by name].")]


def named_value(words: str, option: str, form: str) -> tuple[str, str]:
    """The two sides of `NAME=VALUE`; `form` is what the option calls them."""
    left, sign, right = words.rpartition("=")
    if not (left and sign and right):
        raise typer.BadParameter(f"{words!r} is not of the form {form}", param_hint=option)
    return left, right


# What the options of the commands that generate cannot mean.


def refuse_options(dtype: str, n: int, temperature: float) -> None:
    if dtype not in DTYPES:
        raise Refusal.at("--dtype", f"{dtype} is not one of {', '.join(DTYPES)}")
    if n > 1 and not temperature:
        raise Refusal.at("--n", f"{n} greedy answers would all be the same", "give a --temperature too")


def as_options(refusal: Refusal, options: Mapping[str, str]) -> Refusal:
    """The same, in the words of the command: keys of a recipe are options there."""

    def said(text: str) -> str:
        for key, option in options.items():
            text = text.replace(key, option)
        return text

    return Refusal([Problem(said(p.where), said(p.why), said(p.remedy)) for p in refusal.problems])


def refuse_judge(folder: str, model: str) -> None:
    """A reward model has the layers of a language model, and what they would say is noise."""
    if any(name.endswith("ForSequenceClassification") for name in load_config(folder).architectures or []):
        why = "is a reward model: it scores answers, and writes none"
        raise Refusal.at(model, why, "`lockstep eval` and `lockstep serve` take it")


def over_context(prompts: Sequence[Prompt], max_new_tokens: int, config: Any) -> list[Problem]:
    """The prompts that leave an answer no room in the model's context."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    problems: list[Problem] = []
    for prompt in prompts:
        length = len(prompt.ids)
        if context and length + max_new_tokens > context:
            why = f"{length} tokens and a response of {max_new_tokens} are over the model's context of {context}"
            less = f"set --max-new-tokens to {context - length} or less, or " if length < context else ""
            problems.append(Problem(str(prompt.question.origin), why, f"{less}remove it"))
    return problems


def refuse_long_answers(prompts: Sequence[Prompt], max_new_tokens: int, folder: str) -> None:
    """Before the model is loaded: answers over the context, or in which the positions of cached keys would move."""
    config = load_config(folder)
    refuse_all(over_context(prompts, max_new_tokens, config), "rows")
    longest = max(len(prompt.ids) for prompt in prompts) + max_new_tokens
    refuse_moving_positions(config.get_text_config(), longest, config.model_type, "--max-new-tokens")
