"""`lockstep data ...`: generates and shows rows. Each command imports its modules only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.commands.arguments import Overrides, RecipeArgument
from lockstep.run.output import write

data_app = typer.Typer(help="Generate and show data.", no_args_is_help=True, rich_markup_mode=None)


@data_app.command()
def arithmetic(
    folder: Path,
    train_rows: int = 2000,
    val_rows: int = 200,
    difficulty: Annotated[int, typer.Option(help="Difficulty: 1 means one-digit sums; higher levels are harder.")] = 1,
    seed: int = 0,
) -> None:
    """Write generated arithmetic rows (RL and SFT schema) to FOLDER."""
    from lockstep.data.prepare.generated import write_arithmetic

    counts = write_arithmetic(folder, train_rows=train_rows, val_rows=val_rows, difficulty=difficulty, seed=seed)
    _echo_counts(folder, counts)


@data_app.command()
def preferences(folder: Path, train_rows: int = 2000, val_rows: int = 200, seed: int = 0) -> None:
    """Write generated preference pairs, labeled steps and prompts to FOLDER."""
    from lockstep.data.prepare.generated import write_preferences

    _echo_counts(folder, write_preferences(folder, train_rows=train_rows, val_rows=val_rows, seed=seed))


@data_app.command()
def calculator(folder: Path, train_rows: int = 2000, val_rows: int = 100, seed: int = 0) -> None:
    """Write products that need the calculator tool (RL and SFT rows), and a chat template with tools, to FOLDER."""
    from lockstep.data.prepare.agent_rows import write_calculator

    _echo_counts(folder, write_calculator(folder, train_rows=train_rows, val_rows=val_rows, seed=seed))


@data_app.command()
def guess_number(folder: Path, train_rows: int = 2000, val_rows: int = 60, seed: int = 0) -> None:
    """Write rows of the game guess_number (RL and SFT rows) to FOLDER."""
    from lockstep.data.prepare.agent_rows import write_guess_number

    _echo_counts(folder, write_guess_number(folder, train_rows=train_rows, val_rows=val_rows, seed=seed))


@data_app.command()
def seeds(
    folder: Path,
    prompt: Annotated[str, typer.Option(help="Instruction before the first observation.")] = "Play the game.",
    train_rows: int = 2000,
    val_rows: int = 60,
    seed: int = 0,
) -> None:
    """Write rows with a prompt and a seed, for environments of other packages, to FOLDER."""
    from lockstep.data.prepare.agent_rows import write_seeds

    _echo_counts(folder, write_seeds(folder, prompt=prompt, train_rows=train_rows, val_rows=val_rows, seed=seed))


@data_app.command()
def squares(folder: Path, train_rows: int = 2000, val_rows: int = 200, seed: int = 0) -> None:
    """Write images of drawn squares with questions about them (RL and SFT rows) to FOLDER."""
    from lockstep.data.prepare.squares import write_squares

    _echo_counts(folder, write_squares(folder, train_rows=train_rows, val_rows=val_rows, seed=seed))


@data_app.command()
def tiny_vlm(folder: Path, seed: int = 0) -> None:
    """Write a tiny vision-language model (Qwen2.5-VL, random weights) for the drawn squares to FOLDER."""
    from lockstep.model.towers.tiny_vision import write_tiny_vlm

    write_tiny_vlm(folder, seed=seed)
    write(f"wrote a tiny Qwen2.5-VL model to {folder}")


@data_app.command()
def gsm8k(
    folder: Annotated[Path, typer.Argument(metavar="OUT")],
    source: Annotated[Path | None, typer.Option("--from", help="Folder with train.jsonl and test.jsonl.")] = None,
    examples: Annotated[
        int,
        typer.Option(min=0, help="Worked examples before each question, for models that do not answer as '#### 42'."),
    ] = 0,
) -> None:
    """Write GSM8K as RL rows to OUT, from the raw files or the hub."""
    from lockstep.data.prepare.generated import write_gsm8k

    _echo_counts(folder, write_gsm8k(folder, source=source, examples=examples))


@data_app.command()
def show(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=1, help="Number of rows.")] = 3,
) -> None:
    """Print rows of RECIPE as tokens, with the trained tokens coloured, and the token counts."""
    from lockstep.recipe import load_recipe

    checked = load_recipe(recipe, overrides or [])

    from lockstep.commands.show import show_rows

    show_rows(checked, rows)


def _echo_counts(folder: Path, counts: dict[str, int]) -> None:
    for name, count in counts.items():
        write(f"{folder / name}: {count:,} rows")
