"""The output of a run: folder, metrics, samples, trackers, tape, console. Only rank 0 writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep.data.encode.chat_template import is_named, template_text
from lockstep.device.base import Device
from lockstep.errors import refuse_all
from lockstep.functions import is_function_path
from lockstep.masking import sources
from lockstep.model.fingerprint import model_fingerprint
from lockstep.model.heads import ValueModel
from lockstep.model.policy import Policy
from lockstep.model.resolve import model_folder
from lockstep.model.text_model import text_config
from lockstep.model.weights import biases_and_norms
from lockstep.parallel.world import World
from lockstep.preflight.prepared import Prepared, PreparedOnline
from lockstep.recipe import Recipe
from lockstep.recipe.loader import dump_recipe, resolved
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.registry import ADAPTERS, ENGINES, TOOLS, plugin_file
from lockstep.run.checkpoint import require_disk
from lockstep.run.console import Console
from lockstep.run.files import atomic_write_text, checksum
from lockstep.run.folder import RunFolder, describe_environment
from lockstep.run.metrics import MetricsLog, Phases, append_text, missing_steps, read_metrics, rewind_lines
from lockstep.run.model_card import before_and_after
from lockstep.run.sample_log import MOST_TOKENS, TokenTexts, sample_line, store_images, token_details
from lockstep.run.trackers.tracker import open_sinks
from lockstep.tape.module_trace import unmatched_patterns
from lockstep.tape.tape_recorder import Recorder, Taped, TapeRecorder
from lockstep.train.advantages import Advantages
from lockstep.train.experience import Experience, ModelOutputs
from lockstep.train.models import Models
from lockstep.train.rollouts import Rollouts
from lockstep.train.step import Learner
from lockstep.types import Rollout


def user_code(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Returns for each recipe key that names user code the value of the key, and the SHA-256 of the file (None if there
    is no readable file). The hash does not include modules that the file imports."""
    named = {"data.reader": recipe.data.reader}
    if recipe.method in ONLINE:
        named["reward.function"] = recipe.reward.function
        named["rollout.function"] = recipe.rollout.function
        named["rollout.environment"] = recipe.rollout.environment
        named["rollout.agent"] = recipe.rollout.agent
        named |= {f"rollout.tools.{tool}": tool for tool in recipe.rollout.tools}
        named["algorithm.advantage"] = recipe.algorithm.advantage
        named["algorithm.loss"] = recipe.algorithm.loss
    functions = {key: value for key, value in named.items() if value is not None and is_function_path(value)}
    files = {key: (value, _file_of(value)) for key, value in functions.items()}
    plugins = {f"run.plugins.{word}": (word, plugin_file(word)) for word in recipe.run.plugins}
    return {
        key: {"name": name, "sha256": checksum(file) if file is not None and file.is_file() else None}
        for key, (name, file) in {**files, **plugins}.items()
    }


def _file_of(function_path: str) -> Path:
    """Returns the file of `path/to/file.py:name`, also after the name of an adapter, as in `trl:file.py:name` and
    `verl:tools.yaml`."""
    name, _, inside = function_path.partition(":")
    path = inside if name in ADAPTERS or name in TOOLS else function_path
    return Path(path.rpartition(":")[0] or path).expanduser()


def code_changes(before: Any, now: dict[str, dict[str, Any]]) -> list[str]:
    """Returns warnings about files with user code that have changed since the run was started."""
    if not isinstance(before, dict):
        return []
    return [
        f"{key} {entry['name']}: the file has changed since this run was started"
        for key, entry in now.items()
        if isinstance(before.get(key), dict) and before[key].get("sha256") != entry["sha256"]
    ]


