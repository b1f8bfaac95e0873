"""`lockstep plan`: the batch plan and the memory of a recipe as tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from lockstep.commands.plan_engines import engine_lines
from lockstep.data.dataset import Dataset
from lockstep.data.prompts import PromptSet
from lockstep.device.select import explain
from lockstep.preflight.async_worker import handed_lines
from lockstep.preflight.batch_plan import make_loader
from lockstep.preflight.memory_plan import MemoryPlan, refuse_misfit
from lockstep.preflight.prepare import PreparedOnline, prepare, prepare_online
from lockstep.preflight.reward_trial import try_rewards_here
from lockstep.recipe import Recipe
from lockstep.recipe.methods import ONLINE
from lockstep.run.console import Console
from lockstep.run.screen import Screen


def show_plan(recipe: Recipe, devices: int) -> None:
    """Prints first, refuses after: the numbers say what to change."""
    device, sentence = explain(recipe.device)
    console = Console.open()
    console.say(sentence)
    find = prepare_online if recipe.method in ONLINE else prepare
    prepared = find(recipe, device, devices, console, must_fit=False)
    counts = prepared.train.counts
    generates = recipe.method in ONLINE or bool(recipe.val.questions)
    console.banner(
        f"plan of {recipe.run.name}",
        [
            *[("data", note) for note in prepared.train.notes],
            *[("mix", share) for share in _mix(recipe, prepared.train)],
            ("tokens", counts.sentence()),
            ("left out", f"{counts.dropped:,} rows dropped, {counts.truncated:,} truncated"),
            *prepared.batches.lines(),
            ("parameters", f"{prepared.memory.parameters:,}, of which {prepared.memory.trained:,} trained"),
            ("checkpoint", f"{prepared.memory.checkpoint_bytes / 2**20:,.1f} MiB on disk"),
            *(engine_lines(recipe, device) if generates else []),
        ],
    )
    if isinstance(prepared, PreparedOnline):
        try_rewards_here(prepared, device, console)
    for remark in prepared.remarks:
        console.warn(remark)
    Screen.on_stdout().print(_memory_table(prepared.memory))
    for line in (*(freed.line() for freed in prepared.memory.freed), *handed_lines(prepared.memory, devices)):
        console.say(line)
    available = device.memory().total
    refuse_misfit(prepared.memory, available, device.name)
    console.say(f"fits: {device.name} has {available / 2**30:.1f} GiB")


def _mix(recipe: Recipe, train: Dataset[Any] | PromptSet) -> Iterator[str]:
    """Where weights mix the sources: what an epoch takes of each."""
    counts = make_loader(recipe, train).mixture.counts
    if counts is None:
        return
    for source, rows, count in zip(recipe.data.taken, train.sources, counts, strict=True):
        yield f"{source.path}: {count / sum(counts):.1%}, {count:,} rows an epoch from {len(rows):,}"


def _memory_table(memory: MemoryPlan) -> Table:
    table = Table(title="memory of one device, MiB (estimate)", title_justify="left")
    table.add_column("phase")
    for name in ("weights", "gradients", "optimizer", "activations", "total"):
        table.add_column(name, justify="right")
    for phase in memory.phases:
        parts = (phase.weights, phase.gradients, phase.optimizer, phase.activations, phase.total)
        table.add_row(phase.name, *[f"{part / 2**20:,.1f}" for part in parts])
    return table
