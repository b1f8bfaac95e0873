"""Writes the adapter of a model as a PEFT folder, and as a plain LoRA adapter for serving engines."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.errors import Problem, refuse_all
from lockstep.model.adapters.active import FIRST, INITIAL, START, TRAINED, lora_layers, saved_copies


def adapter_weights(model: Any, state: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Returns the weights of the trained adapter with the names of a PEFT file. `state` has the weights of the model,
    if these are not the model's current parameters."""
    from peft import get_peft_model_state_dict

    state = model.state_dict() if state is None else state
    other = tuple(f".{name}." for name in (INITIAL, START, FIRST))
    own = {name: value for name, value in state.items() if not any(part in f"{name}." for part in other)}
    found: dict[str, torch.Tensor] = get_peft_model_state_dict(model, state_dict=own, save_embedding_layers=False)
    return found


def adapter_parameters(parameters: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Returns the matrices of the LoRA adapters among the parameters of a model."""
    return ((name, one) for name, one in parameters if ".lora_A." in name or ".lora_B." in name)


def save_adapter(
    model: Any,
    folder: Path,
    base: str | None = None,
    *,
    plain: bool = False,
    state: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Writes the trained adapter as a PEFT folder. `base` is the name of the base model in its config. `state` has the
    weights of the adapter, if these are not the model's current parameters.

    A PiSSA adapter is converted to a LoRA adapter of the base model with twice the rank, as PEFT's option
    `path_initial_model_for_weight_conversion` does. With `plain`, a rank-stabilised adapter is written with the scale
    of a plain adapter, because not all serving engines read `use_rslora`.
    """
    from safetensors.torch import save_file

    config = copy.deepcopy(model.peft_config[TRAINED])
    if base is not None:
        config.base_model_name_or_path = base
    config.inference_mode, config.init_lora_weights = True, True
    state = model.state_dict() if state is None else state
    weights = adapter_weights(model, state)
    if has_initial(model):
        weights = _with_initial(model, weights, state)
        config.r, config.lora_alpha = 2 * config.r, config.lora_alpha * (math.sqrt(2) if config.use_rslora else 2)
        config.rank_pattern = {name: 2 * rank for name, rank in (config.rank_pattern or {}).items()}
        config.alpha_pattern = {name: 2 * alpha for name, alpha in (config.alpha_pattern or {}).items()}
    if plain and config.use_rslora:
        _with_plain_scale(config)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(folder))


def _with_plain_scale(config: Any) -> None:
    """Replaces alpha / sqrt(rank) by the same number as alpha / rank, also for layers with another rank."""
    ranks, alphas = config.rank_pattern or {}, config.alpha_pattern or {}
    config.alpha_pattern = {
        name: alphas.get(name, config.lora_alpha) * math.sqrt(ranks.get(name, config.r)) for name in {**ranks, **alphas}
    }
    config.use_rslora, config.lora_alpha = False, config.lora_alpha * math.sqrt(config.r)


def has_initial(model: nn.Module) -> bool:
    """Returns whether the model has the frozen initial adapter of PiSSA."""
    return any(INITIAL in layer.r for _, layer in lora_layers(model))


def _with_initial(
    model: Any, weights: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns the weights of both adapters as one adapter: A above A0, and B beside -B0."""
    found = dict(weights)
    for name, _ in lora_layers(model):
        for kind, dimension in (("lora_A", 0), ("lora_B", 1)):
            initial = state[f"{name}.{kind}.{INITIAL}.weight"]
            found[f"{name}.{kind}.weight"] = torch.cat([weights[f"{name}.{kind}.weight"], initial], dim=dimension)
    return found


def served_rank(model: Any) -> int | None:
    """Returns the rank of the adapter that is sent to a serving engine, or None without an adapter."""
    configs = getattr(model, "peft_config", None)
    if configs is None:
        return None
    most = max((rank for _, layer in lora_layers(model) for rank in layer.r.values()), default=int(configs[TRAINED].r))
    return int(most) * (2 if has_initial(model) else 1)


def refuse_unserved(model: Any, engine: str) -> None:
    """Raises `Refusal` if serving engines cannot apply the adapter of the model."""
    configs = getattr(model, "peft_config", None)
    problems = []
    if configs is not None and configs[TRAINED].use_dora:
        problems.append(unserved("model.lora.dora", "DoRA", engine))
    if saved_copies(model):
        problems.append(unserved("model.lora.modules_to_save", "trained copies of modules", engine))
    if any(hasattr(layer, "parameter_name") for _, layer in lora_layers(model)):
        problems.append(unserved("model.lora.targets", "adapters of experts", engine))
    refuse_all(problems)


def unserved(key: str, what: str, engine: str) -> Problem:
    return Problem(
        key,
        f"rollout.engine {engine} serves plain LoRA adapters, without {what}",
        "use rollout.engine=native, which runs every adapter",
        code="unsupported-combination",
    )
