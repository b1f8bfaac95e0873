"""Records a learner's updates: numbers per target, gradients, and the weights before and after the optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import nn

from lockstep.device.base import fetched
from lockstep.parallel.sharding import whole
from lockstep.parallel.world import World
from lockstep.tape.digest import digests, on_host
from lockstep.tape.tape_rows import RECEIVED, Received
from lockstep.types import MicroBatch

# A timer whose time does not count towards the step (`run/metrics.py`).
Aside = Callable[[str], AbstractContextManager[None]]
# Weights of each parameter that are recorded before and after the optimizer step.
SAMPLED = 64


class Stepper(Protocol):
    """The part of the optimizer (`train/optim.py`) that a tape reads."""

    parameters: dict[str, nn.Parameter]
    trained: dict[str, torch.Tensor]
    adamw: torch.optim.Optimizer

    def full_state(self) -> dict[str, torch.Tensor]: ...

    def gradient(self, name: str) -> torch.Tensor | None: ...


class Observer:
    """Callbacks of a learner. This base class records nothing, for runs without a tape."""

    def on_forward(self, batch: MicroBatch, output: Any) -> None:
        """Called after the forward pass of a micro-batch."""

    def on_loss(self, loss: float, divisor: float, targets: int, scale: float) -> None:
        """Called after all micro-batches. `loss` is that of the update, `scale` the fp16 loss scale."""

    def on_gradients(self, norm: torch.Tensor, lr: float) -> None:
        """Called with the complete gradients, before clipping."""

    def on_step(self) -> None:
        """Called after the optimizer step."""


@dataclass
class _Passed:
    """A micro-batch: the indices of its targets, and functions that wait for the outputs, the inputs and the gradients
    at the outputs, which are still on their way to the host."""

    index_K: torch.Tensor
    answers: Callable[[], torch.Tensor]
    received: Callable[[], Received]
    pulls: list[Callable[[], torch.Tensor]] = field(default_factory=list)


class UpdateObserver(Observer):
    """Records the updates of a step: `tensors` under `<learner>/<update>/...`, and one `info` entry per update."""

    def __init__(self, name: str, module: nn.Module, optimizer: Stepper, world: World, aside: Aside):
        self.name, self.optimizer, self.world, self.aside = name, optimizer, world, aside
        self.detailed = False
        self._last: MicroBatch | None = None
        module.register_forward_pre_hook(self._receive)
        self.begin(detailed=False)

    def begin(self, *, detailed: bool) -> None:
        """Start a step. The first update of a detailed step is digested parameter by parameter."""
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
        # With context parallelism each rank's model receives a part of the micro-batch; record the full one.
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
        """All tensors of the step on the host (a collective). Only here the host waits for the device."""
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
        """Digests of the model's parameters, on the device (a collective if sharded)."""
        return digests(self.optimizer.parameters)

    @property
    def has_weight_digests(self) -> bool:
        """Whether this step has digests of the updated weights."""
        return bool(self._left)

    def _after_step(self) -> None:
        weights = digests(self.optimizer.trained)
        found = {f"{self._key}/weights/{name}": one for name, one in weights.items()}
        for name, weight in self.optimizer.trained.items():
            found[f"{self._key}/sample/{name}/after"] = _pick(weight)
            # The model's weight, which is a rounded copy if the optimizer has master weights.
            found[f"{self._key}/sample/{name}/held"] = _pick(self.optimizer.parameters[name])
        self.tensors |= on_host(found)


def _received(batch: MicroBatch | None) -> Callable[[], Received]:
    assert batch is not None
    ids, positions, predictors, targets = (
        fetched(tensor) for tensor in (batch.input_ids_NT, batch.position_ids_NT, batch.predictors_K, batch.targets_K)
    )
    lengths, packed, packed_index_E = batch.lengths, batch.packed, batch.packed_index_E
    return lambda: Received(ids(), positions(), predictors(), targets(), lengths, packed, packed_index_E)


def answers_of(output: Any) -> torch.Tensor:
    """One number per target: a policy's log-probability, or the output of a value model."""
    return output if isinstance(output, torch.Tensor) else output.logprobs_K


@lru_cache(maxsize=256)
def sampled(count: int, device: torch.device | None = None) -> torch.Tensor:
    """Indices of the sampled weights of a parameter with `count` weights, the same in every run."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, count, (min(SAMPLED, count),), generator=generator).to(device)


def _pick(tensor: torch.Tensor) -> torch.Tensor:
    tensor = whole(tensor.detach())
    return tensor.take(sampled(tensor.numel(), tensor.device)).float()


def _moments(state: Any) -> list[tuple[str, torch.Tensor]]:
    return [(key, state[key]) for key in ("exp_avg", "exp_avg_sq") if key in state]
