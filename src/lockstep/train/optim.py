"""AdamW with optional fp32 master weights, and the learning-rate schedule."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from lockstep.parallel.sharded_files import fill_all
from lockstep.parallel.sharding import by_mesh, total_norm, whole
from lockstep.recipe.keys_optim import Optim

MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(step: int, total: int, settings: Optim) -> float:
    """Returns the learning rate of update `step` (counted from 0) of `total` updates. The learning rate rises linearly
    in the warm-up, from lr/warmup or from the fraction `warmup_start` of lr, and then follows the schedule. The first
    update after the warm-up has the peak learning rate. `cosine` and `linear` would reach the minimum one update after
    the last update, so no update has a learning rate of zero. `wsd` stays at the peak and falls linearly in the last
    fraction `decay` of the updates."""
    warmup = warmup_steps(total, settings)
    if step < warmup:
        start = settings.warmup_start
        return settings.lr * ((step + 1) / warmup if start is None else start + (1 - start) * step / warmup)
    low = settings.min_lr_ratio
    done = (step - warmup) / max(1, total - warmup)
    if settings.schedule == "constant":
        share = 1.0
    elif settings.schedule == "linear":
        share = 1 - done
    elif settings.schedule == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    else:
        tail = max(1, round(settings.decay * total))
        share = min(1.0, (total - step) / tail)
    return settings.lr * (low + (1 - low) * max(0.0, share))


def warmup_steps(total: int, settings: Optim) -> int:
    """Returns the number of warm-up updates. If `settings.warmup` is below 1, it is a fraction of all updates."""
    if settings.warmup >= 1:
        return int(settings.warmup)
    share = settings.warmup * total
    return {"nearest": round(share), "down": math.floor(share), "up": math.ceil(share)}[settings.warmup_rounding]


def update_rates(step: int, steps: int, updates: int, settings: Optim, critic_lr: float) -> list[tuple[float, float]]:
    """Returns the learning rates of policy and critic for each of the `updates` updates of step `step`."""
    critic = settings.model_copy(update={"lr": critic_lr})
    places = [(step, steps)] * updates
    if settings.schedule_unit == "update":
        places = [(step * updates + number, steps * updates) for number in range(updates)]
    return [(learning_rate(*place, settings), learning_rate(*place, critic)) for place in places]


class LossScale:
    """Dynamic loss scaling for fp16. After an overflow, the update is skipped and the scale is halved. After 1000
    updates without overflow, the scale is doubled."""

    GROWTH_INTERVAL = 1000

    def __init__(self, value: float = 2.0**15):
        self.value = value
        self.quiet = 0

    def update(self, overflowed: bool) -> None:
        if overflowed:
            self.value, self.quiet = self.value / 2, 0
            return
        self.quiet += 1
        if self.quiet == self.GROWTH_INTERVAL:
            self.value, self.quiet = self.value * 2, 0


class Optimizer:
    """AdamW on the parameters, or on fp32 master weights that are copied to the parameters.

    With master weights, the gradients of the micro-batches are accumulated in fp32 (`collect`). `kernel` is the name of
    the fused AdamW kernel of the device. If an update has one micro-batch, the kernel reads its gradients without a
    conversion to fp32. Parameters in `spared` and one-dimensional parameters have no weight decay, unless
    `settings.decay_all` or a group of `settings.groups` says otherwise.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        settings: Optim,
        *,
        masters: bool,
        fused: bool,
        kernel: str = "torch",
        spared: Collection[str] = (),
    ):
        self.parameters = dict(parameters)
        self.masters = masters
        self._kernel = device_kernel(kernel, list(self.parameters.values())) if masters else None
        self._grads: dict[str, torch.Tensor] = {}
        """The gradients that the fused kernel reads. They become fp32 when the second micro-batch is added."""
        self._ready: Any = None
        """The update that the fused kernel runs in `step`, prepared by `gradient_norm`."""
        self.master_weights = (
            {name: p.detach().float().clone() for name, p in self.parameters.items()} if masters else {}
        )
        self.trained: dict[str, torch.Tensor] = dict(self.master_weights) if masters else dict(self.parameters)
        self.decays = weight_decays(self.parameters, settings, spared)
        self.ratios = rate_ratios(self.parameters, settings)
        self.group_ratios = group_ratios(settings)
        kinds: dict[tuple[float, float], list[torch.Tensor]] = {}
        for name, p in self.trained.items():
            kinds.setdefault((self.decays[name], self.ratios[name]), []).append(p)
        groups = [
            {"params": some, "weight_decay": decay, "ratio": ratio}
            for (decay, ratio), every in kinds.items()
            for some in by_mesh(every)
        ]
        self.clip = settings.clip
        self.adamw = torch.optim.AdamW(
            groups,
            lr=settings.lr,
            betas=(settings.betas[0], settings.betas[1]),
            eps=settings.eps,
            # The option `fused` of torch would keep the step counts on the device, but the fused kernel of lockstep
            # needs them on the CPU.
            fused=fused and self._kernel is None,
        )

    def local_masters(self) -> dict[str, torch.Tensor]:
        """Returns the fp32 master weights of this rank by name. Returns an empty dict if there are no master
        weights."""
        return dict(self.master_weights)

    @torch.no_grad()
    def collect(self) -> None:
        """Adds the gradients of a micro-batch to the fp32 gradients of the master weights, and clears the gradients of
        the parameters."""
        if not self.masters:
            return
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            if self._kernel is not None:
                self._accumulate(name, parameter.grad)
                parameter.grad = None
                continue
            master = self.trained[name]
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    def _accumulate(self, name: str, gradient: torch.Tensor) -> None:
        grad, self._ready = self._grads.get(name), None
        self._grads[name] = gradient if grad is None else grad.float().add_(gradient)

    def gradient(self, name: str) -> torch.Tensor | None:
        """Returns the accumulated gradient of a parameter before clipping."""
        grad = self._grads.get(name)
        return self.trained[name].grad if grad is None else grad

    @torch.no_grad()
    def gradient_norm(self, scale: float = 1.0) -> torch.Tensor:
        """Divides the gradients by the loss scale and returns the norm of all gradients."""
        if self._kernel is not None:
            if scale != 1.0:
                self._grads = {name: gradient.float().div_(scale) for name, gradient in self._grads.items()}
            if not self._grads:
                return torch.zeros(())
            norms = torch._foreach_norm(list(self._grads.values()), 2, dtype=torch.float32)
            # The CPU prepares the update while the device computes the norm.
            self._ready = self._update_of(self._kernel)
            return torch.linalg.vector_norm(torch.stack(norms))
        gradients = [p.grad for p in self.trained.values() if p.grad is not None]
        if scale != 1.0:
            for some in by_mesh(gradients):
                torch._foreach_div_(some, scale)
        return total_norm(gradients)

    @torch.no_grad()
    def step(self, lr: float, norm: torch.Tensor) -> None:
        """Clips the gradients, updates the parameters, and clears the gradients."""
        if self._kernel is not None:
            self._step_at_once(self._kernel, lr, norm)
            self.forget()
            return
        if self.clip is not None:
            for some in by_mesh(self.trained.values()):
                torch.nn.utils.clip_grads_with_norm_(some, self.clip, norm)
        for group in self.adamw.param_groups:
            group["lr"] = lr * group["ratio"]
        self.adamw.step()
        for name, master in self.master_weights.items():
            self.parameters[name].copy_(master)
        self.forget()

    def _update_of(self, kernel: ModuleType) -> Any:
        entries = []
        for name, gradient in self._grads.items():
            master = self.trained[name]
            state = self.adamw.state.get(master)
            # New moments are added to the optimizer state only in the step, as in torch.
            moments = (state["exp_avg"], state["exp_avg_sq"]) if state else [torch.zeros_like(master) for _ in range(2)]
            decay, ratio = self.decays[name], self.ratios[name]
            entries.append(kernel.Entry(self.parameters[name].data, gradient, master, *moments, decay, ratio))
        return kernel.AdamwUpdate(entries)

    def _step_at_once(self, kernel: ModuleType, lr: float, norm: torch.Tensor) -> None:
        clip = torch.ones_like(norm) if self.clip is None else (self.clip / (norm + 1e-6)).clamp(max=1.0)
        ready = self._ready or self._update_of(kernel)
        counts = []
        for entry in ready.entries:
            state = self.adamw.state[entry.master]
            if not state:
                state |= {"step": torch.zeros(()), "exp_avg": entry.mean, "exp_avg_sq": entry.square}
            state["step"] += 1
            counts.append(state["step"].item())
        group = self.adamw.param_groups[0]  # the parameter groups differ only in weight decay and learning rate
        ready.step(counts, clip, lr=lr, betas=group["betas"], eps=group["eps"])

    def forget(self) -> None:
        self._grads, self._ready = {}, None
        self.adamw.zero_grad(set_to_none=True)
        for parameter in self.parameters.values():
            parameter.grad = None

    def local_state(self) -> dict[str, torch.Tensor]:
        """Returns the optimizer state of this rank by name. The tensors are shards if the parameters are sharded."""
        state = {f"master/{name}": master for name, master in self.master_weights.items()}
        for name, parameter in self.trained.items():
            for key, value in self.adamw.state[parameter].items():
                state[f"{key}/{name}"] = value
        return state

    def full_state(self) -> dict[str, torch.Tensor]:
        """Returns the full optimizer state by name, on the CPU. If the parameters are sharded, all ranks must call this
        function."""
        return {name: whole(value).cpu() for name, value in self.local_state().items()}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restores the optimizer state. Each rank reads only its shards from the files.

        AdamW has no state of a parameter before its first update. So a checkpoint from the warm-up of the critic has no
        moments of the policy."""
        stored = set(tensors)
        targets = {f"master/{name}": master for name, master in self.master_weights.items()}
        for name, parameter in self.trained.items():
            if not has_moments(name, stored):
                self.adamw.state.pop(parameter, None)
                continue
            state = self.adamw.state[parameter]
            # AdamW creates its state in the first step, but restoring needs the state before that step. The fused AdamW
            # of torch keeps its step count on the device.
            state["step"] = torch.zeros((), device=parameter.device if self.adamw.defaults["fused"] else None)
            for key in MOMENTS:
                state[key] = torch.zeros_like(parameter, requires_grad=False)
            targets |= {f"{key}/{name}": value for key, value in state.items()}
        fill_all(targets, tensors)


def has_moments(name: str, stored: Collection[str]) -> bool:
    """Returns whether the stored state has AdamW's state of a parameter. A part of it counts, so that the missing part
    is an error."""
    return any(f"{key}/{name}" in stored for key in (*MOMENTS, "step"))


def weight_decays(parameters: Mapping[str, torch.Tensor], settings: Optim, spared: Collection[str]) -> dict[str, float]:
    """Returns the weight decay of each parameter by name."""
    decayed = {name for name, p in parameters.items() if settings.decay_all or (p.ndim >= 2 and name not in spared)}
    found = {name: settings.weight_decay if name in decayed else 0.0 for name in parameters}
    groups = {name: settings.group_of(name) for name in parameters}
    own = {name: one.weight_decay for name, one in groups.items() if one is not None and one.weight_decay is not None}
    return {**found, **own}


def rate_ratios(parameters: Iterable[str], settings: Optim) -> dict[str, float]:
    """Returns the learning rate of each parameter by name, divided by that of parameters without a group."""
    return {name: settings.rate_ratio(settings.group_of(name)) for name in parameters}


def group_ratios(settings: Optim) -> dict[str, float]:
    """Returns the learning rate of each named group, divided by that of parameters without a group."""
    return {group.name: settings.rate_ratio(group) for group in settings.groups if group.name is not None}


def device_kernel(name: str, parameters: Sequence[torch.Tensor]) -> ModuleType | None:
    """Returns the fused AdamW kernel of the device. Returns None if AdamW of torch must be used."""
    if name != "triton" or importlib.util.find_spec("triton") is None:
        return None
    from lockstep.kernels import adamw_triton as triton_adamw

    return triton_adamw if triton_adamw.fits(parameters) else None
