"""The command line. Each command imports its modules when it runs, so that `--help` is fast."""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.commands import answering, converting
from lockstep.commands.arguments import (
    Overrides,
    RecipeArgument,
    named_value,
)
from lockstep.commands.data import data_app
from lockstep.launch.launcher import LAUNCHER, adopt_slurm
from lockstep.run.output import never_fail_to_encode, write

_python_warning = warnings.showwarning

app = typer.Typer(
    name="lockstep",
    help="Post-train language models with one recipe on any device, and check that devices train alike.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(data_app, name="data")


def _version(show: bool) -> None:
    if show:
        from lockstep.version import own_commit, package_version

        commit = own_commit()
        write(f"lockstep {package_version()}" + (f" (commit {commit})" if commit else ""))
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of `lockstep` itself, written before the command name."""


@app.command()
def train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    resume_from: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Copy this run, or one of its checkpoints, and continue the copy."),
    ] = None,
    init_from: Annotated[
        str | None, typer.Option(metavar="PATH", help="Start from the weights of this model, run or checkpoint.")
    ] = None,
    accept_changed: Annotated[
        bool, typer.Option("--accept-changed", help="Resume even if the files of a model have changed.")
    ] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Test RECIPE: two small steps with validation, checkpoint, export and tape.")
    ] = False,
) -> None:
    """Train RECIPE, or resume its interrupted run."""
    from lockstep.commands.maintenance import naming_commands, with_beginning
    from lockstep.recipe import load_recipe

    words = with_beginning(overrides or [], resume_from, init_from)
    checked = load_recipe(recipe, words)
    if smoke:
        write(f"smoke test of {checked.run.name}: loading libraries ...")
        from lockstep.commands.smoke import smoke_test

        smoke_test(checked)
        return

    from lockstep.launch.launcher import follow_launcher, is_rank, start_ranks, starts_ranks

    follow_launcher()
    if resume_from is not None and os.environ.get("RANK", "0") == "0":
        from lockstep.train.resume import adopt

        if message := adopt(checked, resume_from):
            write(message)
    if starts_ranks(checked.parallel) and not is_rank():
        options = ["--accept-changed"] if accept_changed else []
        raise typer.Exit(start_ranks(checked, ["train", recipe, *options, *words]))

    if os.environ.get("RANK", "0") == "0":
        write(f"{checked.method} run {checked.run.name}: loading libraries ...")
    from lockstep.model.fingerprint import prefetch_model

    prefetch_model(checked.model.path)
    from lockstep.train.callbacks import StartOptions
    from lockstep.train.start import run_recipe

    with naming_commands(recipe):
        run_recipe(checked, StartOptions(accept_changed))


@app.command()
def plan(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Number of devices to plan for [parallel.devices, or 1].")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NxM:DEVICE", help="Plan for N nodes of M devices each, without access to them."),
    ] = None,
    fit: Annotated[str | None, typer.Option(metavar="DEVICE", help="List the settings that fit on one DEVICE.")] = None,
    response_tokens: Annotated[
        int | None, typer.Option(min=1, help="With --cluster or --fit: mean response length [rollout.max_tokens].")
    ] = None,
) -> None:
    """Show batches and memory of RECIPE without loading the model; fail if they do not fit.

    With --cluster, also show the step time if the device is known. Examples: 1x1:h200, 2x8:atlas-800t-a2, 16x8:h100.
    With --fit, show settings as key=value arguments. Examples: h100, "24 GB", h200:80 (80 GB of an H200).
    """
    if cluster is None and fit is None and response_tokens is not None:
        raise typer.BadParameter("needs --cluster or --fit", param_hint="--response-tokens")
    if cluster is not None and devices is not None:
        raise typer.BadParameter("cannot be combined with --devices", param_hint="--cluster")
    if fit is not None and (devices is not None or cluster is not None):
        raise typer.BadParameter("cannot be combined with --devices or --cluster", param_hint="--fit")

    from lockstep.recipe import load_recipe

    checked = load_recipe(recipe, overrides or [])

    if fit is not None:
        from lockstep.commands.fit import show_fit

        show_fit(checked, fit, response_tokens, lambda words: load_recipe(recipe, [*(overrides or []), *words]))
        return

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
    write("`lockstep recipes METHOD` prints the defaults of a method.")


@app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="[FILE.yaml]", help="The new recipe.")] = Path("recipe.yaml"),
    overrides: Overrides = None,
    method: Annotated[str | None, typer.Option(help="Training method: sft, dpo, grpo, or another one.")] = None,
    model: Annotated[str | None, typer.Option(metavar="DIR", help="The model's Hugging Face folder.")] = None,
    data: Annotated[str | None, typer.Option(metavar="PATH", help="Training rows.")] = None,
    val: Annotated[str | None, typer.Option(metavar="PATH", help="Validation rows.")] = None,
    reward: Annotated[
        str | None, typer.Option(metavar="FILE.py:NAME", help="Online methods: your reward function.")
    ] = None,
    teacher: Annotated[str | None, typer.Option(metavar="DIR", help="Distillation: the teacher's folder.")] = None,
) -> None:
    """Write a first recipe with comments; prompt for values that the options do not give.

    If the data exists, its rows are checked. Keys that the rows need are added to the recipe. If the rows do not fit
    the method, the command fails.
    """
    from lockstep.commands.init import choose, write_recipe

    for line in write_recipe(file, choose(file, method, model, data, val, reward, teacher, overrides or ())):
        write(line)


@app.command()
def tiny(folder: Path, seed: int = 0) -> None:
    """Write the embedded tiny model (a real Hugging Face folder, random weights) to FOLDER."""
    from lockstep.model.tiny import write_tiny

    write_tiny(folder, seed=seed)
    write(f"wrote a tiny Qwen2 model to {folder}")


@app.command()
def quickstart(overrides: Overrides = None) -> None:
    """Train a tiny model to add numbers with SFT, then with GRPO: minutes on a CPU, no network, no files needed.

    KEY=VALUE changes both runs, for example device=cpu. Files are written to quickstart/ and runs/.
    """
    from lockstep.commands.quickstart import run_quickstart

    run_quickstart(overrides or [], lambda words: app(words, standalone_mode=False))


@app.command()
def doctor(
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Check for this device instead of the one that `auto` selects.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
    pins: Annotated[
        str | None,
        typer.Option(metavar="STACK", help="Print requirements and install steps of a tested software stack."),
    ] = None,
) -> None:
    """Show what is installed, whether the versions are compatible, and how to fix problems."""
    from lockstep.doctor.doctor_report import run_doctor

    raise typer.Exit(run_doctor(device, json, pins))


@app.command()
def cache(
    clear: Annotated[
        str | None,
        typer.Option(metavar="PART|all", help="Delete this part of the cache: rows, folders, models, runs, or all."),
    ] = None,
) -> None:
    """Show the cache (encoded rows, converted models) and its size, or delete it."""
    from lockstep.commands.maintenance import cache_lines

    for line in cache_lines(clear):
        write(line)


@app.command(name="help")
def help_(
    topic: Annotated[str | None, typer.Argument(help="A topic or a command [lists the topics].")] = None,
    section: Annotated[str | None, typer.Argument(help="Print only this section of the page.")] = None,
    language: Annotated[
        str | None, typer.Option("--lang", metavar="en|zh", help="Language of the page [language of the terminal].")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Print a page of the documentation, or list the topics."""
    from lockstep.commands.help import open_page, show_page, show_topics, topics

    if topic is None:
        show_topics()
    elif topic not in topics() and topic in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        app([topic, "--help"])
    elif open_:
        open_page(topic, section, language)
    else:
        show_page(topic, section, language)


# The commands are registered in the order of their usual use. `--help` lists the commands in this order.
app.command()(answering.generate)
app.command()(answering.serve)
app.command(name="eval")(answering.evaluate)
app.command()(answering.sample)
app.command()(answering.pairs)


@app.command()
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="A run folder, or a log of another framework.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The run or log to compare with A.")],
    repeat: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN", help="A repetition of run A or B, to measure the noise; may be repeated."),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=NAME]", help="Compare this metric (name in A, name in B); may be repeated."),
    ] = None,
    bar: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PERCENT", help="Threshold for a metric; may be repeated.")
    ] = None,
    names: Annotated[
        Path | None,
        typer.Option(metavar="FILE.yaml", help="File that maps metric names of another framework to lockstep's."),
    ] = None,
    value: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the metric in the Value column of a tensorboard csv.")
    ] = None,
    shift: Annotated[
        int, typer.Option(metavar="N", help="Add N to B's step numbers if A and B count differently.")
    ] = 0,
    steps: Annotated[
        str | None, typer.Option(metavar="FIRST:LAST", help="Compare only these steps, as if the runs ended at LAST.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print all results as JSON.")] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Path of the HTML report [default: in B's run folder].")
    ] = None,
    record: Annotated[bool, typer.Option("--record", help="Add the result to the support table in --support.")] = False,
    support: Annotated[Path, typer.Option(metavar="FILE.md", help="The support table.")] = Path("docs/support.md"),
) -> None:
    """Compare two runs. Exit code 0: the runs train alike; 1: they differ; 2: undecided."""
    from lockstep.parity.compare.compare_runs import CompareOptions, compare_logs

    bars = dict(_bar(words) for words in bar or [])
    table = support if record else None
    span = _span(steps) if steps is not None else None
    options = CompareOptions(
        a, b, tuple(repeat or ()), tuple(metric or ()), bars, names, report, table, shift, value, span
    )
    raise typer.Exit(compare_logs(options, as_json=json))


