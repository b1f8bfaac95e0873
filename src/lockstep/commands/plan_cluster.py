"""`lockstep plan --cluster`: memory, time and traffic of a recipe on devices that need not be here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from lockstep.device.cpu import Cpu
from lockstep.device.select import DEVICES
from lockstep.errors import Refusal
from lockstep.preflight.async_worker import handed_lines, refuse_beside
from lockstep.preflight.cluster import OfflineSteps, OnlineSteps, StepSource, StepWork, TargetCluster, cluster_named
from lockstep.preflight.cluster_plan import Outlook, fitting, refuse_over, refuse_uncounted
from lockstep.preflight.memory_plan import Phase
from lockstep.preflight.prepare import Prepared, PreparedOnline, prepare, prepare_online
from lockstep.preflight.step_time import PhaseTime
from lockstep.recipe import Recipe
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.registry import ENGINES
from lockstep.run.console import Console
from lockstep.run.screen import Screen


def show_cluster_plan(recipe: Recipe, text: str, response_tokens: int | None) -> None:
    """Prints first, refuses after: the numbers say what to change."""
    cluster = cluster_named(text)
    online = recipe.method in ONLINE
    _refuse_response_tokens(recipe, response_tokens, online)
    refuse_uncounted(recipe.parallel)
    _refuse_other_count(recipe, cluster)
    console = Console.open()
    # Rows and prompts are read here; what depends on the device comes from the table.
    prepared: Prepared | PreparedOnline
    if online:
        refuse_beside(recipe, DEVICES[cluster.chip.kind], cluster.each, None)
        prepared = prepare_online(recipe, Cpu(), cluster.devices, console, must_fit=False, here=False)
    else:
        prepared = prepare(recipe, Cpu(), cluster.devices, console, must_fit=False)
    steps: StepSource
    if isinstance(prepared, PreparedOnline):
        steps = OnlineSteps.of(prepared.train.items, response_tokens or recipe.rollout.max_tokens)
    else:
        steps = OfflineSteps(prepared)
    outlook = Outlook.of(recipe, prepared.config, steps)
    counted = outlook.models.counted
    console.banner(
        f"plan of {recipe.run.name} on {cluster}",
        [
            ("devices", f"{cluster.devices}, {cluster.memory / 2**30:,.1f} GiB each"),
            *prepared.batches.lines(),
            ("parameters", f"{counted.parameters:,}, of which {counted.trained:,} trained"),
        ],
    )
    times = outlook.times(cluster)
    Screen.on_stdout().print(_table(outlook.phases(cluster), times or []))
    for line in (
        *handed_lines(outlook.memory(cluster), cluster.each),
        *_lines(recipe, cluster, steps.work(recipe), times),
        *_waiting(outlook, cluster),
    ):
        console.say(line)
    if outlook.over(cluster):
        refuse_over(outlook, cluster, _proposal(outlook, cluster))
    console.say(f"fits: {cluster.chip.name} has {cluster.memory / 2**30:.1f} GiB")


def _waiting(outlook: Outlook, cluster: TargetCluster) -> Iterable[str]:
    """Sequences without a place in the cache, and devices without a sequence."""
    recipe, work = outlook.recipe, outlook.steps.work(outlook.recipe)
    if recipe.method in ONLINE and (held := outlook.held(cluster)) is not None:
        cache = outlook.memory(cluster).cache / 2**30
        yield f"the KV cache takes {cache:,.1f} GiB and holds about {held:,} sequences at once: the others wait"
    groups, rows = cluster.devices // recipe.parallel.group, max(1, work.rows // work.updates)
    if groups > rows:
        idle = (groups - rows) * recipe.parallel.group
        yield f"{idle:,} of {cluster.devices:,} devices have nothing to train on: an update has {rows:,} rows"


def _table(phases: Sequence[Phase], times: Sequence[PhaseTime]) -> Table:
    table = Table(title="a device in a step: GiB (estimate), seconds (reckoned)", title_justify="left")
    table.add_column("phase")
    for name in ("weights", "grads", "optim.", "activ.", "total", "comp. s", "links s"):
        table.add_column(name, justify="right")
    by_name = {time.name: time for time in times}
    for phase in phases:
        parts = (phase.weights, phase.gradients, phase.optimizer, phase.activations, phase.total)
        table.add_row(phase.name, *[f"{part / 2**30:,.1f}" for part in parts], *_seconds(by_name.pop(phase.name, None)))
    for time in by_name.values():
        table.add_row(time.name, *[""] * 5, *_seconds(time))
    return table


def _seconds(time: PhaseTime | None) -> tuple[str, str]:
    return ("", "") if time is None else (_figure(time.computing), _figure(time.waiting + time.links + time.host))


def _figure(seconds: float) -> str:
    return f"{seconds:,.2f}" if seconds < 1000 else f"{seconds:,.0f}"


def _lines(recipe: Recipe, cluster: TargetCluster, work: StepWork, times: Sequence[PhaseTime] | None) -> Iterable[str]:
    chip = cluster.chip
    if times is None:
        yield f"no time: the table has no FLOP/s of {chip.name} in {recipe.model.dtype}"
        return
    best, worst = sum(time.hidden for time in times), sum(time.open for time in times)
    ends = _figure(best) if worst < 1.005 * best else f"{_figure(best)} to {_figure(worst)}"
    each = work.whole / worst / cluster.devices
    yield f"a step: {ends} s; {each:,.0f} tokens a second and device"
    traffic = [sum(parts) for parts in zip(*(time.traffic for time in times), strict=True)]
    names = ("all-gather", "reduce-scatter", "all-reduce", "exchange")
    told = [f"{name} {size / 1e9:,.1f} GB" for name, size in zip(names, traffic, strict=True) if size]
    if told:
        yield f"to each device in a step: {', '.join(told)}"
    if work.prompts:
        mean = f"responses of {work.response_tokens:,.0f} tokens are reckoned with (--response-tokens)"
        limit = recipe.rollout.max_tokens
        yield mean + (f"; at most, one goes on to {limit:,}" if work.response_tokens < limit else "")
    yield from _remarks(recipe, cluster)


def _remarks(recipe: Recipe, cluster: TargetCluster) -> Iterable[str]:
    chip, online = cluster.chip, recipe.method in ONLINE
    if chip.measured and cluster.devices == 1:
        yield f"speeds of {chip.name} were measured; see docs/scale.md for the error"
    elif chip.measured:
        yield f"one {chip.name} was measured, links are the maker's: nothing was run on several"
    else:
        yield f"speeds of {chip.name} are the maker's times what an H200 reaches: nothing was run on it"
    if online and not ENGINES[recipe.rollout.engine].paged:
        yield f"generation is reckoned for the built-in engine, not for {recipe.rollout.engine}"
    if online and recipe.algorithm.dynamic_sampling.rounds > 1:
        yield "groups that are sampled anew (algorithm.dynamic_sampling) are not counted"
    if online and recipe.rollout.max_staleness is not None:
        yield "generation and training are counted one after the other"
        if recipe.rollout.worker_device:
            yield f"besides those that train, {cluster.devices} devices generate (rollout.worker_device)"
    if recipe.parallel.tensor > 1:
        yield "the latency of parallel.tensor's sums is not known: a step takes longer, decoding above all"
    yield "not counted: rewards and their models, validation, loading, writing checkpoints"


def _proposal(outlook: Outlook, cluster: TargetCluster) -> str | None:
    found = fitting(outlook, cluster)
    if found is None:
        return None
    return f"this fits: {found}" if found.cluster == cluster else f"this fits on {found.cluster}: {found}"


def _refuse_other_count(recipe: Recipe, cluster: TargetCluster) -> None:
    """`parallel.devices` of the recipe is what it would be started with."""
    asked = recipe.parallel.devices
    if asked is not None and asked != cluster.devices:
        raise Refusal.at(
            "parallel.devices",
            f"is {asked}, and {cluster} has {cluster.devices} devices",
            f"plan with parallel.devices={cluster.devices}",
        )


def _refuse_response_tokens(recipe: Recipe, response_tokens: int | None, online: bool) -> None:
    if response_tokens is None:
        return
    if not online:
        raise Refusal.at("--response-tokens", f"method {recipe.method} generates nothing", "leave it out")
    if response_tokens > recipe.rollout.max_tokens:
        raise Refusal.at(
            "--response-tokens",
            f"{response_tokens} is over rollout.max_tokens={recipe.rollout.max_tokens}",
            "say the mean length that you expect",
        )
