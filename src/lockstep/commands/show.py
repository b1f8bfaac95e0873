"""`lockstep data show`: prints rows as tokens, the model's input, with the trained tokens coloured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from lockstep.device.select import select
from lockstep.preflight.run_checks import prepare_shown
from lockstep.recipe import Recipe
from lockstep.recipe.methods import ONLINE
from lockstep.run.console import Console
from lockstep.run.output import visible
from lockstep.run.screen import Screen, shown
from lockstep.types import Example, Item, LabeledResponse, Prompt, Ranking, ScoredExample, StepLabels

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRAINED, CONTEXT = "bold green", "dim"


def show_rows(recipe: Recipe, rows: int) -> None:
    if recipe.method in ONLINE:
        _show_prompts(recipe, rows)
    else:
        _show_examples(recipe, rows)


def _show_prompts(recipe: Recipe, rows: int) -> None:
    console = Console.open()
    prepared = prepare_shown(recipe, select(recipe.device), rows, console)
    screen = Screen.on_stdout()
    for source in prepared.train.sources:
        for prompt in source[:rows]:
            question = prompt.question
            truth = f", answer {question.ground_truth}" if question.ground_truth else ", no ground truth"
            title = f"{question.origin}: {len(prompt.ids)} tokens, {question.data_source}{truth}"
            screen.print(shown(title, "bold"), soft_wrap=True)
            text = prepared.tokenizer.decode(_shortened(prompt, 0, len(prompt.ids)))
            screen.print(shown(text, CONTEXT), soft_wrap=True)
            for line in image_lines(prompt):
                screen.print(shown(line, CONTEXT), soft_wrap=True)
    counts = prepared.train.counts
    console.banner(
        "data",
        [
            *[("source", note) for note in prepared.train.notes],
            *_template(recipe),
            ("prompts", f"{counts.rows:,} kept, {counts.dropped:,} dropped, {counts.truncated:,} truncated"),
            ("tokens", counts.sentence()),
        ],
    )


def _show_examples(recipe: Recipe, rows: int) -> None:
    console = Console.open()
    prepared = prepare_shown(recipe, select(recipe.device), rows, console)
    screen = Screen.on_stdout()
    for source in prepared.train.sources:
        for item in source[:rows]:
            for number, example in enumerate(item.examples):
                title = f"{item.origin}{role_of(item, number)}: {len(example)} tokens, {example.trained_tokens} trained"
                screen.print(shown(title, "bold"), soft_wrap=True)
                screen.print(render(example, prepared.tokenizer, marks=not screen.is_terminal), soft_wrap=True)
                for line in image_lines(example):
                    screen.print(shown(line, CONTEXT), soft_wrap=True)
    counts = prepared.train.counts
    console.banner(
        "data",
        [
            *[("source", note) for note in prepared.train.notes],
            *_template(recipe),
            ("rows", f"{counts.rows:,} kept, {counts.dropped:,} dropped, {counts.truncated:,} truncated"),
            ("tokens", f"{counts.tokens:,}, of which {counts.trained_tokens:,} trained"),
            ("longest row", f"{counts.longest:,} tokens"),
            ("split rows", f"{counts.split:,} tokenised in pieces at the border of prompt and answer"),
        ],
    )
    for warning in prepared.train.warnings:
        console.warn(warning)


def _template(recipe: Recipe) -> list[tuple[str, str]]:
    """Returns the chat template of the recipe, unless it is that of the tokenizer."""
    return [] if recipe.data.template == "auto" else [("template", recipe.data.template)]


def _shortened(example: Example | Prompt, start: int, end: int) -> list[int]:
    """Returns the tokens from `start` to `end`, with only the first placeholder token of each image."""
    repeated = {place for image in example.images for place in range(image.start + 1, image.stop)}
    return [example.ids[place] for place in range(start, end) if place not in repeated]


def role_of(item: Item, number: int) -> str:
    """Returns the role of a sequence in its row, such as chosen or rejected."""
    if isinstance(item, Ranking):
        margin = f", margin {item.margin:g}" if item.margin and not number else ""
        names = ("chosen", "rejected") if len(item.examples) == 2 else [f"rank {i + 1}" for i in range(99)]
        return f", {names[number]}{margin}"
    if isinstance(item, LabeledResponse):
        return ", desirable" if item.desirable else ", undesirable"
    if isinstance(item, StepLabels):
        return f", labels {' '.join(f'{label[0]:g}' for label in item.labels)}"
    return ""


def image_lines(example: Example | Prompt) -> list[str]:
    """Describes each image of a row: its tokens, its patches and where it comes from."""
    return [
        f"  image {number}: tokens {image.start} to {image.stop - 1} ({image.tokens}), "
        f"{image.grid[1]} x {image.grid[2]} patches, {image.ref}"
        for number, image in enumerate(example.images, 1)
    ]


def render(example: Example, tokenizer: PreTrainedTokenizerBase, *, marks: bool) -> Text:
    """Returns the text of the row; without colours, trained or scored tokens are in [[double brackets]]."""
    text = Text()
    start = 0
    marked = (
        set(example.positions)
        if isinstance(example, ScoredExample)
        else {position + 1 for position, _ in example.scored_tokens()}
    )
    while start < len(example):
        end = start
        trained = start in marked
        while end < len(example) and (end in marked) == trained:
            end += 1
        piece = visible(tokenizer.decode(_shortened(example, start, end)))
        text.append(f"[[{piece}]]" if trained and marks else piece, style=TRAINED if trained else CONTEXT)
        start = end
    return text