@app.command()
def view(
    folder: Annotated[Path, typer.Argument(metavar="[RUNS_FOLDER]", help="Folder with your runs, or one run.")] = Path(
        "runs"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 means any free port.")] = 0,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Serve a web page with runs: metrics, samples, recipes, reports. The page is local and read-only."""
    from lockstep.commands.view import view_runs

    view_runs(folder, port, open_browser)


@app.command()
def replay(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder with recorded tensors (`tape=true`), or a recording.")
    ],
    overrides: Overrides = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="Replay on this device.")] = None,
    mode: Annotated[
        str,
        typer.Option(
            metavar="forced|chained|free",
            help="What each step takes from the recording: weights and data; only data; only initial weights.",
        ),
    ] = "forced",
    step: Annotated[list[int] | None, typer.Option(help="Replay only this step; may be repeated.")] = None,
    checklist: Annotated[
        bool, typer.Option("--checklist", help="Run the checks that device vendors recommend if results differ.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="For a recording of another framework: the trained model.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Replay RUN on another device, dtype, engine or number of processes, and report the first difference.

    Exit code 0: no difference exceeds the tolerance; 1: a difference exceeds the tolerance. KEY=VALUE changes the
    recipe, for example model.dtype=bf16 or rollout.engine=hf.
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
        Path | None, typer.Argument(metavar="[DIR]", help="The Hugging Face folder to write.", show_default=False)
    ] = None,
    step: Annotated[int | None, typer.Option(help="Export this checkpoint instead of the newest.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Export the best checkpoint, by `checkpoint.best`.")] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the adapter of a LoRA run as a PEFT folder, not merged.")
    ] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge an adapter into its base model (the default for a run).")
    ] = False,
    base: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Base model of the adapter [default: from the adapter's config]."),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", help="Also push the model to the Hugging Face hub, with a model card."),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Create a private hub repository.")] = False,
) -> None:
    """Write the model of a run as a Hugging Face folder with a model card."""
    from lockstep.commands.export import ExportOrder, export_to

    for line in export_to(run, folder, ExportOrder(step, best, adapter, merge, base, push, private)):
        write(line)


