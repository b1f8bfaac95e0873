"""The tape recorder, which the training loops call, and the observer that records the optimizer updates of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from lockstep.data.batching import micro_batch, to_device
from lockstep.device.base import fetched
from lockstep.errors import Refusal
from lockstep.model.policy import Policy
from lockstep.model.weights import restore_weights, trained_weights
from lockstep.parallel.sharding import reshard, whole
from lockstep.parallel.world import World
from lockstep.recipe.keys_parallel import Tape
from lockstep.tape.digest import digests, on_host
from lockstep.tape.module_trace import Trace, trace_modules
from lockstep.tape.tape_format import StepRecord, TapeFolder, TapeWriter, below
from lockstep.tape.tape_images import TapeImages
from lockstep.tape.tape_rows import (
    RECEIVED,
    Received,
    fed_images,
    fed_tensors,
    image_marks,
    images_of,
    item_rows,
    rollout_rows,
)
from lockstep.types import Example, Item, MicroBatch, Rollout
from lockstep.vision.spans import ImageSpan

# A timer for a phase whose time is subtracted from the times of the enclosing phases (`run/metrics.py`).
Aside = Callable[[str], AbstractContextManager[None]]
# The number of elements of each parameter that are recorded before and after the optimizer step.
SAMPLED = 64


class Stepper(Protocol):
    """The attributes and methods of the optimizer (`train/optim.py`) that the tape recorder uses."""

    parameters: dict[str, nn.Parameter]
    trained: dict[str, torch.Tensor]
    adamw: torch.optim.Optimizer

    def full_state(self) -> dict[str, torch.Tensor]: ...

    def gradient(self, name: str) -> torch.Tensor | None: ...


class Observer:
    """Callbacks that a learner (a trained model) calls in its updates. This base class records nothing; runs without a
    tape use it."""

    def on_forward(self, batch: MicroBatch, output: Any) -> None:
        """Called after the forward pass of a micro-batch."""

    def on_loss(self, loss: float, divisor: float, targets: int, scale: float) -> None:
        """Called after all micro-batches of an update. `loss` is the loss of the update, and `scale` is the fp16 loss
        scale."""

    def on_gradients(self, norm: torch.Tensor, lr: float) -> None:
        """Called when the gradients of an update are complete, before they are clipped."""

    def on_step(self) -> None:
        """Called after the optimizer step."""


@dataclass
class _Passed:
    """A processed micro-batch. `index_K` are the indices of the micro-batch's target tokens. `answers`, `received` and
    `pulls` are functions that return the outputs, the inputs and the gradients of the outputs. Each function waits
    until its copy to the CPU is complete."""

    index_K: torch.Tensor
    answers: Callable[[], torch.Tensor]
    received: Callable[[], Received]
    pulls: list[Callable[[], torch.Tensor]] = field(default_factory=list)


class UpdateObserver(Observer):
    """Records the optimizer updates of a training step. The names in `tensors` begin with `<learner>/<update>/`. `info`
    has one entry per update."""

    def __init__(self, name: str, module: nn.Module, optimizer: Stepper, world: World, aside: Aside):
        self.name, self.optimizer, self.world, self.aside = name, optimizer, world, aside
        self.detailed = False
        self._last: MicroBatch | None = None
        module.register_forward_pre_hook(self._receive)
        self.begin(detailed=False)

    def begin(self, *, detailed: bool) -> None:
        """Starts a training step. If `detailed`, the first update of the step is recorded with digests of every
        parameter."""
        self.detailed = detailed
        self.info: list[dict[str, Any]] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self._left: dict[str, torch.Tensor] = {}
        self._passed: list[_Passed] = []
        self._summed: list[tuple[str, int, float, list[_Passed]]] = []

    @property
    def _key(self) -> str:
        return f"{self.name}/{len(self.info) - 1}"

    @property
    def _digested(self) -> bool:
        return self.detailed and len(self.info) == 1

    def _receive(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        self._last = args[0] if args and isinstance(args[0], MicroBatch) else None

    def on_forward(self, batch: MicroBatch, output: Any) -> None:
        answers_K = answers_of(output)
        # With context parallelism, the model of each rank receives only a part of the micro-batch. The full micro-batch
        # is recorded.
        full = batch.context is not None or self._last is None
        received, self._last = batch if full else self._last, None
        passed = _Passed(batch.index_K, fetched(answers_K.detach()), _received(received))
        if answers_K.requires_grad:
            answers_K.register_hook(lambda gradient_K: passed.pulls.append(fetched(gradient_K.detach())))
        self._passed.append(passed)

    def on_loss(self, loss: float, divisor: float, targets: int, scale: float) -> None:
        passed, self._passed = self._passed, []
        self.info.append(
            {"learner": self.name, "loss": loss, "divisor": divisor, "targets": targets, "micro_batches": len(passed)}
        )
        self._summed.append((self._key, targets, scale, passed))

    def finish(self) -> dict[str, torch.Tensor]:
        """Waits until the device has computed all recorded tensors of the step, and returns them on the CPU. All ranks
        must call this function."""
        for key, targets, scale, passed in self._summed:
            answers_K, pulls_K, owner_K = torch.zeros(targets), torch.zeros(targets), torch.zeros(targets)
            for one in passed:
                answers_K[one.index_K] = one.answers().float()
                owner_K[one.index_K] = float(self.world.rank)
                for pulls in one.pulls[:1]:
                    pulls_K[one.index_K] = pulls().float() / scale
            for name, vector in (("answers", answers_K), ("pulls", pulls_K), ("owner", owner_K)):
                self.tensors[f"{key}/{name}"] = self.world.sum_tensor(vector)
            batches = [(one.index_K, one.received().by_target()) for one in passed]
            for name in RECEIVED:
                numbers_K = torch.zeros(targets, dtype=torch.int32)
                for index_K, found in batches:
                    numbers_K[index_K] = found[name]
                self.tensors[f"{key}/received/{name}"] = self.world.sum_tensor(numbers_K)
        self._summed.clear()
        return self.tensors | on_host(self._left)

    def on_gradients(self, norm: torch.Tensor, lr: float) -> None:
        self.info[-1] |= {"grad_norm": float(norm), "lr": lr}
        if self._digested:
            with self.aside("tape"):
                self._before_step()

    def _before_step(self) -> None:
        found: dict[str, torch.Tensor] = {}
        taken = {name: self.optimizer.gradient(name) for name in self.optimizer.trained}
        gradients = {name: gradient for name, gradient in taken.items() if gradient is not None}
        moved = {name: self.optimizer.trained[name] for name in gradients}
        for what, tensors in (("gradient", gradients), ("start", moved)):
            found |= {f"{self._key}/{what}/{name}": one for name, one in digests(tensors).items()}
        for name, weight in moved.items():
            state = self.optimizer.adamw.state.get(weight, {})
            for key, value in (("gradient", gradients[name]), ("before", weight), *_moments(state)):
                found[f"{self._key}/sample/{name}/{key}"] = _pick(value)
            count = state.get("step", torch.zeros(()))
            found[f"{self._key}/sample/{name}/count"] = count.detach().float().clone()
        self.tensors |= on_host(found)

    def on_step(self) -> None:
        if not self.detailed:
            return
        with self.aside("tape"):
            if self._digested:
                self._after_step()
            self._left = {f"{self.name}/left/{name}": one for name, one in self.weight_digests().items()}

    def weight_digests(self) -> dict[str, torch.Tensor]:
        """Returns digests of the model's parameters on the device. If the model is sharded, all ranks must call this
        function."""
        return digests(self.optimizer.parameters)

    @property
    def has_weight_digests(self) -> bool:
        """Whether this training step has recorded digests of the updated weights."""
        return bool(self._left)

    def _after_step(self) -> None:
        weights = digests(self.optimizer.trained)
        found = {f"{self._key}/weights/{name}": one for name, one in weights.items()}
        for name, weight in self.optimizer.trained.items():
            found[f"{self._key}/sample/{name}/after"] = _pick(weight)
            # `held` is the weight in the model. If the optimizer has master weights, this weight is a rounded copy of
            # the master weight.
            found[f"{self._key}/sample/{name}/held"] = _pick(self.optimizer.parameters[name])
        self.tensors |= on_host(found)


def _received(batch: MicroBatch | None) -> Callable[[], Received]:
    assert batch is not None
    ids, positions, predictors, targets = (
        fetched(tensor) for tensor in (batch.input_ids_NT, batch.position_ids_NT, batch.predictors_K, batch.targets_K)
    )
    lengths, packed, packed_index_E = batch.lengths, batch.packed, batch.packed_index_E
    images = batch.images
    copied = () if images is None else tuple(map(fetched, (images.axes_3NT, images.places_M, images.features_M)))

    def received() -> Received:
        marks_NT = None if images is None else image_marks(images.distinct, *(copy() for copy in copied))
        return Received(ids(), positions(), predictors(), targets(), lengths, packed, packed_index_E, marks_NT)

    return received


def answers_of(output: Any) -> torch.Tensor:
    """Returns one number per target token: the log-probability of a policy, or the output of a value model."""
    return output if isinstance(output, torch.Tensor) else output.logprobs_K


@lru_cache(maxsize=256)
def sampled(count: int, device: torch.device | None = None) -> torch.Tensor:
    """Returns the indices of the recorded elements of a parameter with `count` elements. The indices are the same in
    every run."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, count, (min(SAMPLED, count),), generator=generator).to(device)


