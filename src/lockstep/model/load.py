"""Loads a policy or value model with the dtype, LoRA and sharding of the recipe, and checks it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lockstep.device.device_errors import refuse_trouble
from lockstep.errors import Refusal, first_line
from lockstep.kernels.fused import fuse
from lockstep.kernels.quantized.fp8_linear import train_in_fp8
from lockstep.kernels.quantized.projections import projections
from lockstep.model.check import RUN_ERRORS, check_architecture, check_policy, unsupported
from lockstep.model.division.expert_plan import check_experts
from lockstep.model.division.tensor_trial import check_division
from lockstep.model.heads import ValueModel, build_value_model
from lockstep.model.load_folder import (
    DTYPES,
    config_of,
    divide_model,
    division_of,
    follow_copies,
    kernel_of,
    load_base,
    new_adapter,
    spread,
)
from lockstep.model.lora import with_adapter
from lockstep.model.policy import Policy, Scoring
from lockstep.model.pretrained import refuse_partial, tokenizer_of
from lockstep.model.resolve import folders_of, model_folder, stored_adapter
from lockstep.model.towers.vision_model import freeze_towers, loaded_kind, refuse_no_towers
from lockstep.model.weights import digits_of, read_places
from lockstep.parallel.sharding import Sharding
from lockstep.recipe.schema import Lora, Model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    return tokenizer_of(model_folder(path), f"model.path {path}")


def load_config(path: str) -> Any:
    return config_of(model_folder(path), path)


def load_policy(
    settings: Model,
    device: torch.device,
    kernel: str,
    seed: int,
    scoring: Scoring | None = None,
    sharding: Sharding | None = None,
    *,
    frozen: bool = False,
) -> Policy:
    """Loads the model of the recipe to `device`, or shards it over the ranks. Checks that the log-probs of the model
    equal those that transformers computes."""
    kernel = kernel_of(settings, kernel)
    folders = folders_of(settings)
    config = config_of(folders.model, settings.path)
    check_architecture(config, settings.path, DTYPES[settings.dtype], kernel, device)
    check_division(config, settings.path, kernel, device, sharding)
    check_experts(config, settings.path, kernel, device, sharding)
    kind = loaded_kind(settings)
    source, model, info = load_base(kind, folders.model, settings, settings.path, device, sharding)
    refuse_partial(info, f"model.path {settings.path}")
    refuse_no_towers(model, settings, f"model.path {settings.path}")
    freeze_towers(model, settings)
    try:
        if sharding is None:
            model.to(device)
            fuse(model, kernel)
        division = division_of(model, sharding)
        copied = bool(settings.lora and settings.lora.modules_to_save)
        found = read_places(model, folders.model) if copied and source is None else None
        new = new_adapter(settings, kind, folders.model, seed, source, sharding)
        adapted = with_adapter(model, settings.lora, new, folders.adapter)
        follow_copies(model, source.places if source is not None else found[1] if found is not None else {})
        divide_model(model, division, source, sharding, kernel)
        policy = Policy(adapted, kernel, scoring)
        policy.unused = tuple(info["unused"])
        if frozen:
            policy.requires_grad_(False)
        elif settings.lora is None or copied:
            policy.digits = digits_of(policy, model, source, folders.model, DTYPES[settings.dtype], found)
        spread(policy, source, sharding, model, kernel)
    except RUN_ERRORS as error:
        refuse_trouble(error, device)
        raise unsupported(settings.path, type(model).__name__, first_line(error)) from error
    if policy.decoder.images is not None:
        policy.decoder.images.cache_bytes = settings.vision_cache_gb * 2**30
    check_policy(policy, settings.path, device)
    if settings.tiled_mlp is not None and not (frozen and policy.decoder.untiled()):
        policy.decoder.tile_mlps(settings.tiled_mlp)
    if settings.matmul is not None and not frozen:
        _train_in_fp8(policy, settings.matmul_exclude_ends)
    if settings.gradient_checkpointing:
        policy.causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if settings.activation_offload and not frozen:
        policy.decoder.keep_activations_on_host(device)
    return policy


def _train_in_fp8(policy: Policy, exclude_ends: int) -> None:
    """Replaces the matmuls after the log-probs were compared with those of transformers, which are not in fp8. As many
    layers as `exclude_ends` at the start and at the end keep their matmuls."""
    assert policy.decoder.attentions or policy.decoder.mixers  # the access finds the recurrent modules
    layers = list(policy.decoder.layers)
    if 2 * exclude_ends >= len(layers):
        raise Refusal.at(
            "model.matmul_exclude_ends",
            f"{exclude_ends} layers at the start and at the end are all {len(layers)} layers of the model, so that no "
            "matmul would be in fp8",
            f"use at most {(len(layers) - 1) // 2}, or remove model.matmul",
            code="out-of-range",
        )
    inner = layers[exclude_ends : len(layers) - exclude_ends]
    found = projections(inner, [mixer.module for mixer in policy.decoder.mixers])
    policy.matmul = "fp8"
    if not train_in_fp8(found.values()):
        raise Refusal.at(
            "model.matmul",
            f"the layers of {type(policy.causal_lm).__name__} have no linear layers of torch that could train in fp8",
            "remove model.matmul",
            code="unsupported-model",
        )


def load_value_model(
    settings: Model,
    path: str,
    device: torch.device,
    kernel: str,
    seed: int,
    *,
    key: str = "critic.path",
    head_init: str = "zeros",
    sharding: Sharding | None = None,
) -> ValueModel:
    """Loads a value model from `path`, which may contain a language model, a reward model or a critic of verl."""
    folders = folders_of(settings.model_copy(update={"path": path}))
    how: dict[str, Any] = {"key": key, "head_init": head_init, "sharding": sharding}
    return build_value_model(settings, folders, device, kernel, seed, name=path, **how)


def with_lora(model: PreTrainedModel, settings: Lora | None, seed: int) -> Any:
    """Returns a PEFT model around `model`, with a new adapter (initialised from `seed`) or the stored one. Without LoRA
    settings returns `model`."""
    return with_adapter(model, settings, seed, stored_adapter(settings))


def refuse_foreign_tokenizer(tokenizer: PreTrainedTokenizerBase, embedding_rows: int, path: str) -> None:
    """Raises `Refusal` if the tokenizer has token ids beyond the embedding. A token id beyond the embedding would cause
    a crash later, or read a wrong row on some devices."""
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= embedding_rows:
        raise Refusal.at(
            f"model.path {path}",
            f"the tokenizer has token {token!r} with id {largest}, but the embedding has {embedding_rows} rows",
            "use the tokenizer the model was trained with, or resize the model's embedding",
            code="other-vocabulary",
        )
