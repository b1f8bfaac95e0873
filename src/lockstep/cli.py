"""The command line. Each verb imports what it needs, so that `--help` answers at once."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from lockstep.commands import answering
from lockstep.commands.arguments import Overrides, RecipeArgument, named_value
from lockstep.commands.data import data_app
from lockstep.launch.launcher import adopt_slurm
from lockstep.run.output import never_fail_to_encode, write

app = typer.Typer(
    name="lockstep",
    help="Post-train language models: one recipe on any device, and proof that devices train in step.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(data_app, name="data")


def _version(asked: bool) -> None:
    if asked:
        from lockstep.version import __version__

        write(f"lockstep {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options that come before a verb."""


@app.command()
def train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    resume_from: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Begin as a copy of this run, or of one of its checkpoints, and go on."),
    ] = None,
    init_from: Annotated[
        str | None, typer.Option(metavar="PATH", help="Begin with the weights of this model, run or checkpoint only.")
    ] = None,
    accept_changed: Annotated[
        bool, typer.Option("--accept-changed", help="Resume although the files of a model have changed.")
    ] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Two tiny steps with everything on, in a temporary folder.")
    ] = False,
) -> None:
    """Train RECIPE, or go on where it stopped."""
    from lockstep.commands.maintenance import with_beginning
    from lockstep.recipe import load_recipe

    words = with_beginning(overrides or [], resume_from, init_from)
    checked = load_recipe(recipe, words)
    if smoke:
        from lockstep.commands.smoke import smoke_test

        smoke_test(checked)
        return

    from lockstep.launch.launcher import follow_launcher, is_rank, start_ranks, starts_ranks

    follow_launcher()
    if resume_from is not None and os.environ.get("RANK", "0") == "0":
        from lockstep.train.resume import adopt

        if said := adopt(checked, resume_from):
            write(said)
    if starts_ranks(checked.parallel) and not is_rank():
        options = ["--accept-changed"] if accept_changed else []
        raise typer.Exit(start_ranks(checked, ["train", recipe, *options, *words]))

    from lockstep.train.start import run_recipe

    run_recipe(checked, accept_changed=accept_changed)


@app.command()
def plan(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    devices: Annotated[int | None, typer.Option(min=1, help="Devices to plan for [parallel.devices, or 1].")] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="NxM:DEVICE", help="Plan for N nodes of M devices that need not be here.")
    ] = None,
    response_tokens: Annotated[
        int | None, typer.Option(min=1, help="With --cluster: mean length of a response [rollout.max_tokens].")
    ] = None,
) -> None:
    """Show batches and memory of RECIPE without loading the model; refuse what cannot fit.

    With --cluster also the time of a step, on devices of a table: 1x1:h200, 2x8:atlas-800t-a2, 16x8:h100.
    """
    if cluster is None and response_tokens is not None:
        raise typer.BadParameter("is for --cluster", param_hint="--response-tokens")
    if cluster is not None and devices is not None:
        raise typer.BadParameter("says how many devices there are", param_hint="--cluster")

    from lockstep.recipe import load_recipe

    checked = load_recipe(recipe, overrides or [])

    if cluster is not None:
        from lockstep.commands.plan import show_cluster_plan

        show_cluster_plan(checked, cluster, response_tokens)
        return

    from lockstep.commands.plan import show_plan

    show_plan(checked, devices or checked.parallel.devices or 1)


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this recipe, or the defaults of this method.")] = None,
) -> None:
    """List the built-in recipes and methods, or print one."""
    from lockstep.recipe.loader import builtin_names, method_text, recipe_text
    from lockstep.recipe.methods import OFFLINE, ONLINE
    from lockstep.run.output import fit, fit_rows

    if name:
        write(method_text(name) or recipe_text(name), end="")
        return
    rows = [(each, recipe_text(each).splitlines()[0].lstrip("# ")) for each in builtin_names()]
    for key, value in fit_rows(rows):
        write(f"{key}{value}")
    write("")
    for line in fit(f"methods: {', '.join([*OFFLINE, *ONLINE])}"):
        write(line)
    write("`lockstep recipes METHOD` prints what a method sets; a recipe may say otherwise.")


