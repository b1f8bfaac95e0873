"""The command line: verbs only. Each verb imports what it needs, so that `--help` answers at once."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="lockstep",
    help="Post-train language models: one recipe on any device, and proof that devices train in step.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Make and look at data.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a built-in recipe.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to override.")]
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder or a run folder.")]


@app.command()
def train(recipe: RecipeArgument, overrides: Overrides = None) -> None:
    """Train RECIPE, or go on where it stopped."""
    from lockstep.recipe import load_recipe

    checked = load_recipe(recipe, overrides or [])

    from lockstep.recipe.methods import ONLINE
    from lockstep.run.progress import Console

    if checked.method in ONLINE:
        from lockstep.run.text import ONLINE_COLUMNS
        from lockstep.train.online import train_online

        train_online(checked, Console.open(ONLINE_COLUMNS, every=checked.log.every, lines=True))
    else:
        from lockstep.train.offline import train_offline

        train_offline(checked, Console.open(every=checked.log.every))


@app.command()
def plan(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    devices: Annotated[int, typer.Option(min=1, help="Devices to plan for.")] = 1,
) -> None:
    """Show batches and memory of RECIPE without loading the model; refuse what cannot fit."""
    from lockstep.recipe import load_recipe

    checked = load_recipe(recipe, overrides or [])

    from lockstep.train.plan_report import show_plan

    show_plan(checked, devices)


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this recipe, or the defaults of this method.")] = None,
) -> None:
    """List the built-in recipes and methods, or print one."""
    from lockstep.recipe.load import builtin_names, method_text, recipe_text
    from lockstep.recipe.methods import ONLINE
    from lockstep.run.text import fit

    if name:
        typer.echo(method_text(name) or recipe_text(name), nl=False)
        return
    for each in builtin_names():
        typer.echo(f"{each:18}{recipe_text(each).splitlines()[0].lstrip('# ')}")
    typer.echo("")
    for line in fit(f"methods: sft, {', '.join(ONLINE)}"):
        typer.echo(line)
    typer.echo("`lockstep recipes METHOD` prints what a method sets; a recipe may say otherwise.")


@app.command()
def tiny(folder: Path, seed: int = 0) -> None:
    """Write the embedded tiny model (a real Hugging Face folder, random weights) to FOLDER."""
    from lockstep.model.tiny import write_tiny

    write_tiny(folder, seed=seed)
    typer.echo(f"wrote a tiny Qwen2 model to {folder}")


@app.command()
def generate(
    model: ModelArgument,
    prompt: Annotated[str | None, typer.Argument(help="What to say to it.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Talk to it, turn by turn.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_new_tokens: int = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Sample from tokens that hold this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from so many tokens; 0 is all.")] = 0,
    min_p: Annotated[float, typer.Option(min=0, max=1, help="Leave out tokens below this share of the best.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(min=0.01, help="Over 1, tokens seen before lose.")] = 1.0,
    seed: int = 0,
    device: str = "auto",
) -> None:
    """Let MODEL answer a prompt."""
    if prompt is None and not chat:
        raise typer.BadParameter("give a prompt, or --chat")

    from lockstep.rollout.talk import Talker, converse

    talker = Talker(
        model,
        device,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        system=system,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
    )
    if chat:
        converse(talker, prompt)
    elif prompt is not None:
        typer.echo(talker.continue_text(prompt) if raw else talker.answer(prompt))


@app.command(name="eval")
def evaluate(
    model: ModelArgument,
    data: Annotated[str, typer.Argument(metavar="DATA", help="Rows in the RL schema (arithmetic, gsm8k).")],
    rows: Annotated[int | None, typer.Option(min=1, help="Only the first so many rows.")] = None,
    max_new_tokens: int = 256,
    n: Annotated[int, typer.Option(min=1, help="Answers to each question: pass@k and maj@k.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: int = 0,
    out: Annotated[Path | None, typer.Option(help="Write every answer to this jsonl file.")] = None,
    dtype: str = "fp32",
    device: str = "auto",
) -> None:
    """Accuracy of MODEL on DATA, by the rule of each row's data source."""
    from lockstep.train.score import score_model

    score_model(
        model,
        data,
        rows=rows,
        max_new_tokens=max_new_tokens,
        n=n,
        temperature=temperature,
        seed=seed,
        out=out,
        dtype=dtype,
        device_name=device,
    )


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the Hugging Face folder goes.")],
    step: Annotated[int | None, typer.Option(help="This checkpoint instead of the newest.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The checkpoint with the lowest val/loss.")] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="A LoRA run's adapter as a PEFT folder, not merged.")
    ] = False,
) -> None:
    """Write a run's model as a Hugging Face folder."""
    from lockstep.train.export_run import export_run

    typer.echo(export_run(run, folder, step=step, best=best, adapter=adapter))


@app.command(name="import-gguf")
def import_gguf(file: Path, folder: Path) -> None:
    """Turn a GGUF file into a Hugging Face folder."""
    from lockstep.model.gguf import import_gguf as convert

    typer.echo(convert(file, folder))


@data_app.command()
def arithmetic(
    folder: Path,
    train_rows: int = 2000,
    val_rows: int = 200,
    difficulty: Annotated[int, typer.Option(help="1: one-digit sums, and harder upwards.")] = 1,
    seed: int = 0,
) -> None:
    """Write generated arithmetic rows (RL and SFT schema) to FOLDER."""
    from lockstep.data.prepare.arithmetic import write_arithmetic

    counts = write_arithmetic(folder, train_rows=train_rows, val_rows=val_rows, difficulty=difficulty, seed=seed)
    _echo_counts(folder, counts)


@data_app.command()
def gsm8k(
    folder: Annotated[Path, typer.Argument(metavar="OUT")],
    source: Annotated[Path | None, typer.Option("--from", help="Folder with train.jsonl and test.jsonl.")] = None,
) -> None:
    """Write GSM8K as RL rows to OUT, from the raw files or the hub."""
    from lockstep.data.prepare.gsm8k import write_gsm8k

    _echo_counts(folder, write_gsm8k(folder, source=source))


@data_app.command()
def show(
    recipe: RecipeArgument, overrides: Overrides = None, rows: Annotated[int, typer.Option(help="How many rows.")] = 3
) -> None:
    """Print rows of RECIPE as tokens, the trained ones coloured, and the token counts."""
    from lockstep.recipe import load_recipe

    checked = load_recipe(recipe, overrides or [])

    from lockstep.train.show import show_rows

    show_rows(checked, rows)


def _echo_counts(folder: Path, counts: dict[str, int]) -> None:
    for name, count in counts.items():
        typer.echo(f"{folder / name}: {count:,} rows")


def main() -> None:
    """The entry point: refusals become advice on stderr and exit code 2."""
    from lockstep.errors import Interrupted, Refusal

    try:
        app()
    except Refusal as refusal:
        _report(refusal)
        sys.exit(2)
    except Interrupted as stop:
        typer.echo(f"{stop}")
        sys.exit(130)


def _report(refusal: Exception) -> None:
    from lockstep.errors import Refusal
    from lockstep.run.progress import print_problems

    rank = os.environ.get("RANK", "0")
    if rank != "0":
        # All ranks meet the same bad input; rank 0 tells it and torchrun ends the rest. A rank that is still
        # here after a while met something of its own, and says so.
        time.sleep(5)
        print(f"rank {rank}:", file=sys.stderr)
    assert isinstance(refusal, Refusal)
    print_problems(refusal)
