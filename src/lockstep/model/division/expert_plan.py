"""Finds the experts of a model that expert parallelism divides, refuses unsupported models, and tests the division.

Expert parallelism needs no plan of transformers: every module that stacks its experts can be divided. A small model of
the architecture runs twice with the same random weights, undivided and divided, before weights are loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.device.device_errors import refuse_trouble
from lockstep.errors import Problem, Refusal, first_line
from lockstep.kernels.experts.grouped_experts import stacks_experts
from lockstep.model.check import RUN_ERRORS, build_miniature
from lockstep.model.decoder import decoder_layers, inner_decoder
from lockstep.model.division.tensor_plan import Indivisible, styles_of
from lockstep.model.division.tensor_trial import compare, run_packed
from lockstep.model.policy import Policy
from lockstep.model.quantized.quantized_folder import readable_quantization
from lockstep.model.text_model import model_on_meta
from lockstep.model.trials import EXPERT_PARALLEL, Unfit, hardware, run_trial
from lockstep.parallel.expert import KEY, ExpertGroup, divide_experts
from lockstep.parallel.sharding import Sharding
from lockstep.parallel.tensor import Style, divide

REMEDY = "set parallel.expert_parallel=1 and shard the model instead (parallel.shard)"


def expert_modules(model: Any, ranks: int) -> list[str]:
    """Returns the names of the experts modules in the decoder of a model. Raises `Indivisible` if `ranks` ranks cannot
    divide them."""
    decoder, layers = inner_decoder(model), decoder_layers(model)
    inside = {part for layer in layers for part in layer.modules()}
    found = [name for name, module in decoder.named_modules() if stacks_experts(module) and module in inside]
    if not found:
        raise Indivisible("it has no layers with stacked experts", REMEDY)
    for name in found:
        count = vars(decoder.get_submodule(name))["num_experts"]
        if count % ranks:
            raise Indivisible(f"{name} has {count} experts, not divisible by {ranks}", REMEDY)
    return found


def refuse_undivided_experts(config: Any, folder: str, path: str, expert: int, tensor: int) -> None:
    """Raises `Refusal` if expert parallelism cannot divide the experts of a model. Reads no weights. `path` names the
    model in messages."""
    if expert == 1:
        return
    try:
        if readable_quantization(Path(folder)) is not None:
            raise Indivisible("its files store quantised experts, which cannot be divided", REMEDY)
        expert_modules(model_on_meta(config), expert * tensor)
    except Indivisible as why:
        raise Refusal([_problem(config, path, why)]) from why


def _problem(config: Any, path: str, why: Exception) -> Problem:
    return Problem(KEY, f"{path} ({config.model_type}): {why}", REMEDY, code="indivisible")


def without_experts(styles: dict[str, Style], decoder: nn.Module) -> dict[str, Style]:
    """Returns the styles of tensor parallelism without the experts, which expert parallelism divides."""
    return {name: style for name, style in styles.items() if not stacks_experts(decoder.get_submodule(name))}


def check_experts(config: Any, path: str, kernel: str, device: torch.device, sharding: Sharding | None) -> None:
    """Raises `Refusal` for an architecture that expert parallelism computes wrongly. All ranks must call this
    function."""
    if sharding is None or sharding.expert is None:
        return
    group = sharding.expert

    def attempt() -> Problem | None:
        try:
            try_experts(config, kernel, device, group)
        except (Unfit, Indivisible) as why:
            return _problem(config, path, why)
        return None

    def verified_on_all(verified: bool) -> bool:
        value = torch.tensor([int(verified)], dtype=torch.int32, device=device)
        torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MIN, group=group.mesh.get_group())
        return bool(value.item())

    key = (f"{group.size}x{group.slices}", kernel, *hardware(device))
    run_trial(EXPERT_PARALLEL, attempt, config=config, key=key, agree=verified_on_all)


def try_experts(config: Any, kernel: str, device: torch.device, group: ExpertGroup) -> None:
    """Compares log-probs and gradients of a small model, undivided and divided. All ranks have the same tokens, so the
    gradient of an expert is that of one process times the number of peers."""
    ranks = group.size * group.slices
    one = build_miniature(config, kernel, device, ranks).policy
    model = build_miniature(config, kernel, device, ranks).model
    wanted = run_packed(one, device)
    decoder, names = inner_decoder(model), expert_modules(model, ranks)
    try:
        if group.tensor is not None:
            styles = without_experts(styles_of(model, group.slices), decoder)
            divide(model, decoder, styles, group.tensor)
        divided = set(divide_experts(decoder, names, group).values())
        known = {name for name, parameter in model.named_parameters() if parameter in divided}
        logprobs, gradients = run_packed(Policy(model, kernel).eval(), device)
    except RUN_ERRORS as error:
        refuse_trouble(error, device)
        raise Unfit(f"its experts cannot be divided over {ranks} processes: {first_line(error)}") from error
    gradients = {name: grad / group.size if name in known else grad for name, grad in gradients.items()}
    compare(wanted, (logprobs, gradients), f"with its experts divided over {ranks} processes")
