"""AdamW whose state, or whose weights and gradients, are offloaded to the CPU.

The results are the same as without offload. The update is computed on the device with the same operators, a few
parameters at a time. Offloaded tensors of these parameters are copied to the device before their update, and back after
it. The operators are elementwise, so the number of parameters that are updated together does not change the results.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from lockstep.parallel.offload import TOGETHER, HostRoom, on_device
from lockstep.parallel.sharded_files import fill_all
from lockstep.parallel.sharding import as_sharded, total_norm, whole_on
from lockstep.parallel.tensor import is_sliced
from lockstep.recipe.keys_optim import Optim
from lockstep.train.optim import (
    MOMENTS,
    Optimizer,
    device_kernel,
    group_ratios,
    has_moments,
    rate_ratios,
    weight_decays,
)


class HostOptimizer(Optimizer):
    """AdamW with offload. `device` computes the update. With `state_on_host`, master weights and moments are on the CPU
    between updates. Weights and gradients stay where the model keeps them, on the device or on the CPU."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        settings: Optim,
        *,
        masters: bool,
        fused: bool,
        kernel: str,
        device: torch.device,
        state_on_host: bool,
        spared: Collection[str] = (),
    ):
        self.parameters = dict(parameters)
        self.decays = weight_decays(self.parameters, settings, spared)
        self.ratios, self.group_ratios = rate_ratios(self.parameters, settings), group_ratios(settings)
        self.masters, self.device, self.state_on_host, self.settings = masters, device, state_on_host, settings
        self.clip = settings.clip
        self.fused = fused
        self._kernel = device_kernel(kernel, list(self.parameters.values())) if masters else None
        self._room = HostRoom(device)
        self._grads: dict[str, torch.Tensor] = {}
        """The gradients, which are taken from the parameters. Without master weights, `gradient_norm` fills this
        dict."""
        self._state = {name: self._fresh(name, parameter) for name, parameter in self.parameters.items()}
        """For each parameter, this rank's shard of the master weight and the moments, and the step count."""

    def _fresh(self, name: str, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        weight = local(parameter.detach())
        master = weight.float() if self.masters else weight
        state = {key: self._home(torch.zeros_like(master)) for key in MOMENTS}
        if self.masters:
            state["master"] = self._home(master)
        on = self.device if self.fused and self._kernel is None else None
        return {"step": torch.zeros((), device=on), **state}

    def _home(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._room.copy(tensor) if self.state_on_host else on_device(tensor, self.device)

    def local_masters(self) -> dict[str, torch.Tensor]:
        if not self.masters:
            return {}
        return {name: _as_sliced(state["master"], self.parameters[name]) for name, state in self._state.items()}

    @torch.no_grad()
    def collect(self) -> None:
        if not self.masters:
            return
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            grad = self._grads.get(name)
            if grad is None:
                self._grads[name] = parameter.grad if self._kernel is not None else parameter.grad.float()
            else:
                self._grads[name] = grad.float().add_(parameter.grad)
            parameter.grad = None

    def gradient(self, name: str) -> torch.Tensor | None:
        return self._grads.get(name, self.parameters[name].grad)

    @torch.no_grad()
    def gradient_norm(self, scale: float = 1.0) -> torch.Tensor:
        if not self.masters:
            taken = {name: parameter.grad for name, parameter in self.parameters.items()}
            self._grads = {name: gradient for name, gradient in taken.items() if gradient is not None}
        self._grads = {name: _moved(gradient, self.device) for name, gradient in self._grads.items()}
        if scale != 1.0:
            self._grads = {name: gradient.div_(scale) for name, gradient in self._grads.items()}
        if self._kernel is None:
            return total_norm(self._grads.values())
        if not self._grads:
            return torch.zeros(())
        norms = torch._foreach_norm(list(self._grads.values()), 2, dtype=torch.float32)
        return torch.linalg.vector_norm(torch.stack(norms))

    @torch.no_grad()
    def step(self, lr: float, norm: torch.Tensor) -> None:
        factor = None if self.clip is None else (self.clip / (norm + 1e-6)).clamp(max=1.0)
        for names in self._parts():
            self._update(names, lr, factor, norm)
        self.forget()

    def _parts(self) -> Iterator[list[str]]:
        names: list[str] = []
        numbers = 0
        for name, gradient in self._grads.items():
            size = local(gradient).numel()
            if names and numbers + size > TOGETHER:
                yield names
                names, numbers = [], 0
            names.append(name)
            numbers += size
        if names:
            yield names

    def _update(self, names: list[str], lr: float, factor: torch.Tensor | None, norm: torch.Tensor) -> None:
        weights = {name: local(self.parameters[name].detach()) for name in names}
        here: dict[str, dict[str, torch.Tensor]] = {}
        for name in names:
            here[name] = {key: brought(self._state[name][key], self.device) for key in MOMENTS}
            stepped = self._state[name]["master"] if self.masters else weights[name]
            here[name]["weight"] = brought(stepped, self.device)
        if self._kernel is not None:
            self._by_kernel(names, weights, here, lr, torch.ones_like(norm) if factor is None else factor)
        else:
            self._by_torch(names, here, lr, factor)
        for name in names:
            for key in MOMENTS:
                put(here[name][key], self._state[name][key])
            if self.masters:
                put(here[name]["weight"], self._state[name]["master"])
            if self._kernel is None:
                put(here[name]["weight"], weights[name])

    def _by_torch(
        self, names: list[str], here: dict[str, dict[str, torch.Tensor]], lr: float, factor: torch.Tensor | None
    ) -> None:
        beta1, beta2 = self.settings.betas
        kinds = {name: (self.decays[name], self.ratios[name]) for name in names}
        for decay, ratio in dict.fromkeys(kinds.values()):
            group = [name for name in names if kinds[name] == (decay, ratio)]
            gradients = [local(self._grads[name]) for name in group]
            if factor is not None:
                torch._foreach_mul_(gradients, factor.to(gradients[0].device))
            adamw(
                [here[name]["weight"] for name in group],
                gradients,
                [here[name]["exp_avg"] for name in group],
                [here[name]["exp_avg_sq"] for name in group],
                [],
                [self._state[name]["step"] for name in group],
                fused=True if self.fused else None,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=lr * ratio,
                weight_decay=decay,
                eps=self.settings.eps,
                maximize=False,
            )

    def _by_kernel(
        self,
        names: list[str],
        weights: dict[str, torch.Tensor],
        here: dict[str, dict[str, torch.Tensor]],
        lr: float,
        factor: torch.Tensor,
    ) -> None:
        kernel: Any = self._kernel
        entries, counts = [], []
        for name in names:
            one = here[name]
            moments = one["exp_avg"], one["exp_avg_sq"]
            decay, ratio = self.decays[name], self.ratios[name]
            entries.append(kernel.Entry(weights[name], self._grads[name], one["weight"], *moments, decay, ratio))
            self._state[name]["step"] += 1
            counts.append(self._state[name]["step"].item())
        betas = (self.settings.betas[0], self.settings.betas[1])
        kernel.AdamwUpdate(entries).step(counts, factor, lr=lr, betas=betas, eps=self.settings.eps)

    def forget(self) -> None:
        self._grads = {}
        for parameter in self.parameters.values():
            parameter.grad = None

    def local_state(self) -> dict[str, torch.Tensor]:
        return {
            f"{key}/{name}": value if key == "step" else _as_sliced(value, self.parameters[name])
            for name, state in self._state.items()
            for key, value in state.items()
        }

    def full_state(self) -> dict[str, torch.Tensor]:
        return {name: whole_on(value, self.device).cpu() for name, value in self.local_state().items()}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        stored = set(tensors)
        fresh = [name for name in self.parameters if not has_moments(name, stored)]
        unset = {f"{key}/{name}" for name in fresh for key in (*MOMENTS, "step")}
        targets = self.local_state()
        for name in unset:
            targets.pop(name).zero_()
        fill_all(targets, tensors)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the shard of a tensor on this rank."""
    return tensor.to_local() if is_sliced(tensor) else tensor


def _as_sliced(slice_: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard as a DTensor with the layout of the parameter."""
    if not is_sliced(parameter):
        return slice_
    return as_sharded(slice_, parameter.device_mesh, parameter.placements, parameter.shape)


def _moved(gradient: torch.Tensor, device: torch.device) -> torch.Tensor:
    return gradient if local(gradient).device == device else _as_sliced(on_device(local(gradient), device), gradient)


def brought(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns the tensor on the device. If the device is the CPU, the tensor is copied too, so that tests notice a
    missing write-back."""
    return tensor if tensor.device == device and device.type != "cpu" else on_device(tensor, device)


def put(value: torch.Tensor, home: torch.Tensor) -> None:
    """Copies a value to where it is kept, unless it is already there."""
    if value is not home:
        home.copy_(value)