class Run:
    """The output of a run: folder, metrics, samples, trackers, console and timers."""

    def __init__(
        self, prepared: Prepared | PreparedOnline, folder: RunFolder, device: Device, world: World, console: Console
    ):
        self.prepared, self.folder, self.device, self.world, self.console = prepared, folder, device, world, console
        self.recipe = prepared.recipe
        self.phases = Phases(device.synchronise, self._stage)
        self.metrics = MetricsLog(folder.metrics)
        log = self.recipe.log
        self.trackers = open_sinks(list(log.track), folder, log.project, console, log.prometheus) if world.main else []
        self.fingerprint = self._fingerprint() if world.main else {}
        self.engine: dict[str, Any] = {}
        """The rollout engine and its version, or an empty dict if the run has no rollout engine."""
        self.fallbacks: dict[str, int] | None = None
        """The operators of the first step that ran on the CPU, because the device has no kernel for them, or None
        before the first step."""
        self.resumed: dict[str, Any] = {}
        """For a resumed run: the step of the checkpoint, the changed recipe keys, and the changed models that the user
        accepted."""
        self._step = 0
        self._token_texts = TokenTexts(lambda ids: str(prepared.tokenizer.decode(ids)))
        self._unwritten: Callable[[], None] | None = None

    def _fingerprint(self) -> dict[str, Any]:
        """Returns the fingerprint, the architecture and the size of the trained model."""
        architectures = getattr(self.prepared.config, "architectures", None) or ["unknown"]
        return {
            **model_fingerprint(model_folder(self.recipe.model.path), self.prepared.tokenizer),
            "architecture": architectures[0],
            "parameters": self.prepared.memory.parameters,
        }

    # -- methods that are called before the first step

    def begin(self, step: int, switches: dict[str, str], fused: dict[str, list[str]]) -> None:
        """Prints the plan of the run, writes recipe.yaml and env.json, and starts the trackers. `fused` lists the fused
        operators that replace modules of the models on this device."""
        self._show_plan(fused)
        steps = self.prepared.batches.steps
        if self.world.main:
            code = user_code(self.recipe)
            for change in code_changes(self.folder.read_env().get("own_code"), code) if step else []:
                self.console.warn(change)
            self._unwritten = partial(self._write_evidence, step, switches, fused, code)
            # A resumed run writes recipe.yaml and env.json when it logs its first step, so resuming a finished run
            # changes no file.
            if step == 0 or not self.folder.recipe.is_file():
                self._write_pending()
            for tracker in self.trackers:
                tracker.start(self.recipe.run.name, resolved(self.recipe), step)
        self.console.begin(steps, step)

    def rewind(self, step: int) -> None:
        """Deletes the metrics and samples of steps after `step`, where the run resumes. -1 deletes all metrics and
        samples."""
        if self.world.main:
            self.metrics.rewind(step)
            rewind_lines(self.folder.samples, step)
            if step > 0:
                self._say_lost_steps(step)

    def logged(self) -> list[tuple[int, dict[str, float]]]:
        """Returns the metrics of all steps so far. Returns an empty list on ranks other than 0."""
        return read_metrics(self.folder.metrics) if self.world.main and self.folder.metrics.exists() else []

    def _say_lost_steps(self, last: int) -> None:
        file = self.folder.metrics
        logged = [step for step, _ in read_metrics(file)] if file.exists() else []
        if lost := missing_steps(logged, last):
            state = "has missing steps" if logged else "is empty" if file.exists() else "is missing"
            self.console.warn(
                f"{file} {state}: the metrics of steps {lost} of {last} are lost; the weights are not affected"
            )

    def _write_pending(self) -> None:
        """Writes recipe.yaml and env.json, if they are not yet written."""
        if self._unwritten is not None:
            self._unwritten()
            self._unwritten = None

    def _write_evidence(
        self, step: int, switches: dict[str, str], fused: dict[str, list[str]], code: dict[str, Any]
    ) -> None:
        self.folder.write_recipe(dump_recipe(self.recipe), step)
        if is_named(self.recipe.data):
            self.folder.template.write_text(template_text(self.recipe.data.template), encoding="utf-8")
        self._keep_migration()
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

    def _keep_migration(self) -> None:
        """Copies the table of a converted command (`run.migration`) to the run folder."""
        source = self.recipe.run.migration
        if source is None:
            return
        try:
            atomic_write_text(self.folder.migration, Path(source).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            self.console.warn(f"run.migration: {source} cannot be read, so the run stores no table: {error}")

    def _show_plan(self, fused: dict[str, list[str]]) -> None:
        counts, memory = self.prepared.train.counts, self.prepared.memory
        trained = f"{memory.trained:,} of {memory.parameters:,} parameters"
        rows = [
            ("model", f"{self.recipe.model.path} ({trained} trained, {self.recipe.model.dtype})"),
            *[("data", note) for note in self.prepared.train.notes],
            *([] if self.recipe.data.template == "auto" else [("template", self.recipe.data.template)]),
            ("tokens", self.prepared.train.sentence),
            *self.prepared.batches.lines(),
            ("memory", f"about {memory.peak.total / 2**30:.2f} GiB at the peak ({memory.peak.name})"),
            *[("fused", f"in the {name}: {', '.join(parts)}") for name, parts in fused.items() if parts],
            ("run folder", str(self.folder.path)),
        ]
        self.console.banner(f"{self.recipe.method} run {self.recipe.run.name}", rows)
        for remark in self.prepared.remarks:
            self.console.warn(remark)
        for number, what in ((counts.dropped, "dropped"), (counts.truncated, "truncated")):
            if number and not self.prepared.train.streamed:
                self.console.warn(
                    f"{number:,} rows were {what}: over the limit (data.overlong={self.recipe.data.overlong}), or for "
                    "the reason in the line `data` above"
                )

    # -- a step

    @contextmanager
    def timed(self, step: int) -> Iterator[None]:
        """Times step `step`, which counts from 1. In the first step, operators that fall back to the CPU are also
        recorded."""
        self._step = step
        self.world.started()
        with self.phases("step"):
            if self.fallbacks is not None:
                yield
                return
            # The first step takes longer, because libraries load and compile kernels.
            with (
                self.console.waiting(f"Step {step}"),
                self.device.watched(allow_fallback=self.recipe.run.allow_fallback) as counts,
            ):
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
            self._write_pending()
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
        """Appends responses to samples.jsonl. `advantages` has a list per response, with one number per policy token.
        With `tokens`, token details are written too."""
        if not self.world.main or not rollouts:
            return
        store_images(self.folder.images, rollouts)
        advantage_lists = advantages if advantages is not None else [None] * len(rollouts)
        lines = [
            sample_line(
                step,
                kind,
                rollout,
                values[0] if values else None,
                token_details(rollout, self._token_texts, values) if tokens else None,
            )
            for rollout, values in zip(rollouts, advantage_lists, strict=True)
        ]
        if (precision := sampled_in(self.recipe, kind)) is not None:
            lines = [line | {"precision": precision} for line in lines]
        append_text(self.folder.samples, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))

    # -- methods that are called after the last step

    def summarise(self, step: int, use: tuple[str, str]) -> None:
        """Prints the results of the run. `use` is a table row that says how to use the model."""
        # If metrics.jsonl is missing, the run has already reported it when it resumed.
        changes = before_and_after(read_metrics(self.folder.metrics) if self.folder.metrics.exists() else [])
        counts = self.prepared.train.counts
        if (counts.dropped or counts.truncated) and not self.prepared.train.streamed:
            changes.append(("left out", f"{counts.dropped:,} rows dropped, {counts.truncated:,} truncated"))
        if self.fallbacks:
            named = ", ".join(f"{name} ({count})" for name, count in sorted(self.fallbacks.items()))
            changes.append(("ran on the CPU", f"in the first step, because the device has no kernel: {named}"))
        rows = [*changes, ("run folder", str(self.folder.path)), use]
        self.console.banner(f"{self.recipe.run.name}: {step} steps done", rows)

    def close(self, *, ok: bool) -> None:
        self.console.end()
        for tracker in self.trackers:
            tracker.close(ok)


