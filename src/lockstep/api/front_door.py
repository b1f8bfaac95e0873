"""`lockstep.load` and `lockstep.compare`: the functions that the package exports."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

from lockstep.api.handle import Handle
from lockstep.api.losses import checked
from lockstep.data.encode.chat_template import with_template
from lockstep.device.base import Device
from lockstep.device.select import select
from lockstep.errors import Refusal
from lockstep.model.load import load_config, load_policy, load_tokenizer, refuse_foreign_tokenizer
from lockstep.model.load_folder import DTYPES
from lockstep.model.policy import Policy
from lockstep.model.resolve import model_folder
from lockstep.model.router import refuse_router_loss, refuse_router_noise
from lockstep.model.text_model import text_config
from lockstep.model.weights import biases_and_norms
from lockstep.parallel.world import World
from lockstep.parity.compare.compare_runs import compare as compare_logs
from lockstep.parity.compare.comparison import Comparison
from lockstep.parity.compare.logs import read_log
from lockstep.recipe.keys_data import Data
from lockstep.recipe.keys_optim import Optim
from lockstep.recipe.lora_checks import init_problems, with_lora_rate
from lockstep.recipe.schema import Lora, Model
from lockstep.train.optim import LossScale, Optimizer
from lockstep.train.step import Learner

# The initial loss scale is small, because losses are sums over tokens, whose gradients are larger than those of means.
_FIRST_SCALE = 2.0**7


def load(
    model: str | Path,
    *,
    device: str = "auto",
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
    lora: int | Lora | None = None,
    quantize: Literal["nf4", "int8", "fp8"] | None = None,
    lr: float = 1e-5,
    weight_decay: float = 0.0,
    clip: float | None = 1.0,
    reference: bool | str | Path = False,
    template: str | Path = "auto",
    batch_tokens: int = 4096,
    gradient_checkpointing: bool = False,
    activation_offload: bool = False,
    tiled_mlp: int | None = None,
    seed: int = 0,
) -> Handle:
    """Loads the model of a Hugging Face folder (or of a run folder) and returns a handle on it.

    `lora` is a rank or a `Lora` object with the recipe's settings; without it, all weights are trained. `quantize`
    stores the frozen weights below an adapter in 4 or 8 bits; `dtype` is the type of all computations. `clip` is the
    maximum gradient norm. `reference` = True keeps a frozen copy of the model for reference log-probabilities; a path
    loads the reference from that folder. With `lora`, the model without its adapter is the reference and needs no copy.
    `template` has the values of the recipe key `data.template`: `auto` turns a text into a user message if the
    tokenizer has a chat template; other values are `none`, `chatml`, `llama3`, `qwen` and the path of a `.jinja` file.
    `batch_tokens` limits the tokens of a micro-batch. Gradients do not depend on `batch_tokens`,
    `gradient_checkpointing` (recomputes activations), `activation_offload` (keeps activations in host memory) and
    `tiled_mlp` (computes the MLPs for so many tokens at a time).
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise Refusal.at(
            "lockstep.load",
            "a handle uses one process on one device",
            "use lockstep.train under torchrun",
            code="one-process-only",
        )
    chosen = select(device)
    folder = model_folder(str(model))
    adapter = _adapter(lora)
    _refuse_format(quantize, adapter)
    _refuse_dtype(dtype, chosen)
    settings = checked(
        Model,
        path=folder,
        dtype=dtype,
        lora=adapter,
        quantize=quantize,
        gradient_checkpointing=gradient_checkpointing,
        activation_offload=activation_offload,
        tiled_mlp=tiled_mlp,
    )
    data = checked(Data, train=["-"], template=str(template))
    tokenizer, config = with_template(load_tokenizer(folder), data), load_config(folder)
    refuse_foreign_tokenizer(tokenizer, text_config(config).vocab_size, folder)
    refuse_router_loss(config, folder)
    refuse_router_noise(config, folder)
    chosen.use(0)
    torch_device = chosen.torch_device(0)
    policy = load_policy(settings, torch_device, chosen.attention, seed)
    policy.train()
    frozen = None
    if reference is not False and not (reference is True and adapter is not None):
        path = folder if reference is True else str(reference)
        frozen = _frozen(settings, path, chosen, torch_device, text_config(config).vocab_size)
    optim = with_lora_rate(checked(Optim, lr=lr, weight_decay=weight_decay, clip=clip), adapter)
    optimizer = Optimizer(
        policy.trainable(),
        optim,
        masters=dtype != "fp32",
        fused=chosen.fused_optimizer,
        kernel=chosen.adamw,
        spared=biases_and_norms(policy.stored),
    )
    policy.digits.into(optimizer.local_masters())
    scale = LossScale(_FIRST_SCALE) if dtype == "fp16" else None
    learner = Learner(policy, optimizer, torch_device, World(), scale)
    return Handle(settings, tokenizer, learner, frozen, chosen, data, lr, batch_tokens, seed)


