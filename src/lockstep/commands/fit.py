"""`lockstep plan --fit`: prints the settings that fit on a device as a table, and their recipe keys."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

from rich.table import Table

from lockstep.commands.plan import open_outlook, refuse_other_count
from lockstep.errors import Refusal
from lockstep.preflight.cluster import TargetCluster
from lockstep.preflight.fit_plan import FitSearch, FittingSetting, device_to_fit, refuse_no_setting
from lockstep.recipe import Recipe
from lockstep.run.console import Console
from lockstep.run.screen import Screen

# What the short labels of the table mean, in the order of the levers.
LABELS = {
    "full": "all weights are trained",
    "lora": "an adapter of this rank is trained",
    "optim. host": "the optimizer state stays in host memory",
    "attention": "an adapter of the attention alone, because quantised experts get none",
    "ckpt": "gradient checkpointing",
    "ckpt host": "gradient checkpointing, the inputs of the layers stay in host memory",
    "tiles": "feed-forwards run in tiles",
    "frozen host": "reference, teacher and reward models stay in host memory",
    "tok": "tokens of a micro-batch",
    "cache": "size of the KV cache",
}


def show_fit(
    recipe: Recipe, text: str, response_tokens: int | None, reload: Callable[[Sequence[str]], Recipe]
) -> list[FittingSetting]:
    """Prints the settings with which the recipe fits on the device `text`, the fastest first. `reload` loads the recipe
    with further `key=value` arguments. Raises a refusal if no setting fits."""
    target = device_to_fit(text)
    refuse_other_count(recipe, target)
    _refuse_groups(recipe)
    console = Console.open()
    _, outlook = open_outlook(recipe, target, response_tokens, console)
    search = FitSearch(outlook, target, reload)
    settings = search.settings()
    if not settings:
        refuse_no_setting(search, target)
    screen = Screen.on_stdout()
    screen.print(_table(recipe, target, settings))
    for line in _legend(settings):
        console.say(line)
    console.say("To use a setting, add its arguments to `lockstep train RECIPE`:")
    for number, setting in enumerate(settings, 1):
        # Arguments are not broken into lines, so that they can be copied.
        screen.print(f"{number}: {shlex.join(setting.words) or '(the recipe as it is)'}", soft_wrap=True)
    console.say(_remark(target))
    return settings


def _refuse_groups(recipe: Recipe) -> None:
    for key in ("tensor_parallel", "expert_parallel", "context_parallel"):
        if getattr(recipe.parallel, key) > 1:
            raise Refusal.at(
                f"parallel.{key}",
                f"is {getattr(recipe.parallel, key)}, and --fit plans for one device",
                f"set parallel.{key}=1, or use --cluster",
                code="wrong-process-count",
            )


def _table(recipe: Recipe, target: TargetCluster, settings: Sequence[FittingSetting]) -> Table:
    room = f"{target.chip.name} ({target.memory / 1e9:,.1f} GB)"
    table = Table(title=f"settings of {recipe.run.name} that fit on {room}, predicted", title_justify="left")
    table.add_column("", justify="right")
    table.add_column("setting")
    for name in ("peak GB", "phase", "step s", "tok/s", "speed"):
        table.add_column(name, justify="left" if name == "phase" else "right", no_wrap=True)
    fastest = settings[0].seconds
    for number, setting in enumerate(settings, 1):
        seconds = setting.seconds
        times = ("", "", "") if seconds is None or not fastest else _times(seconds, setting.tokens, fastest)
        table.add_row(str(number), setting.label, f"{setting.peak.total / 1e9:,.1f}", setting.peak.name, *times)
    return table


def _times(seconds: float, tokens: float, fastest: float) -> tuple[str, str, str]:
    shown = f"{seconds:,.2f}" if seconds < 1000 else f"{seconds:,.0f}"
    return shown, f"{tokens / seconds:,.0f}", f"{fastest / seconds:.0%}"


def _legend(settings: Sequence[FittingSetting]) -> list[str]:
    used = {label for setting in settings for label in setting.labels}
    words = {part for label in used for part in (label, *label.split())}
    return [f"{label}: {meaning}" for label, meaning in LABELS.items() if label in words]


def _remark(target: TargetCluster) -> str:
    chip = target.chip
    if chip.measured:
        return "Memory and speed were predicted; `lockstep help scale` compares predictions with measurements."
    return f"The speeds of {chip.name} are the vendor's, scaled by the efficiency of an H200: not tested on it."