app.command()(converting.dequantize)
app.command()(converting.migrate)
app.command(name="import-gguf")(converting.import_gguf)


def _span(words: str) -> tuple[int, int]:
    first, _, last = words.partition(":")
    if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise typer.BadParameter(f"{words!r} is not a first and a last step such as 1:200", param_hint="--steps")
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
    """Entry point. A `Refusal` (user error) is printed to stderr; the exit code is 2, or 75 if a retry can help."""
    from lockstep.errors import STALLED, Interrupted, LostProcess, Refusal, refusal_of_machine

    never_fail_to_encode()
    warnings.showwarning = _show_warning
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
        # A full or read-only disk is a problem of the machine, not a bug of lockstep.
        machine = refusal_of_machine(error)
        if machine is None:
            raise
        _report(machine)
        sys.exit(2)


def _show_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """Prints the warning about a renamed recipe key in one line, on one rank only."""
    from lockstep.errors import RenamedKey

    if not issubclass(category, RenamedKey):
        _python_warning(message, category, *where, **more)
    elif os.environ.get("RANK", "0") == "0" and LAUNCHER not in os.environ:
        write(f"warning: {message}", error=True)


def _report(refusal: Exception) -> None:
    from lockstep.errors import Refusal
    from lockstep.run.console import print_problems

    rank = os.environ.get("RANK", "0")
    if rank != "0":
        # All ranks get the same bad input: rank 0 reports it, and torchrun ends the other ranks. If this rank still
        # runs after the wait, rank 0 has not failed, so this rank reports its own problem.
        time.sleep(60)
        write(f"rank {rank}:", error=True)
    assert isinstance(refusal, Refusal)
    print_problems(refusal)


if __name__ == "__main__":
    main()
