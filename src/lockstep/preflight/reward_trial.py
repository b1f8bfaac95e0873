"""The scorer of an online run, opened for the sources of its rows and tried before a weight is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.device.base import Device
from lockstep.preflight.prepare import PreparedOnline
from lockstep.reward.scorer import Scorer
from lockstep.run.console import Console
from lockstep.run.folder import run_folder
from lockstep.run.runtime import Runtime


@contextmanager
def open_scorer(prepared: PreparedOnline, runtime: Runtime) -> Iterator[Scorer]:
    sources = {*prepared.train.data_sources, *(question.data_source for question in prepared.questions)}
    output = run_folder(prepared.recipe).reward_output(runtime.world.rank)
    device = runtime.device.torch_device(runtime.world.local_rank)
    recipe, offload = prepared.recipe, prepared.recipe.parallel.offload_reward
    with Scorer.open(recipe.reward, sorted(sources), device, output=output, offload=offload) as scorer:
        _try_rewards(scorer, prepared, runtime.console)
        yield scorer


def try_rewards_here(prepared: PreparedOnline, device: Device, console: Console) -> None:
    """The trial of `open_scorer` for a plan: of rewards that need no weights and no other server."""
    reward = prepared.recipe.reward
    elsewhere = [name for name in ("model", "process", "remote") if getattr(reward, name) is not None]
    if elsewhere:
        console.say(f"reward.{', reward.'.join(elsewhere)}: tried when training starts, not by a plan")
        return
    sources = {*prepared.train.data_sources, *(question.data_source for question in prepared.questions)}
    with Scorer.open(reward, sorted(sources), device.torch_device(0)) as scorer:
        _try_rewards(scorer, prepared, console)


def _try_rewards(scorer: Scorer, prepared: PreparedOnline, console: Console) -> None:
    with console.task("Trying the rewards on real rows", None):
        tried = scorer.dry_run([*prepared.train.questions, *prepared.questions])
    for line in tried.lines:
        console.say(line)
    for warning in tried.warnings:
        console.warn(warning)
