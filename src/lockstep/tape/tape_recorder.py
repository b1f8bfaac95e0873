"""The tape recorder, called by the training loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from lockstep.data.batching import micro_batch, to_device
from lockstep.errors import Refusal
from lockstep.model.weights import restore_weights, trained_weights
from lockstep.parallel.sharding import fill, reshard
from lockstep.parallel.world import World
from lockstep.recipe.keys_parallel import Tape
from lockstep.tape.digest import on_host
from lockstep.tape.module_trace import Trace, trace_modules
from lockstep.tape.tape_format import StepRecord, TapeFolder, TapeWriter, below
from lockstep.tape.tape_rows import fed_tensors, item_rows, rollout_rows
from lockstep.tape.update_observer import Aside, Observer, Stepper, UpdateObserver, answers_of
from lockstep.types import Example, Item, Rollout

# The most tokens of a module trace, so that it is cheap compared with a step.
TRACE_TOKENS = 1024


class Taped(Protocol):
    """The part of a learner (`train/step.py`) that a tape reads."""

    name: str
    module: Any
    optimizer: Any
    device: torch.device
    observer: Observer


class Recorder:
    """The interface for the loops. This base class records nothing, for runs without a tape."""

    on = False
    """Whether the current step is recorded."""

    def begin(self, step: int, carried: Mapping[str, float]) -> None:
        """Called before step `step` (from 1) with the state that the loop carries from step to step."""

    def rows(self, items: Sequence[Item]) -> None:
        """Offline: the rows of the update."""

    def rollouts(self, rollouts: Sequence[Rollout], scores_S: torch.Tensor, baseline_S: torch.Tensor | None) -> None:
        """Online: the generated responses, and the scores of the responses in the batch."""

    def examples(self, examples: Sequence[Example]) -> None:
        """The input sequences of the models."""

    def vectors(self, vectors: Mapping[str, torch.Tensor | None]) -> None:
        """One number per token of the step."""

    def finish(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called at the end of a step."""

    def leave(self, step: int) -> None:
        """Called after validation, logging and saving. The weights are those of the next step."""

    def flush(self) -> None:
        """Wait until all files are on disk: a checkpoint must not be ahead of its tape."""

    def close(self) -> None:
        """Write the remaining files and stop the writer."""


class TapeRecorder(Recorder):
    """Runs on every rank, because weights and gradients are gathered. Only rank 0 writes."""

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
        self.writer = TapeWriter()
        self._clear()

    def open(self, manifest: dict[str, Any], step: int) -> None:
        """Start the tape, or resume it after `step`."""
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
                self._trace(examples)

    def _trace(self, examples: Sequence[Example]) -> None:
        chosen = short(examples, self.settings.rows)
        self.info["probe"] = {"rows": len(chosen), "traces": []}
        # Always packed, so that runs with different micro-batches have the same trace.
        batch = micro_batch(chosen, packed=True, pad_id=0)
        for learner in self.learners:
            optimizer: Stepper = learner.optimizer
            here = to_device(batch, learner.device)
            trace = trace_modules(
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
            # Copies, because the loop may overwrite these vectors in the next step. No one else holds the others.
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
        """Digest the weights again if the step has digests of the updated weights."""
        if not self.on or not self.detailed(step):
            return
        found: dict[str, torch.Tensor] = {}
        for observer in self.observers:
            if observer.moved:
                found |= {f"{observer.name}/left/{name}": one for name, one in on_host(observer.held()).items()}
        if self.world.main and found:
            self.writer.submit(lambda: self.folder.write_left(step, found))


def short(examples: Sequence[Example], rows: int) -> list[Example]:
    """The first sequences with targets that fit into a module trace; at least one."""
    chosen: list[Example] = []
    for example in examples:
        if not example.targets:
            continue
        if chosen and (len(chosen) == rows or sum(map(len, chosen)) + len(example) > TRACE_TOKENS):
            break
        chosen.append(example)
    return chosen


def weights_of(learners: Sequence[Taped]) -> dict[str, torch.Tensor]:
    """Weights and optimizer state by learner (a collective if sharded)."""
    found: dict[str, torch.Tensor] = {}
    for learner in learners:
        found |= {f"{learner.name}/model/{k}": v for k, v in trained_weights(learner.module.stored).items()}
        found |= {f"{learner.name}/optimizer/{k}": v for k, v in learner.optimizer.tensors().items()}
    return found


def restore_learner(learner: Taped, weights: dict[str, torch.Tensor], where: str) -> None:
    """Restore recorded weights and optimizer state; the dtypes of the two sides may differ."""
    model, state = (below(weights, f"{learner.name}/{part}/") for part in ("model", "optimizer"))
    masters = below(state, "master/")
    module, optimizer = learner.module, learner.optimizer
    reshard(module)
    # Prefer the recorded master weights: this side's weights may have a finer dtype than the recorded ones.
    restore_weights(module.stored, {**model, **masters}, where)
    if any(name.startswith("exp_avg/") for name in state):
        optimizer.restore({**{f"master/{name}": value for name, value in model.items()}, **state})
    else:
        optimizer.adamw.state.clear()
        for name, master in optimizer.stepped.items():
            fill(master, masters.get(name, model[name]))
    optimizer.forget()


def refuse_no_weights(folder: TapeFolder, step: int) -> None:
    if step not in folder.weighed():
        raise Refusal.at(
            str(folder.path),
            f"the weights before step {step} are not on the tape",
            "record with tape.weights=true, or use --mode chained",
            code="missing-on-tape",
        )