@app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="[FILE.yaml]", help="The new recipe.")] = Path("recipe.yaml"),
    overrides: Overrides = None,
    method: Annotated[str | None, typer.Option(help="What to do: sft, dpo, grpo, or another method.")] = None,
    model: Annotated[str | None, typer.Option(metavar="DIR", help="The model's Hugging Face folder.")] = None,
    data: Annotated[str | None, typer.Option(metavar="PATH", help="Training rows.")] = None,
    val: Annotated[str | None, typer.Option(metavar="PATH", help="Validation rows.")] = None,
    reward: Annotated[
        str | None, typer.Option(metavar="FILE.py:NAME", help="Online methods: your reward function.")
    ] = None,
    teacher: Annotated[str | None, typer.Option(metavar="DIR", help="Distillation: the teacher's folder.")] = None,
) -> None:
    """Write a first recipe with comments; asks for what the options leave open.

    Rows that are here are looked at: the recipe gets what they need, or they are refused.
    """
    from lockstep.commands.init import asked, write_recipe

    for line in write_recipe(file, asked(file, method, model, data, val, reward, teacher, overrides or ())):
        write(line)


@app.command()
def tiny(folder: Path, seed: int = 0) -> None:
    """Write the embedded tiny model (a real Hugging Face folder, random weights) to FOLDER."""
    from lockstep.model.tiny import write_tiny

    write_tiny(folder, seed=seed)
    write(f"wrote a tiny Qwen2 model to {folder}")


@app.command()
def doctor(
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Judge for this device, not for the one that `auto` takes.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
    pins: Annotated[
        str | None, typer.Option(metavar="STACK", help="Print requirements and install steps of a known stack.")
    ] = None,
) -> None:
    """Show what is installed here, whether it fits together, and what to do where it does not."""
    from lockstep.doctor.doctor_report import run_doctor

    raise typer.Exit(run_doctor(device, json, pins))


@app.command()
def cache(
    clear: Annotated[str | None, typer.Option(metavar="PART|all", help="Delete rows, folders, models, or all.")] = None,
) -> None:
    """Show what is kept to save time (encoded rows, converted models) and how large it is, or delete it."""
    from lockstep.commands.maintenance import cache_lines

    for line in cache_lines(clear):
        write(line)


# Registered here, so that `--help` lists them in the order of a run's life.
app.command()(answering.generate)
app.command()(answering.serve)
app.command(name="eval")(answering.evaluate)
app.command()(answering.sample)
app.command()(answering.pairs)


@app.command()
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="A run folder, or a log of another framework.")],
    b: Annotated[str, typer.Argument(metavar="B", help="What is held against it.")],
    repeat: Annotated[
        list[str] | None, typer.Option(metavar="RUN", help="A repeat of one side: the noise floor; may be repeated.")
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=NAME]", help="Judge this one (its name in A, and in B); may be repeated."),
    ] = None,
    bar: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PERCENT", help="Judge it by this bar; may be repeated.")
    ] = None,
    names: Annotated[Path | None, typer.Option(metavar="FILE.yaml", help="More metric names: theirs to ours.")] = None,
    value: Annotated[
        str | None, typer.Option(metavar="NAME", help="What the Value of a csv exported from tensorboard is.")
    ] = None,
    shift: Annotated[int, typer.Option(metavar="N", help="Add this to B's steps, where the two count otherwise.")] = 0,
    steps: Annotated[
        str | None, typer.Option(metavar="FIRST:LAST", help="Compare these steps only, as if no more were planned.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Where the page goes [B's run folder].")
    ] = None,
    record: Annotated[bool, typer.Option("--record", help="Put the result into the support table.")] = False,
    support: Annotated[Path, typer.Option(metavar="FILE.md", help="The support table.")] = Path("docs/support.md"),
) -> None:
    """Did A and B train in step? Ends with 0 if they did, 1 if not, 2 if that cannot be said."""
    from lockstep.parity.compare.compare_command import CompareOptions, compare_logs

    bars = dict(_bar(words) for words in bar or [])
    kept = support if record else None
    span = _span(steps) if steps is not None else None
    options = CompareOptions(
        a, b, tuple(repeat or ()), tuple(metric or ()), bars, names, report, kept, shift, value, span
    )
    raise typer.Exit(compare_logs(options, as_json=json))