def sampled_in(recipe: Recipe, kind: str) -> str | None:
    """Returns the low precision in which responses were generated, or None. Validation (`val`) of the built-in engine
    generates with the trained weights; a server has only the quantised weights."""
    served = ENGINES[recipe.rollout.engine].served
    return recipe.rollout.low_precision if served or kind != "val" else None


def store_samples(run: Run, step: int, rollouts: Rollouts, experience: Experience, advantages: Advantages) -> None:
    """Writes the first responses and the first failed responses of the step to samples.jsonl."""
    count = run.recipe.log.samples
    if count:
        ends = [int(last) + 1 for last in experience.last_K]
        # Only the advantages of tokens that are written to the file are gathered.
        spans = [slice(first, min(end, first + MOST_TOKENS)) for first, end in zip([0, *ends], ends, strict=False)]
        local = zip(experience.local_numbers, experience.rollouts, spans, strict=True)
        shares = run.world.gather([(n, r, advantages.advantages_K[at].tolist()) for n, r, at in local if n < count])
        # Ranks of the same tensor-parallel or context-parallel group have the same responses. The dict removes
        # duplicates.
        chosen = {number: (rollout, values) for share in shares for number, rollout, values in share}
        ordered = [chosen[number] for number in sorted(chosen)]
        run.store(step, "train", [rollout for rollout, _ in ordered], [values for _, values in ordered], tokens=True)
    run.store(step, "failed", rollouts.failed.first, tokens=count > 0)


