"""The optimizer of the update rules in `optimizers/`, with the state on the device or on the host.

Every rule computes in fp32. Parameters are updated a few rows at a time where the rule allows it, so that temporary
tensors stay small.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lockstep.optimizers.roles import Roles
from lockstep.optimizers.rule_table import rule_of
from lockstep.optimizers.stochastic_rounding import element_index, round_to_bf16, rounding_key
from lockstep.optimizers.update_rule import ParameterStep, ShardLayout
from lockstep.parallel.sharded_files import fill_all
from lockstep.recipe.keys_optim import Optim
from lockstep.train.optim_offload import HostOptimizer, brought, local, put

# The number of elements of a parameter that are updated at a time, if the rule can update rows one after the other.
ROWS_TOGETHER = 2**24


class RuleOptimizer(HostOptimizer):
    """Updates parameters by the rule `settings.name`. With `state_on_host`, master weights and state are on the CPU
    between updates. `seed` selects the random numbers of stochastic rounding."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        settings: Optim,
        *,
        masters: bool,
        device: torch.device,
        state_on_host: bool = False,
        spared: Collection[str] = (),
        roles: Roles | None = None,
        seed: str = "",
    ):
        named = dict(parameters)
        self.layouts = {name: ShardLayout.of(parameter) for name, parameter in named.items()}
        dtypes = {parameter.dtype for parameter in named.values()}
        moments = torch.float32 if masters or len(dtypes) > 1 else next(iter(dtypes), torch.float32)
        self.rule, self.seed = rule_of(settings, roles or Roles(), moments), seed
        where: dict[str, Any] = {"device": device, "state_on_host": state_on_host, "spared": spared}
        super().__init__(named.items(), settings, masters=masters, fused=False, kernel="torch", **where)

    def _fresh(self, name: str, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        layout, weight = self.layouts[name], local(parameter.detach())
        tensors = self.rule.state(name, layout.shape, layout.part)
        state = {key: torch.zeros(one.shape, dtype=one.dtype, device=weight.device) for key, one in tensors.items()}
        if self.masters:
            state["master"] = weight.float()
        return {"step": torch.zeros(()), **{key: self._home(tensor) for key, tensor in state.items()}}

    def _update(self, names: list[str], lr: float, factor: torch.Tensor | None, norm: torch.Tensor) -> None:
        for name in names:
            state, weight = self._state[name], local(self.parameters[name].detach())
            state["step"] += 1
            here = {key: brought(value, self.device) for key, value in state.items() if key != "step"}
            updated = here.pop("master") if self.masters else brought(weight, self.device)
            gradient = local(self._grads[name]).to(self.device)
            for start, stop in self._rows(name, weight):
                rows = slice(start, stop) if weight.ndim else ...
                self._update_rows(name, start, stop, updated[rows], gradient[rows], _rows_of(here, rows), lr, factor)
            for key, value in here.items():
                put(value, state[key])
            if self.masters:
                put(updated, state["master"])
            put(updated, weight)

    def _rows(self, name: str, weight: torch.Tensor) -> Iterator[tuple[int, int]]:
        """Yields the first and last row of each part of the shard that is updated at once."""
        rows = weight.shape[0] if weight.ndim else 1
        if not self.rule.by_rows(name):
            yield 0, rows
            return
        together = max(1, ROWS_TOGETHER * rows // max(1, weight.numel()))
        yield from ((start, min(start + together, rows)) for start in range(0, rows, together))

    def _update_rows(
        self,
        name: str,
        start: int,
        stop: int,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, torch.Tensor],
        lr: float,
        factor: torch.Tensor | None,
    ) -> None:
        count, layout = int(self._state[name]["step"]), self.layouts[name]
        # Moments in half precision are updated in fp32.
        wide = {key: value.float() if value.is_floating_point() else value for key, value in state.items()}
        weight32 = weight.float()
        gradient = gradient.float().clone() if factor is None else gradient.float() * factor.to(gradient.device)
        rate = lr * self.ratios[name]
        self.rule.update(ParameterStep(name, weight32, gradient, wide, count, rate, self.decays[name], layout))
        for key, value in wide.items():
            put(value, state[key])
        if self.settings.stochastic_rounding and weight.dtype == torch.bfloat16:
            index = element_index(layout, start, stop, weight.device)
            weight32 = round_to_bf16(weight32, rounding_key(self.seed, name, count), index)
        put(weight32, weight)

    def local_state(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, state in self._state.items():
            layout = self.layouts[name]
            full = self.rule.state(name, layout.shape, layout.shape)
            for key, value in state.items():
                if key == "step":
                    found[f"step/{name}"] = value
                elif key == "master":
                    found[f"master/{name}"] = layout.sharded(value, layout.shape)
                else:
                    found[f"{key}/{name}"] = layout.sharded(value, full[key].shape, full[key].reduced)
        return found

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        stored, targets = set(tensors), self.local_state()
        for name in self.parameters:
            keys = ["step", *(key for key in self._state[name] if key not in ("step", "master"))]
            # A checkpoint from the warm-up of the critic has no state of the policy.
            if not any(f"{key}/{name}" in stored for key in keys):
                for key in keys:
                    targets.pop(f"{key}/{name}").zero_()
        fill_all(targets, tensors)


def _rows_of(state: Mapping[str, torch.Tensor], rows: Any) -> dict[str, torch.Tensor]:
    return {key: value[rows] for key, value in state.items()}