def _pick(tensor: torch.Tensor) -> torch.Tensor:
    tensor = whole(tensor.detach())
    return tensor.take(sampled(tensor.numel(), tensor.device)).float()


def _moments(state: Any) -> list[tuple[str, torch.Tensor]]:
    return [(key, state[key]) for key in ("exp_avg", "exp_avg_sq") if key in state]


# The maximum number of tokens of a module trace. A trace must take much less time than a training step.
TRACE_TOKENS = 1024


class Taped(Protocol):
    """The attributes of a learner (`train/step.py`) that the tape recorder uses."""

    name: str
    module: Any
    optimizer: Any
    device: torch.device
    observer: Observer


class Recorder:
    """The interface of the tape recorder, which the training loops call. This base class records nothing; runs without
    a tape use it."""

    on = False
    """Whether the current step is recorded."""

    def begin(self, step: int, carried: Mapping[str, float]) -> None:
        """Called before step `step`, which counts from 1. `carried` has the values that the training loop keeps between
        steps."""

    def rows(self, items: Sequence[Item]) -> None:
        """Called by offline methods (SFT, DPO, ...) with the dataset rows of the update."""

    def rollouts(self, rollouts: Sequence[Rollout], scores_S: torch.Tensor, baseline_S: torch.Tensor | None) -> None:
        """Called by online methods (PPO, GRPO, ...) with the generated responses, and the scores of the responses in
        the training batch."""

    def examples(self, examples: Sequence[Example]) -> None:
        """Called with the input sequences of the models."""

    def vectors(self, vectors: Mapping[str, torch.Tensor | None]) -> None:
        """Called with tensors that have one number per token or per response, such as advantages."""

    def finish(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called at the end of a step."""

    def leave(self, step: int) -> None:
        """Called after validation, logging and saving, when the model has the weights with which the next step
        starts."""

    def flush(self) -> None:
        """Waits until all tape files are written. A checkpoint of a step must not exist before the tape of that
        step."""

    def close(self) -> None:
        """Writes the remaining tape files and stops the writer thread."""


class TapeRecorder(Recorder):
    """Records a run to a tape. Every rank has a recorder, because weights and gradients are gathered. Only rank 0
    writes files."""

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
        """Starts a new tape, or continues an existing tape after `step`."""
        if self.world.main:
            self.folder.rewind(step)
            self.folder.write_manifest(manifest)

    def _clear(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.lent: dict[str, torch.Tensor] = {}
        self.info: dict[str, Any] = {}
        self.tables: dict[Path, Callable[[], list[dict[str, Any]]]] = {}
        self.fed: Sequence[Example] = ()
        self.images: list[ImageSpan] = []

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
            self.images += [image for rollout in rollouts for image in images_of(rollout)]
            self.vectors({"scores": scores_S, "baseline": baseline_S})

    def examples(self, examples: Sequence[Example]) -> None:
        if not self.on:
            return
        self.fed = examples
        self.images += [image for example in examples for image in example.images]
        if self.detailed(self.step):
            with self.aside("tape"):
                self._trace(examples)

    def _trace(self, examples: Sequence[Example]) -> None:
        chosen = trace_examples(examples, self.settings.rows)
        self.info["probe"] = {"rows": len(chosen), "traces": []}
        # The micro-batch of a trace is always packed, so that runs with different micro-batch settings have the same
        # trace.
        batch = micro_batch(chosen, packed=True, pad_id=0)
        for learner in self.learners:
            optimizer: Stepper = learner.optimizer
            here = to_device(batch, learner.device)
            routing = learner.module.decoder.routing if isinstance(learner.module, Policy) else None
            with nullcontext() if routing is None else routing.uncounted():
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
            # The vectors are copied, because the training loop may overwrite them in the next step.
            lent = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.lent.items()}
            tensors = self.tensors | lent
            info, tables, fed, images = self.info, self.tables, self.fed, self.images
            self.writer.submit(lambda: self._write(step, info, tensors, tables, fed, images))
        self._clear()

    def _write(
        self,
        step: int,
        info: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        tables: Mapping[Path, Callable[[], list[dict[str, Any]]]],
        fed: Sequence[Example],
        images: Sequence[ImageSpan],
    ) -> None:
        TapeImages(self.folder.path).write(images)
        for file, rows in tables.items():
            self.folder.write_table(file, rows())
        self.folder.write_step(StepRecord(step, info | fed_images(fed), tensors | fed_tensors(fed)))

    def flush(self) -> None:
        self.writer.wait()

    def close(self) -> None:
        self.writer.close()

    def leave(self, step: int) -> None:
        """Records digests of the weights again, if the step has recorded digests of the updated weights."""
        if not self.on or not self.detailed(step):
            return
        found: dict[str, torch.Tensor] = {}
        for observer in self.observers:
            if observer.has_weight_digests:
                found |= {
                    f"{observer.name}/left/{name}": one for name, one in on_host(observer.weight_digests()).items()
                }
        if self.world.main and found:
            self.writer.submit(lambda: self.folder.write_left(step, found))


def trace_examples(examples: Sequence[Example], rows: int) -> list[Example]:
    """Returns the sequences of a module trace: the first sequences that have target tokens, up to `rows` sequences and
    `TRACE_TOKENS` tokens. The first sequence with target tokens is always included."""
    chosen: list[Example] = []
    for example in examples:
        if not example.targets:
            continue
        if chosen and (len(chosen) == rows or sum(map(len, chosen)) + len(example) > TRACE_TOKENS):
            break
        chosen.append(example)
    return [_with_all_routes(example) for example in chosen]


def _with_all_routes(example: Example) -> Example:
    """Gives the tokens without recorded experts those of the token before. These tokens predict nothing, but a router
    that chooses other experts for one of them would look like a wrong module."""
    if example.routes is None:
        return example
    missing = len(example) - len(example.routes)
    return replace(example, routes=np.concatenate([example.routes, example.routes[-1:].repeat(missing, 0)]))


def weights_of(learners: Sequence[Taped]) -> dict[str, torch.Tensor]:
    """Returns weights and optimizer states of all learners. If a model is sharded, all ranks must call this
    function."""
    found: dict[str, torch.Tensor] = {}
    for learner in learners:
        found |= {f"{learner.name}/model/{k}": v for k, v in trained_weights(learner.module.stored).items()}
        found |= {f"{learner.name}/optimizer/{k}": v for k, v in learner.optimizer.full_state().items()}
    return found


def restore_learner(learner: Taped, weights: dict[str, torch.Tensor], where: str) -> None:
    """Restores the recorded weights and optimizer state of a learner. The dtypes of the recorded and the replaying run
    may differ."""
    model, state = (below(weights, f"{learner.name}/{part}/") for part in ("model", "optimizer"))
    masters = below(state, "master/")
    module, optimizer = learner.module, learner.optimizer
    reshard(module)
    # Recorded master weights are preferred, because the weights of this run may have a higher precision than the
    # recorded weights.
    restore_weights(module.stored, {**model, **masters}, where)
    optimizer.restore({**{f"master/{name}": value for name, value in model.items()}, **state})
    optimizer.forget()


def refuse_no_weights(folder: TapeFolder, step: int) -> None:
    if step not in folder.weighed():
        raise Refusal.at(
            str(folder.path),
            f"the weights before step {step} are not on the tape",
            "record the tape with tape.weights=true, or replay with --mode chained",
            code="missing-on-tape",
        )