def _adapter(lora: int | Lora | None) -> Lora | None:
    adapter = checked(Lora, rank=lora) if isinstance(lora, int) else lora
    if adapter is not None and adapter.rank is None and adapter.adapter is None:
        raise Refusal.at(
            "lora.rank",
            "must be set",
            "set the rank, for example to 8; or set lora.adapter to start from an existing adapter",
            code="not-set",
        )
    if adapter is not None and adapter.alpha is None and adapter.rank is not None:
        adapter = adapter.model_copy(update={"alpha": 2.0 * adapter.rank})
    return adapter


def _refuse_format(quantize: str | None, lora: Lora | None) -> None:
    if quantize is not None and lora is None:
        raise Refusal.at(
            "quantize",
            f"{quantize} weights are frozen, and all weights would be trained",
            "set lora, for example lora=16, to train an adapter; or remove quantize",
            code="needs-key",
        )
    if lora is not None and (problems := list(init_problems(lora, quantize))):
        raise Refusal(problems)


def _refuse_dtype(dtype: str, device: Device) -> None:
    if dtype not in DTYPES:
        raise Refusal.at("dtype", f"{dtype!r} is not supported", f"use one of {', '.join(DTYPES)}", code="unknown-name")
    if not device.supports(DTYPES[dtype]):
        usable = [name for name, kind in DTYPES.items() if device.supports(kind)]
        raise Refusal.at(
            "dtype", f"{device.name} does not support {dtype}", f"use {' or '.join(usable)}", code="unsupported-dtype"
        )


def _frozen(settings: Model, path: str, device: Device, torch_device: torch.device, vocabulary: int) -> Policy:
    other = text_config(load_config(path)).vocab_size
    if other != vocabulary:
        raise Refusal.at(
            f"reference {path}",
            f"has a vocabulary of {other:,} tokens, and the model has {vocabulary:,}",
            "use a reference with the same tokenizer",
            code="other-vocabulary",
        )
    alone = settings.model_copy(update={"path": path, "lora": None, "quantize": None, "activation_offload": False})
    policy = load_policy(alone, torch_device, device.attention, seed=0)
    policy.requires_grad_(False)
    return policy


__all__ = ["Comparison", "compare"]


def compare(
    a: str | Path,
    b: str | Path,
    *,
    repeats: Sequence[str | Path] = (),
    metrics: Sequence[str] = (),
    bars: Mapping[str, float] | None = None,
    shift: int = 0,
    steps: tuple[int, int] | None = None,
) -> Comparison:
    """Compares two runs (run folders, or logs of other frameworks). The result has `.verdict` and `.reason`.

    For each compared metric, `.bar_result` says whether the error is within the threshold, and `.test_result` is the
    result of the statistical test. `repeats` are repetitions of run `a` or `b`; they measure the noise between
    identical runs. `steps` are the first and last step to compare. The other arguments are the options of `lockstep
    compare`.
    """
    first, second, *others = (read_log(str(source), {}) for source in (a, b, *repeats))
    return compare_logs(first, second, others, metrics, bars, shift, steps)
