"""What `parallel.offload` and its kin take off a device, and what stays for the passes that need it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lockstep.recipe.keys_parallel import Offload, Parallel
from lockstep.train.host_optim import TOGETHER

if TYPE_CHECKING:
    from lockstep.train.plan_memory import Phase

# Master, moments and gradient in fp32, of a number that an update brings to the device.
UPDATED_BYTES = 16
STEP = "optimizer step"
# Of the layers whose activations wait on the host: the one that computes, and the one whose are on their way.
LAYERS_HERE = 2


@dataclass(frozen=True)
class TrainedBytes:
    """Bytes on one device of a model that is trained: its state, and its weights and gradients. `layer` are those of
    the weights that are gathered at a time, `largest` the numbers of its largest tensor, which an update takes whole.
    """

    state: int
    weights: int
    gradients: int
    layer: int
    largest: int

    @property
    def updated(self) -> int:
        """Bytes of the state that are on the device together, where it lives on the host."""
        return min(self.state, UPDATED_BYTES * max(TOGETHER, self.largest))


@dataclass(frozen=True)
class Freed:
    """What a key takes off each device, whether the recipe has set it or not."""

    setting: str
    bytes: int
    chosen: bool

    def line(self) -> str:
        return f"{self.setting} {'frees' if self.chosen else 'would free'} {self.bytes / 2**20:,.1f} MiB of each device"


def freed_by(
    settings: Parallel, ranks: int, policy: TrainedBytes, critic: TrainedBytes | None, frozen: dict[str, int]
) -> list[Freed]:
    """`frozen` are the weights of reference, teacher and reward models by the key that moves them."""
    found = []
    for key, chosen, part in (
        ("offload", settings.offload, policy),
        ("offload_critic", settings.offload_critic, critic),
    ):
        if part is None:
            continue
        sizes: dict[Offload, int] = {"optimizer": part.state}
        if ranks > 1:
            params = max(0, part.weights + part.gradients - part.layer)
            sizes |= {"params": params, "all": part.state + params}
        found += [Freed(f"parallel.{key}={kind}", size, chosen == kind) for kind, size in sizes.items()]
    found += [Freed(f"parallel.{key}=true", size, bool(getattr(settings, key))) for key, size in frozen.items() if size]
    return found


def waiting_activations(layers: int, each: int) -> int:
    """Bytes on the host, with `model.activation_offload`, of layers that keep `each` for the backward pass."""
    return max(0, layers - LAYERS_HERE) * each


def without(phase: Phase, offload: Offload, part: TrainedBytes, *, gathered: bool = False) -> Phase:
    """A phase of a model that lives on the host in part. `gathered`: its weights are whole on the device in it."""
    if phase.name == "load":
        # Slices come from the files to where they live. What an optimizer keeps is made later.
        return replace(phase, weights=phase.weights - (part.weights if offload in ("params", "all") else 0))
    if offload in ("optimizer", "all"):
        stays = part.updated if phase.name == STEP else 0
        phase = replace(phase, optimizer=phase.optimizer - part.state + stays)
    if offload in ("params", "all"):
        gone = 0 if gathered else max(0, part.weights - part.layer)
        gradients = phase.gradients if phase.name == STEP else max(0, phase.gradients - part.gradients)
        phase = replace(phase, weights=phase.weights - gone, gradients=gradients)
    return phase


def without_frozen(phases: tuple[Phase, ...], settings: Parallel, frozen: dict[str, int]) -> tuple[Phase, ...]:
    """A reference is on the device for its own pass, without anything that is kept for a backward pass; a teacher
    answers in the middle of the student's, a reward model while others of its responses are still generated."""
    reference = frozen.get("offload_reference", 0) * int(settings.offload_reference)
    teacher = frozen.get("offload_teacher", 0) * int(settings.offload_teacher)
    reward = frozen.get("offload_reward", 0) * int(settings.offload_reward)
    validation = next(phase for phase in phases if phase.name == "validation")
    found = []
    for phase in phases:
        gone = 0 if phase.name == "load" else reference
        if phase.name in (STEP, "generation"):
            gone += teacher
        if phase.name != "generation":
            gone += reward  # also while the policy is loaded: the rewards are tried before, and have left
        found.append(replace(phase, weights=phase.weights - gone))
    own_pass = replace(validation, name="reference", weights=validation.weights - reward)
    return (*found, own_pass) if reference else tuple(found)