@app.command()
def view(
    folder: Annotated[
        Path, typer.Argument(metavar="[RUNS_FOLDER]", help="The folder that holds your runs, or one run.")
    ] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any that is free.")] = 0,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Serve a page to look at runs: curves, samples, recipes, reports. For this machine only, and read-only."""
    from lockstep.commands.view import view_runs

    view_runs(folder, port, open_browser)


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder with a tape (`tape=true`), or a recording.")],
    overrides: Overrides = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="Replay on this device.")] = None,
    mode: Annotated[
        str, typer.Option(metavar="forced|chained|free", help="What is recorded: weights and data, data, or the start.")
    ] = "forced",
    step: Annotated[list[int] | None, typer.Option(help="Only this step; may be repeated.")] = None,
    checklist: Annotated[bool, typer.Option("--checklist", help="What the guides check by hand, one by one.")] = False,
    model: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Of a recording of another framework: the model it trained.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Repeat RUN on another device, dtype, engine or number of processes, and name the first place where it parts.

    Ends with 0 if it stays in step, with 1 if not. KEY=VALUE changes the recipe: model.dtype=bf16, rollout.engine=hf.
    """
    from lockstep.parity.replay.replay_command import ReplayRequest, replay_run

    words = [*(overrides or []), *([f"device={device}"] if device else [])]
    raise typer.Exit(replay_run(ReplayRequest(run, mode, tuple(words), tuple(step or ()), checklist, json, model)))


@app.command()
def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder, one of its checkpoints, or an adapter to merge.")
    ],
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Where the Hugging Face folder goes.", show_default=False)
    ] = None,
    step: Annotated[int | None, typer.Option(help="This checkpoint instead of the newest.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint, by `checkpoint.best`.")] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="A LoRA run's adapter as a PEFT folder, not merged.")
    ] = False,
    merge: Annotated[bool, typer.Option("--merge", help="An adapter put into its base; of a run the default.")] = False,
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The base of an adapter, if not as it says.")
    ] = None,
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Put it onto the hub too, with a card of the run.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the hub's repository a private one.")] = False,
) -> None:
    """Write a run's model as a Hugging Face folder, with a card of what the run did."""
    from lockstep.commands.export import ExportOrder, export_to

    for line in export_to(run, folder, ExportOrder(step, best, adapter, merge, base, push, private)):
        write(line)


@app.command()
def migrate(
    source: Annotated[
        Path, typer.Argument(metavar="SCRIPT.sh|CHECKPOINT", help="A script, or a folder, of verl or OpenRLHF.")
    ],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="Variables and arguments of the script.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="PATH", help="The recipe's file, or the model's folder.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Checkpoint: config and tokenizer, where it has none.")
    ] = None,
) -> None:
    """Turn a training script of another trainer into a recipe, or a checkpoint of its into a Hugging Face folder."""
    if source.is_dir():
        if out is None:
            raise typer.BadParameter("name the folder that is to be written", param_hint="--out")

        from lockstep.compat.checkpoints import convert_checkpoint

        write(convert_checkpoint(source, out, model))
        return

    from lockstep.compat.migrate import migrate as convert

    convert(source, words or [], out)


@app.command(name="import-gguf")
def import_gguf(
    file: Path,
    folder: Path,
    tie: Annotated[
        bool, typer.Option("--tie", help="The embedding is the output head too, though the file carries one.")
    ] = False,
) -> None:
    """Turn a GGUF file into a Hugging Face folder."""
    from lockstep.model.gguf import import_gguf as convert

    for line in convert(file, folder, tie=tie):
        write(line)


def _span(words: str) -> tuple[int, int]:
    first, _, last = words.partition(":")
    if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise typer.BadParameter(f"{words!r} is not two steps such as 1:200", param_hint="--steps")
    return int(first), int(last)


def _bar(words: str) -> tuple[str, float]:
    name, percent = named_value(words, "--bar", "NAME=PERCENT")
    try:
        number = float(percent.removesuffix("%"))
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise typer.BadParameter(f"{percent!r} is not a percentage such as 2 or 0.5", param_hint="--bar")
    return name, number


def main() -> None:
    """The entry point: refusals become advice on stderr and exit code 2, or 75 where another try is worth it."""
    from lockstep.errors import STALLED, Interrupted, LostProcess, Refusal, refusal_of_machine

    never_fail_to_encode()
    try:
        adopt_slurm()
        if sys.argv[1:2] == ["--install-completion"] and len(sys.argv) == 3:
            from lockstep.commands.maintenance import install_for

            install_for(sys.argv[2])
            return
        app()
    except Refusal as refusal:
        _report(refusal)
        sys.exit(STALLED if isinstance(refusal, LostProcess) else 2)
    except Interrupted as stop:
        write(f"{stop}")
        sys.exit(130)
    except OSError as error:
        # Whatever was being read or written: a full or read-only disk is the machine's state and no bug of ours.
        found = refusal_of_machine(error)
        if found is None:
            raise
        _report(found)
        sys.exit(2)


def _report(refusal: Exception) -> None:
    from lockstep.errors import Refusal
    from lockstep.run.console import print_problems

    rank = os.environ.get("RANK", "0")
    if rank != "0":
        # All ranks meet the same bad input; rank 0 tells it and torchrun ends the rest. A rank that is still
        # here after a while, in which a rank 0 on a busy machine came this far too, met something of its own.
        time.sleep(60)
        write(f"rank {rank}:", error=True)
    assert isinstance(refusal, Refusal)
    print_problems(refusal)


if __name__ == "__main__":
    main()
