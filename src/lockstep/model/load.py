"""Loads a policy from a model path: dtype, LoRA, sharding, checkpointing, and checks of the folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lockstep.device.device_errors import refuse_trouble
from lockstep.errors import Refusal, first_line
from lockstep.kernels.attention.interface import ATTENTION, register_attention
from lockstep.kernels.bf16_matmul import prepare_products
from lockstep.kernels.fused import fuse
from lockstep.model.adapter import put_adapter, start_from
from lockstep.model.check import RUN_ERRORS, check_architecture, check_policy, enter, unsupported
from lockstep.model.decoder import inner_decoder
from lockstep.model.policy import Policy, Scoring
from lockstep.model.pretrained import pretrained, refuse_not_finite, refuse_partial, tokenizer_of, unused_weights
from lockstep.model.resolve import model_folder
from lockstep.model.streamed import Streamed, adapters_on_host, streamed
from lockstep.model.tensor_plan import styles_of, with_adapters
from lockstep.model.tensor_trial import check_division
from lockstep.model.weights import digits_of
from lockstep.parallel.sharding import Sharding, shard, unit_gathered
from lockstep.parallel.tensor import Style, divide
from lockstep.parallel.world import refused_together
from lockstep.recipe.schema import Lora, Model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    return tokenizer_of(model_folder(path), f"model.path {path}")


def load_config(path: str) -> Any:
    from transformers import AutoConfig

    return pretrained(AutoConfig, model_folder(path), f"model.path {path}", "its config.json")


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
    """The model of the recipe, on `device` or sharded, compared with the forward pass of transformers."""
    kernel = kernel_of(settings, kernel)
    check_architecture(load_config(settings.path), settings.path, DTYPES[settings.dtype], kernel, device)
    check_division(load_config(settings.path), settings.path, kernel, device, sharding)
    from transformers import AutoModelForCausalLM

    source = stream_transformers(AutoModelForCausalLM, settings.path, settings.dtype) if sharding is not None else None
    if source is None:
        model, info = load_transformers(AutoModelForCausalLM, settings.path, settings.dtype)
        refuse_partial(info, f"model.path {settings.path}")
        unused = tuple(info["unused"])
    else:
        model, unused = source.model, source.unused
    try:
        if sharding is None:
            model.to(device)
            fuse(model, kernel)
        styles = division_of(model, sharding)
        adapted = with_lora(model, settings.lora, seed)
        divide_model(model, styles, source, sharding)
        policy = Policy(adapted, kernel, scoring)
        policy.unused = unused
        if frozen:
            policy.requires_grad_(False)
        elif settings.lora is None:
            policy.digits = digits_of(policy, model, source, model_folder(settings.path), DTYPES[settings.dtype])
        spread(policy, source, sharding, model, kernel)
    except RUN_ERRORS as error:
        refuse_trouble(error, device)
        raise unsupported(settings.path, type(model).__name__, first_line(error)) from error
    check_policy(policy, settings.path, device)
    if settings.gradient_checkpointing:
        policy.causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if settings.activation_offload and not frozen:
        policy.decoder.keep_activations_on_host(device)
    return policy


def spread(root: Any, source: Streamed | None, sharding: Sharding | None, model: Any, kernel: str) -> None:
    """Shard a policy or value model around `model` layer by layer, from the files or from the host, and fuse its
    operators. Without sharding this is already done."""
    if sharding is None:
        return
    if source is None:
        shard(root, root.layers(), sharding)
    else:
        with refused_together("weights"):
            source.shard(root, root.layers(), sharding)
    enter(root, sharding.device)
    # Fused operators are tested with the weights of each module.
    with unit_gathered(root):
        fuse(model, kernel, unit_gathered)


def division_of(model: PreTrainedModel, sharding: Sharding | None) -> dict[str, Style]:
    """The tensor-parallel style of each module. Call it before adapters wrap the modules."""
    return {} if sharding is None or sharding.tensor is None else styles_of(model, sharding.tensor.size)


def divide_model(
    model: PreTrainedModel, styles: dict[str, Style], source: Streamed | None, sharding: Sharding | None
) -> None:
    """Split the model over the ranks of a tensor-parallel group. Call it before anything reads its heads."""
    if sharding is None or sharding.tensor is None:
        return
    decoder = inner_decoder(model)
    replaced = divide(model, decoder, with_adapters(decoder, styles), sharding.tensor)
    if source is not None:
        source.replaced(replaced)


def kernel_of(settings: Model, kernel: str) -> str:
    return "sdpa" if settings.attention == "sdpa" else kernel


def load_transformers(kind: Any, path: str, dtype: str, **more: Any) -> tuple[Any, dict[str, Any]]:
    """A model of an Auto class with our attention, and the loading info of transformers."""
    register_attention()
    prepare_products(DTYPES[dtype])
    config = load_config(path)
    for name, value in more.items():
        setattr(config, name, value)
    how = {"dtype": DTYPES[dtype], "attn_implementation": ATTENTION, "output_loading_info": True}
    where = f"model.path {path}"
    model, info = pretrained(kind, model_folder(path), where, "its weights", config=config, **how)
    refuse_not_finite(dict(model.named_parameters()), where)
    return model, {**info, "unused": unused_weights(model, info["unexpected_keys"], where)}


def stream_transformers(kind: Any, path: str, dtype: str) -> Streamed | None:
    """The same without weights, which are read from the files when it is sharded; None if that is not possible."""
    register_attention()
    prepare_products(DTYPES[dtype])
    config = load_config(path)
    how = {"dtype": DTYPES[dtype], "attn_implementation": ATTENTION}
    folder, where = model_folder(path), f"model.path {path}"
    return streamed(lambda: kind.from_config(config, trust_remote_code=False, **how), folder, where)


def with_lora(model: PreTrainedModel, settings: Lora | None, seed: int) -> Any:
    """The model, or a PEFT model around it, with a new adapter (from `seed`) or the stored one."""
    if settings is None:
        return model
    adapted = put_adapter(model, settings, seed, "CAUSAL_LM")
    if settings.adapter is not None:
        with adapters_on_host():
            start_from(adapted, settings.adapter)
    return adapted


def refuse_foreign_tokenizer(tokenizer: PreTrainedTokenizerBase, embedding_rows: int, path: str) -> None:
    """Refuse token ids beyond the embedding: they crash later, or read a wrong row on some devices."""
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= embedding_rows:
        raise Refusal.at(
            f"model.path {path}",
            f"the tokenizer has token {token!r} with id {largest}, but the embedding has {embedding_rows} rows",
            "use the tokenizer the model was trained with, or resize the model's embedding",
            code="other-vocabulary",
        )
