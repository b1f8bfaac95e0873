"""The recorder: the loops tell it what happens, it writes the tape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from lockstep.data.batching import micro_batch, to_device
from lockstep.errors import Refusal
from lockstep.model.weights import trained_weights
from lockstep.parallel.world import World
from lockstep.recipe.keys_parallel import Tape
from lockstep.tape.format import StepRecord, TapeFolder
from lockstep.tape.observer import Aside, Observer, Stepper, UpdateObserver, answers_of
from lockstep.tape.probe import Trace, on_host, run_probe
from lockstep.tape.rows import fed_tensors, item_rows, rollout_rows
from lockstep.tape.writer import Writer
from lockstep.types import Example, Item, Rollout

# Tokens of a probe, so that it stays small beside a step.
PROBE_TOKENS = 1024


class Taped(Protocol):
    """A learner, as far as a tape looks at it (`train/step.py`)."""

    name: str
    module: Any
    optimizer: Any
    device: torch.device
    observer: Observer


class Recorder:
    """This class itself keeps nothing, for runs without a tape."""

    on = False
    """Whether the step under way is kept."""

    def begin(self, step: int, carried: Mapping[str, float]) -> None:
        """Step `step` (from 1) is about to start, with the weights as they are and what the loop carries."""

    def rows(self, items: Sequence[Item]) -> None:
        """Offline: the rows of the update."""

    def rollouts(self, rollouts: Sequence[Rollout], scores_S: torch.Tensor, baseline_S: torch.Tensor | None) -> None:
        """Online: what was generated, and the scores of the responses that are learned from."""

    def examples(self, examples: Sequence[Example]) -> None:
        """The sequences that the models are about to see."""

    def vectors(self, vectors: Mapping[str, torch.Tensor | None]) -> None:
        """Numbers for every token of the step."""

    def finish(self, step: int, metrics: Mapping[str, float]) -> None:
        """The step is done."""

    def leave(self, step: int) -> None:
        """The step is validated, logged and saved: the weights are now what the next one starts from."""

    def flush(self) -> None:
        """Wait until everything that was told is on disk: a checkpoint must not be ahead of its tape."""

    def close(self) -> None:
        """Write what is left, and end."""


class TapeRecorder(Recorder):
    """Every rank takes part (weights and gradients are gathered); rank 0 alone writes."""

    def __init__(
        self,
        folder: Path,
        settings: Tape,
        learners: Sequence[Taped],
        world: World,
        *,
        keeps_weights: bool,
        aside: Aside,
    ):
        self.folder, self.settings, self.world = TapeFolder(folder), settings, world
        self.learners = list(learners)
        self.keeps_weights, self.aside = keeps_weights, aside
        self.observers = [UpdateObserver(one.name, one.module, one.optimizer, world, aside) for one in learners]
        for learner, observer in zip(self.learners, self.observers, strict=True):
            learner.observer = observer
        self.on = False
        self.writer = Writer()
        self._clear()

    def open(self, manifest: dict[str, Any], step: int) -> None:
        """Begin, or go on after `step`."""
        if self.world.main:
            self.folder.rewind(step)
            self.folder.write_manifest(manifest)

    def _clear(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.lent: dict[str, torch.Tensor] = {}
        self.info: dict[str, Any] = {}
        self.tables: dict[Path, Callable[[], list[dict[str, Any]]]] = {}
        self.fed: Sequence[Example] = ()

    def detailed(self, step: int) -> bool:
        return (step - 1) % self.settings.every == 0

    def begin(self, step: int, carried: Mapping[str, float]) -> None:
        self.on = step <= self.settings.steps
        self._clear()
        self.info["carried"] = dict(carried)
        for learner, observer in zip(self.learners, self.observers, strict=True):
            learner.observer = observer if self.on else Observer()
            observer.begin(detailed=self.detailed(step))
        if not self.on:
            return
        self.step = step
        if self.keeps_weights and self.detailed(step):
            weights = weights_of(self.learners)
            if self.world.main:
                self.folder.write_weights(step, weights)

    def rows(self, items: Sequence[Item]) -> None:
        if self.on:
            self.tables[self.folder.rows_file(self.step)] = lambda: item_rows(items)
            self.examples([example for item in items for example in item.examples])

    def rollouts(self, rollouts: Sequence[Rollout], scores_S: torch.Tensor, baseline_S: torch.Tensor | None) -> None:
        if self.on:
            self.tables[self.folder.rollouts_file(self.step)] = lambda: rollout_rows(rollouts)
            self.vectors({"scores": scores_S, "baseline": baseline_S})

    def examples(self, examples: Sequence[Example]) -> None:
        if not self.on:
            return
        self.fed = examples
        if self.detailed(self.step):
            with self.aside("tape"):
                self._probe(examples)

    def _probe(self, examples: Sequence[Example]) -> None:
        chosen = short(examples, self.settings.rows)
        self.info["probe"] = {"rows": len(chosen), "traces": []}
        # Packed whatever the run does, so that runs with other micro-batches have the same probe.
        batch = micro_batch(chosen, packed=True, pad_id=0)
        for learner in self.learners:
            optimizer: Stepper = learner.optimizer
            here = to_device(batch, learner.device)
            trace = run_probe(
                learner.module,
                lambda learner=learner, here=here: answers_of(learner.module(here)),  # type: ignore[misc]
                self.settings.modules,
                self.settings.tensors,
                optimizer.parameters.items(),
                self.world.size,
            )
            for rank, found in enumerate(self.world.gather(trace)):
                self._keep(learner.name, rank, found)

    def _keep(self, learner: str, rank: int, trace: Trace) -> None:
        events = [event.as_json() for event in trace.events]
        self.info["probe"]["traces"].append({"learner": learner, "rank": rank, "events": events})
        self.tensors |= {f"probe/{learner}/{rank}/{name}": tensor for name, tensor in trace.tensors.items()}

    def vectors(self, vectors: Mapping[str, torch.Tensor | None]) -> None:
        if self.on:
            self.lent |= {f"step/{name}": vector for name, vector in vectors.items() if vector is not None}

    def finish(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self.on:
            return
        for observer in self.observers:
            self.info.setdefault("updates", []).extend(observer.info)
            self.tensors |= observer.finish()
        self.info["metrics"] = dict(metrics)
        if self.world.main:
            # Copies: whoever made these numbers may write over them in the next step. The others are the tape's own.
            lent = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.lent.items()}
            tensors = self.tensors | lent
            info, tables, fed = self.info, self.tables, self.fed
            self.writer.submit(lambda: self._write(step, info, tensors, tables, fed))
        self._clear()

    def _write(
        self,
        step: int,
        info: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        tables: Mapping[Path, Callable[[], list[dict[str, Any]]]],
        fed: Sequence[Example],
    ) -> None:
        for file, rows in tables.items():
            self.folder.write_table(file, rows())
        self.folder.write_step(StepRecord(step, info, tensors | fed_tensors(fed)))

    def flush(self) -> None:
        self.writer.wait()

    def close(self) -> None:
        self.writer.close()

    def leave(self, step: int) -> None:
        """Where an update was digested, so are the weights after all that came behind it."""
        if not self.on or not self.detailed(step):
            return
        found: dict[str, torch.Tensor] = {}
        for observer in self.observers:
            if observer.moved:
                found |= {f"{observer.name}/left/{name}": one for name, one in on_host(observer.held()).items()}
        if self.world.main and found:
            self.writer.submit(lambda: self.folder.write_left(step, found))


def short(examples: Sequence[Example], rows: int) -> list[Example]:
    """The first sequences that have something to answer and fit a probe together; one at least."""
    chosen: list[Example] = []
    for example in examples:
        if not example.targets:
            continue
        if chosen and (len(chosen) == rows or sum(map(len, chosen)) + len(example) > PROBE_TOKENS):
            break
        chosen.append(example)
    return chosen


def weights_of(learners: Sequence[Taped]) -> dict[str, torch.Tensor]:
    """Weights and optimizer state by learner (a collective when sharded)."""
    found: dict[str, torch.Tensor] = {}
    for learner in learners:
        found |= {f"{learner.name}/model/{k}": v for k, v in trained_weights(learner.module.stored).items()}
        found |= {f"{learner.name}/optimizer/{k}": v for k, v in learner.optimizer.tensors().items()}
    return found


def refuse_no_weights(folder: TapeFolder, step: int) -> None:
    if step not in folder.weighed():
        raise Refusal.at(
            str(folder.path),
            f"the weights before step {step} are not on the tape",
            "record with tape.weights=true, or replay chained",
        )