# By default, a tape stores weights and optimizer states if the model has at most this many trained parameters.
SMALL = 16_000_000
# A tape stores the weight, two moments and the master weight of each parameter, with 4 bytes each.
BYTES_A_PARAMETER = 16


def make_recorder(run: Run, models: Models, step: int) -> Recorder:
    """Creates the tape recorder of a run that starts after `step` steps. The tape of a finished run is not changed."""
    recipe, steps = run.recipe, run.prepared.batches.steps
    if not recipe.tape.record or step >= steps:
        return Recorder()
    settings, trained = recipe.tape, run.prepared.memory.trained
    keeps = settings.weights if settings.weights is not None else trained <= SMALL
    learners: list[Taped] = [*models.learners]
    refuse_all(unmatched_patterns([one.module for one in models.learners], settings.modules, settings.tensors))
    aside = run.phases.aside
    recorder = TapeRecorder(run.folder.tape, settings, learners, run.world, keeps_weights=keeps, aside=aside)
    if run.world.main and keeps:
        snapshots = -(-min(settings.steps, steps) // settings.every)
        less = "raise tape.every, lower tape.steps, set tape.weights=false"
        require_disk(run.folder.path, trained * BYTES_A_PARAMETER * snapshots, "the tape with weights", less)
    recorder.open(_manifest(run, models), step)
    return recorder


def _manifest(run: Run, models: Models) -> dict[str, object]:
    return {
        "recipe": resolved(run.recipe),
        "device": run.device.facts(),
        "world_size": run.world.size,
        "model": run.fingerprint,
        "engine": run.engine,
        "data": run.prepared.fingerprints,
        "vocabulary": text_config(run.prepared.config).vocab_size,
        "parameters": {
            learner.name: {name: list(p.shape) for name, p in learner.optimizer.parameters.items()}
            for learner in models.learners
        },
        "spared": {learner.name: sorted(_spared(learner)) for learner in models.learners},
        "environment": describe_environment(),
    }


def _spared(learner: Learner) -> frozenset[str]:
    """Returns the names of the parameters that have no weight decay: biases and norms."""
    assert isinstance(learner.module, Policy | ValueModel)
    return biases_and_norms(learner.module.stored) & learner.optimizer.parameters.keys()


def record_rollouts(
    tape: Recorder, rollouts: Rollouts, experience: Experience, outputs: ModelOutputs, advantages: Advantages
) -> None:
    """Records the rollouts and the token vectors of a step of an online method on the tape. All ranks must call this
    function."""
    if not tape.on:
        return
    every = experience.all_rollouts_and_examples()
    judged_S = experience.scores_S if rollouts.rescored_S is None else rollouts.rescored_S
    generated = [rollout for rollout, _ in every] if rollouts.generated is None else rollouts.generated
    tape.rollouts(generated, judged_S, experience.baseline_S)
    tape.examples([example for _, sequences in every for example in sequences])
    # The names of the recorded vectors are part of the tape format.
    vectors = {
        "old": outputs.old_K,
        "reference": outputs.reference_K,
        "values": outputs.values_K,
        "trainer": outputs.trainer_K,
        "squares": outputs.squares_K,
        "rewards": advantages.rewards_K,
        "advantages": advantages.advantages_K,
        "returns": advantages.returns_K,
        "keep": advantages.keep_K,
        "importance": advantages.is_weights_K,
    }
    tape.vectors({name: None if value is None else experience.all_gather(value) for name, value in vectors.items()})


def record_rows(tape: Recorder, rows: Sequence[Any], references: Sequence[torch.Tensor]) -> None:
    """Records the rows of an update of an offline method, and the reference log-probs, on the tape."""
    tape.rows(rows)
    tape.vectors({f"reference{number or ''}": values for number, values in enumerate(references)})
