"""LoRA adapters: a fresh one as the recipe says, or one that goes on from a PEFT folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lockstep.errors import Problem, Refusal, first_line, shortened
from lockstep.model.resolve import ADAPTER, adapter_folder
from lockstep.recipe.schema import Lora

CONFIG, WEIGHTS = ADAPTER, "adapter_model.safetensors"
# What an adapter's configuration may say without being more than plain LoRA. All else must ask for nothing: a kind of
# LoRA that is not known here, also one that a later PEFT brings, would be trained as what it is not.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # The others begin with a change of the base model, of which the stored weights are a part.
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
_ANY = {"r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "task_type", "auto_mapping"}
_ANY |= {"base_model_name_or_path", "revision", "inference_mode", "peft_version", "runtime_config", "eva_config"}
_ANY |= {"megatron_core", "qalora_group_size", "ensure_weight_tying"}


def lora_config(settings: Lora, task: str | None) -> Any:
    """PEFT's configuration of the adapter. One that training starts from says its own rank, scale and layers."""
    from peft import LoraConfig

    keys: dict[str, Any] = {
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": settings.targets,
        "exclude_modules": settings.exclude,
    }
    if settings.adapter is not None:
        keys = _stored(settings)
    return LoraConfig(**keys, bias="none", task_type=task)


def start_from(model: Any, folder: str) -> None:
    """The weights of a stored adapter into one that has just been put on the model; every one of them, and no other."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    where = f"model.lora.adapter {folder}"
    file = Path(adapter_folder(folder, "model.lora.adapter")) / WEIGHTS
    try:
        weights = load_file(file)
    except (OSError, SafetensorError) as error:
        raise Refusal.at(where, f"{WEIGHTS} cannot be read: {first_line(error)}", "name a PEFT folder") from error
    own = get_peft_model_state_dict(model)
    problems = [Problem(where, f"the adapter has no {name}") for name in sorted(own.keys() - weights.keys())]
    problems += [Problem(where, f"the model has no place for {name}") for name in sorted(weights.keys() - own.keys())]
    problems += [
        Problem(
            where, f"{name} has the shape {tuple(weights[name].shape)}, and the model needs {tuple(own[name].shape)}"
        )
        for name in sorted(own.keys() & weights.keys())
        if own[name].shape != weights[name].shape
    ]
    if problems:
        raise Refusal(shortened(problems, "weights"))
    if torch.get_default_device().type != "meta":  # a model that is only counted has no place for them
        set_peft_model_state_dict(model, weights)


def _stored(settings: Lora) -> dict[str, Any]:
    """What the folder says. A recipe that says otherwise is refused."""
    where = f"model.lora.adapter {settings.adapter}"
    file = Path(adapter_folder(str(settings.adapter), "model.lora.adapter")) / CONFIG
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        keys = {name: found[name] for name in ("r", "lora_alpha", "lora_dropout", "target_modules")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refusal.at(where, f"{CONFIG} cannot be read: {first_line(error)}", "name a PEFT folder") from error
    keys["exclude_modules"] = found.get("exclude_modules")
    problems = [
        Problem(where, f"{name} is {value!r}: only plain LoRA is trained here", "name it as model.path: it is merged")
        for name, value in found.items()
        if name not in _ANY and value and value not in _PLAIN.get(name, ())
    ]
    targets = keys["target_modules"] if isinstance(keys["target_modules"], list) else []
    problems += [
        Problem(where, f"{name} carries an adapter, and the output head is run in chunks", "merge it into the model")
        for name in targets
        if name.split(".")[-1] in ("lm_head", "embed_tokens")
    ]
    for key, name in (("rank", "r"), ("alpha", "lora_alpha")):
        said = getattr(settings, key)
        if said is not None and said != keys[name]:
            problems.append(Problem(f"model.lora.{key}", f"is {said}, and the adapter's is {keys[name]}", "remove it"))
    if problems:
        raise Refusal(problems)
    return keys
