"""What a run writes: folder, metrics, samples, trackers, console. Only rank 0 writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.data.encode.chat_template import is_named, template_text
from lockstep.device.base import Device
from lockstep.functions import is_function_path
from lockstep.masking import sources
from lockstep.model.fingerprint import model_fingerprint
from lockstep.model.resolve import model_folder
from lockstep.parallel.world import World
from lockstep.preflight.prepared import Prepared, PreparedOnline
from lockstep.recipe import Recipe
from lockstep.recipe.loader import dump_recipe, resolved
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.registry import plugin_file
from lockstep.run.console import Console
from lockstep.run.files import checksum
from lockstep.run.folder import RunFolder
from lockstep.run.metrics import MetricsLog, Phases, append_text, missing_steps, read_metrics, rewind_lines
from lockstep.run.model_card import before_and_after
from lockstep.run.sample_log import MOST_TOKENS, TokenTexts, sample_line, token_details
from lockstep.run.trackers.base import open_sinks
from lockstep.train.advantages import Advantages
from lockstep.train.experience import Experience
from lockstep.train.rollouts import Rollouts
from lockstep.types import Rollout

# The user's own code that a run uses, by content: another file of the same name is another run.


def own_code(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """By key: what the recipe says, and the SHA-256 of the file it leads to (None where there is no file to read).

    What such a file imports in turn is not looked at.
    """
    named = {"data.reader": recipe.data.reader}
    if recipe.method in ONLINE:
        named["reward.function"] = recipe.reward.function
        named["rollout.function"] = recipe.rollout.function
        named["algorithm.advantage"] = recipe.algorithm.advantage
        named["algorithm.loss"] = recipe.algorithm.loss
    functions = {key: value for key, value in named.items() if value is not None and is_function_path(value)}
    files = {key: (value, Path(value.rpartition(":")[0]).expanduser()) for key, value in functions.items()}
    plugins = {f"run.plugins.{word}": (word, plugin_file(word)) for word in recipe.run.plugins}
    return {
        key: {"name": name, "sha256": checksum(file) if file is not None and file.is_file() else None}
        for key, (name, file) in {**files, **plugins}.items()
    }


def changed_code(before: Any, now: dict[str, dict[str, Any]]) -> list[str]:
    """Of a run that goes on: what has other content than in its earlier part."""
    if not isinstance(before, dict):
        return []
    return [
        f"{key} {told['name']}: the file is another one than before this run was resumed"
        for key, told in now.items()
        if isinstance(before.get(key), dict) and before[key].get("sha256") != told["sha256"]
    ]


# What a run writes and says: its folder, metrics, samples, trackers, console and clock. Rank 0 alone writes.


class Run:
    def __init__(
        self, prepared: Prepared | PreparedOnline, folder: RunFolder, device: Device, world: World, console: Console
    ):
        self.prepared, self.folder, self.device, self.world, self.console = prepared, folder, device, world, console
        self.recipe = prepared.recipe
        self.phases = Phases(device.synchronise, self._stage)
        self.metrics = MetricsLog(folder.metrics)
        settings = self.recipe.log
        self.trackers = open_sinks(list(settings.track), folder, settings.project, console) if world.main else []
        self.fingerprint = self._fingerprint() if world.main else {}
        self.engine: dict[str, Any] = {}
        """Which engine generates, and its version; nothing where none does."""
        self.fallbacks: dict[str, int] | None = None
        """Operators of the first step that ran on the host for want of a kernel; None before that step."""
        self.resumed: dict[str, Any] = {}
        """After which step the run was resumed, the keys that changed, and the changed models that were accepted."""
        self._step = 0
        self._token_texts = TokenTexts(lambda ids: str(prepared.tokenizer.decode(ids)))
        self._unwritten: Callable[[], None] | None = None

    def _fingerprint(self) -> dict[str, Any]:
        """What is trained, by content, and what kind of model it is."""
        architectures = getattr(self.prepared.config, "architectures", None) or ["unknown"]
        return {
            **model_fingerprint(model_folder(self.recipe.model.path), self.prepared.tokenizer),
            "architecture": architectures[0],
            "parameters": self.prepared.memory.parameters,
        }

    # -- before the first step

    def begin(self, step: int, switches: dict[str, str], fused: dict[str, list[str]]) -> None:
        """Show the plan, write down what is trained, start the trackers. `fused` are the device's operators that stand
        in the place of a model's own modules."""
        self._show_plan(fused)
        steps = self.prepared.batches.steps
        if self.world.main:
            code = own_code(self.recipe)
            for change in changed_code(self.folder.read_env().get("own_code"), code) if step else []:
                self.console.warn(change)
            self._unwritten = partial(self._write_evidence, step, switches, fused, code)
            # What was trained so far, and where, is told already: who trains nothing more rewrites nothing of it.
            if step == 0 or not self.folder.recipe.is_file():
                self._tell()
            for tracker in self.trackers:
                tracker.start(self.recipe.run.name, resolved(self.recipe), step)
        self.console.begin(steps, step)

    def rewind(self, step: int) -> None:
        """Forget metrics and samples after `step`, from which the run goes on; before the first it is -1."""
        if self.world.main:
            self.metrics.rewind(step)
            rewind_lines(self.folder.samples, step)
            if step > 0:
                self._say_lost_steps(step)

    def logged(self) -> list[tuple[int, dict[str, float]]]:
        """The metrics of the steps so far, where this process writes them."""
        return read_metrics(self.folder.metrics) if self.world.main and self.folder.metrics.exists() else []

    def _say_lost_steps(self, last: int) -> None:
        file = self.folder.metrics
        logged = [step for step, _ in read_metrics(file)] if file.exists() else []
        if lost := missing_steps(logged, last):
            state = "has a hole" if logged else "is empty" if file.exists() else "is missing"
            self.console.warn(f"{file} {state}: the metrics of steps {lost} of {last} are lost; the weights are whole")

    def _tell(self) -> None:
        """What is trained from here on, once."""
        if self._unwritten is not None:
            self._unwritten()
            self._unwritten = None

    def _write_evidence(
        self, step: int, switches: dict[str, str], fused: dict[str, list[str]], code: dict[str, Any]
    ) -> None:
        self.folder.write_recipe(dump_recipe(self.recipe), step)
        if is_named(self.recipe.data):
            self.folder.template.write_text(template_text(self.recipe.data.template), encoding="utf-8")
        self.folder.write_env(
            {
                "device": self.device.facts(),
                "world_size": self.world.size,
                "determinism": switches,
                "data": self.prepared.fingerprints,
                "model": self.fingerprint,
                "engine": self.engine,
                "fused": fused,
                "own_code": code,
                **({"resumed": self.resumed} if self.resumed else {}),
                "secrets": sources(resolved(self.recipe)),
            }
        )

    def _show_plan(self, fused: dict[str, list[str]]) -> None:
        counts, memory = self.prepared.train.counts, self.prepared.memory
        trained = f"{memory.trained:,} of {memory.parameters:,} parameters"
        rows = [
            ("model", f"{self.recipe.model.path} ({trained} trained, {self.recipe.model.dtype})"),
            *[("data", note) for note in self.prepared.train.notes],
            ("tokens", counts.sentence()),
            *self.prepared.batches.lines(),
            ("memory", f"about {memory.peak.total / 2**30:.2f} GiB at the peak ({memory.peak.name})"),
            *[("fused", f"in the {name}: {', '.join(parts)}") for name, parts in fused.items() if parts],
            ("run folder", str(self.folder.path)),
        ]
        self.console.banner(f"{self.recipe.method} run {self.recipe.run.name}", rows)
        for remark in self.prepared.remarks:
            self.console.warn(remark)
        for number, what in ((counts.dropped, "dropped"), (counts.truncated, "truncated")):
            if number:
                self.console.warn(
                    f"{number:,} rows were {what}: over the limit (data.overlong={self.recipe.data.overlong}), or as "
                    "the data line says"
                )

    # -- a step

    @contextmanager
    def timed(self, step: int) -> Iterator[None]:
        """Step `step` (from 1) and its clock. The first one is also watched for operators the device does not have."""
        self._step = step
        self.world.started()
        with self.phases("step"):
            if self.fallbacks is not None:
                yield
                return
            with self.device.watched(allow_fallback=self.recipe.run.allow_fallback) as counts:
                yield
            self.fallbacks = dict(counts)

    def _stage(self, phase: str) -> AbstractContextManager[None]:
        return self.world.stage(f"step {self._step}" if phase == "step" else phase)

    def performance(self, tokens: float) -> dict[str, float]:
        timing = self.phases.take()
        return {
            "perf/throughput": tokens / (timing["timing_s/step"] * self.world.size),
            "perf/max_memory_gb": self.device.memory().peak / 1e9,
            **timing,
        }

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if self.world.main and metrics:
            self._tell()
            self.metrics.append(step, metrics)
            for tracker in self.trackers:
                tracker.log(step, metrics)
        if step:
            self.console.step(step, metrics)
        shown = {name: value for name, value in metrics.items() if name.startswith("val/")}
        if shown or not step:
            self.console.validation(step, shown)

    def store(
        self,
        step: int,
        kind: str,
        rollouts: Sequence[Rollout],
        advantages: Sequence[Sequence[float]] | None = None,
        *,
        tokens: bool = False,
    ) -> None:
        """Responses into samples.jsonl, as evidence. `advantages` are those of the tokens that the policy wrote; with
        `tokens` the lines tell of each token."""
        if not self.world.main or not rollouts:
            return
        told = advantages if advantages is not None else [None] * len(rollouts)
        lines = [
            sample_line(
                step,
                kind,
                rollout,
                own[0] if own else None,
                token_details(rollout, self._token_texts, own) if tokens else None,
            )
            for rollout, own in zip(rollouts, told, strict=True)
        ]
        append_text(self.folder.samples, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))

    # -- after the last step

    def summarise(self, step: int, use: tuple[str, str]) -> None:
        """What came out of the run; `use` says what one does with the model."""
        # A file that is missing was told of when the run was resumed.
        changes = before_and_after(read_metrics(self.folder.metrics) if self.folder.metrics.exists() else [])
        counts = self.prepared.train.counts
        if counts.dropped or counts.truncated:
            changes.append(("left out", f"{counts.dropped:,} rows dropped, {counts.truncated:,} truncated"))
        if self.fallbacks:
            named = ", ".join(f"{name} ({count})" for name, count in sorted(self.fallbacks.items()))
            changes.append(("ran on the CPU", f"in the first step, for want of a kernel: {named}"))
        rows = [*changes, ("run folder", str(self.folder.path)), use]
        self.console.banner(f"{self.recipe.run.name}: {step} steps done", rows)

    def close(self, *, ok: bool) -> None:
        self.console.end()
        for tracker in self.trackers:
            tracker.close(ok)


# Which responses of a step are stored in samples.jsonl.


def store_samples(run: Run, step: int, rollouts: Rollouts, experience: Experience, advantages: Advantages) -> None:
    """Some responses of the step, and of those that could not be scored the first."""
    count = run.recipe.log.samples
    if count:
        ends = [int(last) + 1 for last in experience.last_K]
        # Cut to what is told of a response, before it travels.
        spans = [slice(first, min(end, first + MOST_TOKENS)) for first, end in zip([0, *ends], ends, strict=False)]
        own = zip(experience.numbers, experience.rollouts, spans, strict=True)
        shares = run.world.gather([(n, r, advantages.advantages_K[at].tolist()) for n, r, at in own if n < count])
        chosen = sorted((told for share in shares for told in share), key=lambda told: told[0])
        # Ranks that divide their micro-batches have the same responses.
        chosen = list({number: (number, rollout, own) for number, rollout, own in chosen}.values())
        told = [advantage for _, _, advantage in chosen]
        run.store(step, "train", [rollout for _, rollout, _ in chosen], told, tokens=True)
    run.store(step, "failed", rollouts.failed.first, tokens=count > 0)
