"""`lockstep data show`: rows as the model will see them, trained tokens coloured."""

from __future__ import annotations

import sys

from rich.console import Console as RichConsole
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from lockstep.device.select import select
from lockstep.recipe import Recipe
from lockstep.recipe.methods import ONLINE
from lockstep.run.progress import Console
from lockstep.train.setup import prepare, prepare_online
from lockstep.types import Example

TRAINED, CONTEXT = "bold green", "dim"


def show_rows(recipe: Recipe, rows: int) -> None:
    if recipe.method in ONLINE:
        _show_prompts(recipe, rows)
    else:
        _show_examples(recipe, rows)


def _show_prompts(recipe: Recipe, rows: int) -> None:
    console = Console.open()
    prepared = prepare_online(recipe, select(recipe.device), 1, console, must_fit=False)
    screen = RichConsole(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 80)
    for source in prepared.train.sources:
        for prompt in source[:rows]:
            question = prompt.question
            title = (
                f"{question.origin}: {len(prompt.ids)} tokens, {question.data_source}, answer {question.ground_truth}"
            )
            screen.print(Text(title, style="bold"), soft_wrap=True)
            screen.print(Text(prepared.tokenizer.decode(list(prompt.ids)), style=CONTEXT), soft_wrap=True)
    counts = prepared.train.counts
    console.banner(
        "data",
        [
            *[("source", note) for note in prepared.train.notes],
            ("prompts", f"{counts.rows:,} kept, {counts.dropped:,} dropped, {counts.truncated:,} truncated"),
            ("tokens", counts.sentence()),
        ],
    )


def _show_examples(recipe: Recipe, rows: int) -> None:
    console = Console.open()
    prepared = prepare(recipe, select(recipe.device), 1, console, must_fit=False)
    screen = RichConsole(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 80)
    for source in prepared.train.sources:
        for example in source[:rows]:
            title = f"{example.origin}: {len(example)} tokens, {example.targets} trained"
            screen.print(Text(title, style="bold"), soft_wrap=True)
            screen.print(render(example, prepared.tokenizer, marks=not screen.is_terminal), soft_wrap=True)
    counts = prepared.train.counts
    console.banner(
        "data",
        [
            *[("source", note) for note in prepared.train.notes],
            ("rows", f"{counts.rows:,} kept, {counts.dropped:,} dropped, {counts.truncated:,} truncated"),
            ("tokens", f"{counts.tokens:,}, of which {counts.trained_tokens:,} trained"),
            ("longest row", f"{counts.longest:,} tokens"),
            ("split rows", f"{counts.split:,} tokenised in pieces at the border of prompt and answer"),
        ],
    )


def render(example: Example, tokenizer: PreTrainedTokenizerBase, *, marks: bool) -> Text:
    """The row's text by runs of tokens; without colours the trained runs stand in [[double brackets]]."""
    text = Text()
    start = 0
    while start < len(example):
        end = start
        # The first token is never predicted, trained or not.
        trained = bool(example.trained[start]) and start > 0
        while end < len(example) and (bool(example.trained[end]) and end > 0) == trained:
            end += 1
        piece = tokenizer.decode(list(example.ids[start:end]))
        text.append(f"[[{piece}]]" if trained and marks else piece, style=TRAINED if trained else CONTEXT)
        start = end
    return text
