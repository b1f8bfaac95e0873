"""`lockstep plan`: prints the batch plan, memory, engines and cluster estimates of a recipe as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.table import Table

from lockstep.data.dataset import Dataset
from lockstep.data.encode.prompt_rows import PromptSet
from lockstep.device.base import Device
from lockstep.device.cpu import Cpu, host_memory
from lockstep.device.select import DEVICES, explain
from lockstep.device.serving import serving_on
from lockstep.doctor.engine_packages import engines_here, packages_in
from lockstep.doctor.local_machine import Machine
from lockstep.doctor.machine_facts import installed_packages
from lockstep.errors import Refusal
from lockstep.model.load_folder import DTYPES
from lockstep.preflight.async_worker import handed_lines, refuse_beside
from lockstep.preflight.batch_plan import memory_loader
from lockstep.preflight.checks import refuse_full_disk
from lockstep.preflight.cluster import OfflineSteps, OnlineSteps, StepSource, StepWork, TargetCluster, cluster_named
from lockstep.preflight.cluster_plan import Outlook, fitting, refuse_over, refuse_uncounted
from lockstep.preflight.memory_plan import MemoryPlan, Phase, refuse_misfit
from lockstep.preflight.model_sizes import Coded
from lockstep.preflight.prepared import Prepared, PreparedOnline, problems_of, refuse_each_once
from lockstep.preflight.run_checks import prepare_offline, prepare_online
from lockstep.preflight.step_time import PhaseTime
from lockstep.preflight.tower_sizes import image_load
from lockstep.preflight.user_trials import try_rewards
from lockstep.recipe import Recipe
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.registry import ENGINES, estimator_row
from lockstep.rollout.servers.adapter import ServerNeeds
from lockstep.rollout.servers.server_process import server_adapter_of
from lockstep.rollout.servers.weight_transports import by_collective, by_memory
from lockstep.run.checkpoint_writers import copy_fits
from lockstep.run.console import Console
from lockstep.run.screen import Screen

# For each engine, the flag that sets its fraction of device memory, and the default of that flag. The default of vLLM
# is that of versions 0.26 and 0.32; SGLang computes its default from the memory size and its settings.
SHARES: dict[str, tuple[str, float | None]] = {
    "vllm": ("--gpu-memory-utilization", 0.92),
    "sglang": ("--mem-fraction-static", None),
}


def engine_lines(recipe: Recipe, device: Device) -> list[tuple[str, str]]:
    """Describes the engine of the recipe, how it starts, and which other engines are installed."""
    machine, rollout = Machine(), recipe.rollout
    python = rollout.server.python
    packages = installed_packages(machine) if python is None else packages_in(machine, python)
    here = {engine.name: engine for engine in engines_here(packages, device.name)}
    engine = here[rollout.engine]
    lines: list[tuple[str, str]] = []
    if rollout.url is not None:
        urls = [rollout.url] if isinstance(rollout.url, str) else rollout.url
        lines.append(("engine", f"{engine.name} at {', '.join(urls)}, checked when the run starts"))
    elif ENGINES[engine.name].served:
        lines.append(("engine", f"{engine.name}, started by the run: {engine.found or engine.explanation()}"))
        lines += _start(recipe, device)
    else:
        lines.append(("engine", f"{engine.name} ({engine.found})"))
    if ENGINES[engine.name].served:
        lines.append(("engine weights", _weight_sync(recipe, device)))
    others = [other for other in here.values() if other.name != engine.name]
    lines += [
        ("other engines", f"{other.name} ({other.found})" if other.found else f"not {other.name}: {other.missing}")
        for other in others
    ]
    return lines


def _weight_sync(recipe: Recipe, device: Device) -> str:
    """Describes how trained weights are sent to the inference server, for a run with one process."""
    rollout, files = recipe.rollout, "through files"
    if by_collective(rollout, adapter=recipe.model.lora is not None):
        return f"by {device.collective}"
    if by_memory(rollout, server_adapter_of(rollout), device, 1, adapter=recipe.model.lora is not None):
        memory = "through the run's device memory"
        return memory if rollout.weight_sync == "memory" else f"{memory}, otherwise {files}"
    return files


def _start(recipe: Recipe, device: Device) -> list[tuple[str, str]]:
    rollout, lora = recipe.rollout, recipe.model.lora
    rank = None if lora is None or lora.rank is None else lora.rank * (2 if lora.init.startswith("pissa") else 1)
    routes = recipe.algorithm.routing_replay == "rollout"
    needs = ServerNeeds(device.name, rollout.sleep, rank, rollout.interactive, rollout.precision, routes)
    settings = [
        *server_adapter_of(rollout).settings(needs).items(),
        *serving_on(device.name, rollout.engine).settings(sleep=rollout.sleep),
    ]
    lines = [("engine setting", f"{what}: {why}") for what, why in settings]
    shared = rollout.server.devices is None and rollout.server.replicas is None
    if device.visible_variable is not None and shared:
        lines.append(("engine memory", _memory(rollout)))
    return lines


def _memory(rollout: RolloutSettings) -> str:
    """Describes how much device memory an inference server takes if it shares the devices of the run."""
    flag, default = SHARES[rollout.engine]
    when = "while it is awake" if rollout.sleep else "also while the run trains (rollout.sleep releases the memory)"
    value = _flag_value(rollout.server.args, flag)
    if value is not None:
        return f"{flag} {value}: the engine takes this fraction of the memory of the run's devices, {when}"
    share = (
        "most of the memory"
        if default is None
        else f"{default:g}, which leaves {1 - default:.0%} of the memory to the run"
    )
    return (
        f"the engine's default fraction of device memory, {share}, {when}: lower it with rollout.server.args "
        f'[{flag}, "0.5"], or use other devices with rollout.server.devices'
    )


def _flag_value(words: Sequence[str], flag: str) -> str | None:
    """Returns the value of a flag on a command line. Of repeated flags the last value is used, as in the engines."""
    value = None
    for word, after in zip(words, [*words, ""][1:], strict=True):
        if word == flag or word.startswith(f"{flag}="):
            value = after if word == flag else word.partition("=")[2]
    return value


def show_cluster_plan(recipe: Recipe, text: str, response_tokens: int | None) -> None:
    """`lockstep plan --cluster`: prints memory, time and traffic, then fails if the run does not fit."""
    cluster = cluster_named(text)
    refuse_other_count(recipe, cluster)
    console = Console.open()
    prepared, outlook = open_outlook(recipe, cluster, response_tokens, console)
    steps, counted = outlook.steps, outlook.models.counted
    console.banner(
        f"plan of {recipe.run.name} on {cluster}",
        [
            ("devices", f"{cluster.devices}, {cluster.memory / 2**30:,.1f} GiB each"),
            *prepared.batches.lines(),
            ("parameters", f"{counted.parameters:,}, of which {counted.trained:,} trained"),
            *_quantized_lines(recipe, counted.coded),
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


def open_outlook(
    recipe: Recipe, cluster: TargetCluster, response_tokens: int | None, console: Console
) -> tuple[Prepared | PreparedOnline, Outlook]:
    """Checks a recipe for devices that need not be present, and returns what its predictions need. Rows and prompts are
    read on this machine; the speeds of the devices come from a table."""
    _refuse_streamed(recipe)
    online = recipe.method in ONLINE
    _refuse_response_tokens(recipe, response_tokens, online)
    refuse_uncounted(recipe.parallel)
    prepared: Prepared | PreparedOnline
    if online:
        refuse_beside(recipe, DEVICES[cluster.chip.kind], cluster.each, None)
        prepared = prepare_online(recipe, Cpu(), cluster.devices, console, plans=True, local=False)
    else:
        prepared = prepare_offline(recipe, Cpu(), cluster.devices, console, plans=True, local=False)
    steps: StepSource
    if isinstance(prepared, PreparedOnline):
        steps = OnlineSteps.of(prepared.train.items, response_tokens or recipe.rollout.max_tokens)
    else:
        steps = OfflineSteps(prepared)
    return prepared, Outlook.of(recipe, prepared.config, steps, image_load(prepared.train.items, recipe.model))


def _waiting(outlook: Outlook, cluster: TargetCluster) -> Iterable[str]:
    """Warns about sequences that wait for KV cache and about idle devices."""
    recipe, work = outlook.recipe, outlook.steps.work(outlook.recipe)
    if recipe.method in ONLINE and (held := outlook.held(cluster)) is not None:
        cache = outlook.memory(cluster).cache / 2**30
        yield f"the KV cache takes {cache:,.1f} GiB and holds about {held:,} sequences at once; further sequences wait"
    groups, rows = cluster.devices // recipe.parallel.group, max(1, work.rows // work.updates)
    if groups > rows:
        idle = (groups - rows) * recipe.parallel.group
        yield f"{idle:,} of {cluster.devices:,} devices have no rows to train: an update has {rows:,} rows"


def _table(phases: Sequence[Phase], times: Sequence[PhaseTime]) -> Table:
    table = Table(title="one device per step: GiB (estimate), seconds (estimate)", title_justify="left")
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
        yield f"no step time: the table has no FLOP/s for {chip.name} in {recipe.model.dtype}"
        return
    best, worst = sum(time.hidden for time in times), sum(time.open for time in times)
    ends = _figure(best) if worst < 1.005 * best else f"{_figure(best)} to {_figure(worst)}"
    each = work.whole / worst / cluster.devices
    yield f"step time: {ends} s; {each:,.0f} tokens per second and device"
    traffic = [sum(parts) for parts in zip(*(time.traffic for time in times), strict=True)]
    names = ("all-gather", "reduce-scatter", "all-reduce", "exchange")
    volumes = [f"{name} {size / 1e9:,.1f} GB" for name, size in zip(names, traffic, strict=True) if size]
    if volumes:
        yield f"traffic to each device per step: {', '.join(volumes)}"
    if work.prompts:
        mean = f"mean response length: {work.response_tokens:,.0f} tokens (--response-tokens)"
        limit = recipe.rollout.max_tokens
        yield mean + (f"; maximum: {limit:,}" if work.response_tokens < limit else "")
    yield from _remarks(recipe, cluster)


def _remarks(recipe: Recipe, cluster: TargetCluster) -> Iterable[str]:
    chip, online = cluster.chip, recipe.method in ONLINE
    if chip.measured and cluster.devices == 1:
        yield f"the speeds of {chip.name} are measured; `lockstep help scale` gives the error of the estimate"
    elif chip.measured:
        yield f"the speed of one {chip.name} is measured, link speeds are the vendor's: not tested on several devices"
    else:
        yield f"the speeds of {chip.name} are the vendor's, scaled by the efficiency of an H200: not tested on it"
    if chip.published is not None and not (chip.measured and cluster.devices == 1):
        least, most = chip.published
        errors = f"{least:+} %" if least == most else f"{least:+} to {most:+} %"
        yield f"error against published step times of other frameworks on {chip.name}: {errors}"
    if unchecked := _unchecked(recipe):
        yield f"no measurement checks the time of {', '.join(unchecked)}"
    if online and not ENGINES[recipe.rollout.engine].paged:
        yield f"generation is estimated for the built-in engine, not for {recipe.rollout.engine}"
    if online and recipe.algorithm.dynamic_sampling.max_gen_batches > 1:
        yield "prompt groups sampled again (algorithm.dynamic_sampling) are not counted"
    if online and recipe.rollout.max_staleness is not None:
        yield "generation and training are counted one after the other, without overlap"
        if recipe.rollout.worker_device:
            yield f"{cluster.devices} additional devices generate (rollout.worker_device)"
    if recipe.parallel.tensor_parallel > 1:
        yield (
            "the latency of the parallel.tensor_parallel all-reduce is not included: "
            "steps take longer, especially decoding"
        )
    if recipe.parallel.expert_parallel > 1:
        yield "all experts are assumed to get equally many tokens (parallel.expert_parallel)"
    yield "not counted: rewards and their models, validation, loading, writing checkpoints"


def _unchecked(recipe: Recipe) -> list[str]:
    """Returns the keys of the recipe whose time no measured or published row of bench/predictions.py contains."""
    parallel, found = recipe.parallel, []
    for name in ("context_parallel", "expert_parallel"):
        if getattr(parallel, name) > 1:
            found.append(f"parallel.{name}")
    if parallel.offload in ("params", "all"):
        found.append(f"parallel.offload={parallel.offload}")
    for name in ("offload_critic", "offload_reference", "offload_teacher"):
        if getattr(parallel, name) not in (False, "none"):
            found.append(f"parallel.{name}")
    if recipe.method in ONLINE and estimator_row(recipe.algorithm.advantage).critic:
        found.append("the critic")
    return found


def _proposal(outlook: Outlook, cluster: TargetCluster) -> str | None:
    found = fitting(outlook, cluster)
    if found is None:
        return None
    return f"the run fits with {found}" if found.cluster == cluster else f"the run fits on {found.cluster} with {found}"


def refuse_other_count(recipe: Recipe, cluster: TargetCluster) -> None:
    """Refuses a plan if `parallel.devices` does not match the cluster."""
    devices = recipe.parallel.devices
    if devices is not None and devices != cluster.devices:
        raise Refusal.at(
            "parallel.devices",
            f"is {devices}, and {cluster} has {cluster.devices} devices",
            f"plan with parallel.devices={cluster.devices}",
            code="wrong-process-count",
        )


def _refuse_response_tokens(recipe: Recipe, response_tokens: int | None, online: bool) -> None:
    if response_tokens is None:
        return
    if not online:
        raise Refusal.at(
            "--response-tokens", f"method {recipe.method} generates nothing", "remove it", code="unused-key"
        )
    if response_tokens > recipe.rollout.max_tokens:
        raise Refusal.at(
            "--response-tokens",
            f"{response_tokens} exceeds rollout.max_tokens={recipe.rollout.max_tokens}",
            "give the expected mean length of a response",
            code="out-of-range",
        )


def _refuse_streamed(recipe: Recipe) -> None:
    """Refuses to plan streamed rows: the plan counts all rows, and streamed rows are counted while training."""
    if recipe.data.streaming:
        raise Refusal.at(
            "data.streaming",
            "lockstep plan counts all rows, and streamed rows are counted only while training",
            "plan with some of the files: lockstep plan RECIPE data.streaming=false data.train=FILE",
            code="unsupported-combination",
        )


def _checkpoint_line(recipe: Recipe, memory: MemoryPlan, device: Device) -> str:
    """Describes the size of a checkpoint on disk and, if training continues while it is written, in host memory."""
    mebibytes = f"{memory.checkpoint_bytes / 2**20:,.1f} MiB"
    if recipe.checkpoint.every is None or not recipe.checkpoint.asynchronous:
        return f"{mebibytes} on disk"
    free = max(0, host_memory().free - (memory.peak.total if isinstance(device, Cpu) else 0))
    if not copy_fits(memory.checkpoint_bytes, free):
        room = f"{free / 2**20:,.1f} MiB of host memory are free for a copy"
        return f"{mebibytes} on disk; training waits while it is written: {room}"
    return f"{mebibytes} on disk, and {mebibytes} of host memory for a copy while it is written"


def show_plan(recipe: Recipe, devices: int) -> None:
    """`lockstep plan`: prints batches and memory, then fails if the run does not fit."""
    _refuse_streamed(recipe)
    device, sentence = explain(recipe.device)
    console = Console.open()
    console.say(sentence)
    prepare = prepare_online if recipe.method in ONLINE else prepare_offline
    prepared = prepare(recipe, device, devices, console, plans=True)
    counts = prepared.train.counts
    generates = recipe.method in ONLINE or bool(recipe.val.questions)
    console.banner(
        f"plan of {recipe.run.name}",
        [
            *[("data", note) for note in prepared.train.notes],
            *[("mix", share) for share in _mix(recipe, prepared.train)],
            ("tokens", prepared.train.sentence),
            ("removed", f"{counts.dropped:,} rows dropped, {counts.truncated:,} truncated"),
            *prepared.batches.lines(),
            ("parameters", f"{prepared.memory.parameters:,}, of which {prepared.memory.trained:,} trained"),
            *_quantized_lines(recipe, prepared.memory.coded),
            ("checkpoint", _checkpoint_line(recipe, prepared.memory, device)),
            *(engine_lines(recipe, device) if generates else []),
        ],
    )
    if isinstance(prepared, PreparedOnline):
        try_rewards(prepared, device, console)
    for remark in prepared.remarks:
        console.warn(remark)
    Screen.on_stdout().print(_memory_table(prepared.memory))
    for line in (*(freed.line() for freed in prepared.memory.freed), *handed_lines(prepared.memory, devices)):
        console.say(line)
    available = device.memory().total
    refuse_each_once(
        [
            *problems_of(refuse_misfit, prepared.memory, available, device.name),
            *problems_of(refuse_full_disk, recipe, prepared.memory),
        ]
    )
    console.say(f"fits: {device.name} has {available / 2**30:.1f} GiB")


def _quantized_lines(recipe: Recipe, coded: Coded) -> list[tuple[str, str]]:
    """Returns how many weights `model.quantize` stores, in how many bytes, and the memory of a dequantised matrix."""
    if not coded.parameters:
        return []
    size = DTYPES[recipe.model.dtype].itemsize
    room = f"a dequantised matrix takes {coded.workspace(size) / 2**20:,.1f} MiB at a time"
    stored = f"{coded.bytes / 2**20:,.1f} MiB instead of {coded.parameters * size / 2**20:,.1f}"
    return [("quantised", f"{coded.parameters:,} weights in {recipe.model.quantize}: {stored}; {room}")]


def _mix(recipe: Recipe, train: Dataset[Any] | PromptSet) -> Iterator[str]:
    """Yields the rows per epoch of each data source, if the sources are mixed by weight."""
    counts = memory_loader(recipe, train).mixture.counts
    if counts is None:
        return
    for source, rows, count in zip(recipe.data.taken, train.sources, counts, strict=True):
        yield f"{source.path}: {count / sum(counts):.1%}, {count:,} rows per epoch from {len(rows):,}"


def _memory_table(memory: MemoryPlan) -> Table:
    table = Table(title="memory of one device, MiB (estimate)", title_justify="left")
    table.add_column("phase")
    for name in ("weights", "gradients", "optimizer", "activations", "total"):
        table.add_column(name, justify="right")
    for phase in memory.phases:
        parts = (phase.weights, phase.gradients, phase.optimizer, phase.activations, phase.total)
        table.add_row(phase.name, *[f"{part / 2**20:,.1f}" for part in parts])
    return table
