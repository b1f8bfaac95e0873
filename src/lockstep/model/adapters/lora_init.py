"""Initial values of LoRA matrices that are computed from the weights of the adapted layers: PiSSA and DoRA's norms.

PiSSA starts from the principal singular vectors of each weight W = U S V: B0 A0 = U_r S_r V_r / scale. PEFT subtracts
the adapter from the base weight, so that the model starts unchanged. lockstep keeps the base weight and adds a second,
frozen adapter with the values -B0 and A0. Both models compute W + scale (B A - B0 A0), up to rounding. With a frozen
adapter, the base model stays the reference model, weights can be sharded, and the export is a plain LoRA adapter of
rank 2 r.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.errors import Problem, refuse_all
from lockstep.model.adapters.active import INITIAL, TRAINED, add_frozen, lora_layers
from lockstep.parallel.sharding import held_part

ReadWeight = Callable[[nn.Parameter], torch.Tensor]
"""Returns the full weight of a base layer."""


def pissa_factors(weight: torch.Tensor, rank: int, scale: float, init: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the matrices A and B of PiSSA in fp32, with PEFT's formulas (`LoraLayer.pissa_init`)."""
    if init == "pissa":
        u, s, vh = torch.linalg.svd(weight.float(), full_matrices=False)
        u, s, vh = u[:, :rank], s[:rank], vh[:rank]
    else:
        # The randomised decomposition draws from the CPU's generator, so it runs on the CPU.
        u, s, v = torch.svd_lowrank(weight.float().cpu(), rank, niter=int(init.removeprefix("pissa_niter_")))
        vh = v.T
    root = torch.sqrt(s / scale)
    return (root[:, None] * vh).contiguous(), (u * root).contiguous()


def start_from_weights(model: nn.Module, config: Any, init: str, seed: int, read: ReadWeight, *, shared: bool) -> None:
    """Sets the adapter to the principal singular vectors of its weights, and adds the initial adapter. With `shared`,
    all ranks call this function; each rank decomposes some weights and sends the result to all others, because two
    machines may compute different singular vectors. The caller forks the random state of the CPU."""
    refuse_all(list(_unfit(model, init)))
    size, rank = (dist.get_world_size(), dist.get_rank()) if shared else (1, 0)
    for index, (_, layer) in enumerate(lora_layers(model)):
        weight, owner = layer.get_base_layer().weight, index % size
        matrices = [layer.lora_A[TRAINED].weight, layer.lora_B[TRAINED].weight]
        # A weight on the meta device has no values. `lockstep plan` builds such a model to count its sizes.
        factors: list[Any] = [None, None]
        if owner == rank:
            full = read(weight)
            torch.default_generator.manual_seed(seed + index)  # the result does not depend on the number of ranks
            if full.device.type != "meta":
                factors = [
                    one.to(matrices[0].dtype).cpu()
                    for one in pissa_factors(full, layer.r[TRAINED], layer.scaling[TRAINED], init)
                ]
        if shared:
            dist.broadcast_object_list(factors, src=owner)
        with torch.no_grad():
            for matrix, value in zip(matrices, factors, strict=True):
                if value is not None:
                    matrix.copy_(value)
    add_initial(model, config)


def add_initial(model: nn.Module, config: Any) -> None:
    """Adds the frozen initial adapter, which subtracts the first values of the trained adapter, to all layers."""
    for _, layer in lora_layers(model):
        add_frozen(layer, config, INITIAL, sign=-1.0)
        layer._active_adapter = [TRAINED, INITIAL]


def _unfit(model: nn.Module, init: str) -> list[Problem]:
    from peft.tuners.lora import Linear

    problems = []
    for name, layer in lora_layers(model):
        base = layer.get_base_layer()
        if not isinstance(layer, Linear) or not isinstance(base, nn.Linear):
            why = f"{init} decomposes the weights of linear layers, but {name} is a {type(base).__name__}"
            problems.append(
                Problem(
                    "model.lora.init",
                    why,
                    "use init default, or list linear layers in model.lora.targets",
                    code="unfit-adapter",
                )
            )
        elif len(layer.lora_magnitude_vector):
            why = f"DoRA starts from the norms of the unchanged weights, and {init} changes them"
            remedy = "set model.lora.dora=false, or model.lora.init=default"
            problems.append(Problem("model.lora.init", why, remedy, code="unfit-adapter"))
        elif layer.r[TRAINED] > min(base.in_features, base.out_features):
            why = f"rank {layer.r[TRAINED]} is larger than the smaller side of {name} ({base.out_features} x "
            why += f"{base.in_features}), which has no more singular vectors"
            problems.append(Problem("model.lora.rank", why, "set a smaller rank", code="unfit-adapter"))
    return problems[:1]


# DoRA's magnitude starts as the norm of each row of the weight. If the weights of a sharded model are read after the
# adapter is created, the norms are computed from the shards.


@contextmanager
def norms_later() -> Iterator[None]:
    """Inside the `with` block, a DoRA layer whose weight is on the meta device gets a magnitude without values."""
    from peft.tuners.lora.dora import DoraLinearLayer

    original = DoraLinearLayer.update_layer

    def update_layer(layer: Any, *, base_layer: Any, lora_A: torch.Tensor, **more: Any) -> None:
        if base_layer.weight.device.type != "meta":
            original(layer, base_layer=base_layer, lora_A=lora_A, **more)
            return
        rows = torch.empty(base_layer.weight.shape[0], dtype=base_layer.weight.dtype, device="meta")
        layer.weight = nn.Parameter(rows, requires_grad=True)

    DoraLinearLayer.update_layer = update_layer
    try:
        yield
    finally:
        DoraLinearLayer.update_layer = original


def unset_norms(model: nn.Module) -> list[str]:
    """Returns the names of the layers whose magnitudes have no values yet."""
    return [
        name
        for name, layer in lora_layers(model)
        if TRAINED in layer.lora_magnitude_vector and layer.lora_magnitude_vector[TRAINED].weight.is_meta
    ]


@torch.no_grad()
def fill_norms(model: nn.Module, names: Sequence[str]) -> None:
    """Sets the magnitudes of new DoRA adapters to the norms of the rows of their weights. Weight and magnitude are
    sharded by rows, so each rank has the rows whose norms it needs. The product B A of a new adapter is zero."""
    for name in names:
        layer: Any = model.get_submodule(name)
        rows, _ = held_part(layer.get_base_layer().weight.detach())
        magnitude, _ = held_part(layer.lora_magnitude_vector[TRAINED].weight.detach())
        assert len(rows) == len(magnitude), name
        if len(rows):
            magnitude.copy_(torch.linalg.norm(rows, dim=1))
