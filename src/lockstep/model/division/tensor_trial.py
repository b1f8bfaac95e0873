"""Checks tensor parallelism on a small model before weights are loaded.

The plan comes from transformers, and the code of a model may not work with a subset of the heads. So a small model of
the architecture runs twice with the same random weights: on one rank, and split over the ranks of the group.
"""

from __future__ import annotations

from typing import Any

import torch

from lockstep.device.device_errors import refuse_trouble
from lockstep.errors import Problem, first_line
from lockstep.model.check import LENGTHS, RUN_ERRORS, build_miniature, packed_row, tokens, weights_of
from lockstep.model.decoder import inner_decoder
from lockstep.model.division.tensor_plan import KEY, REMEDY, Indivisible, styles_of
from lockstep.model.miniature import WORDS
from lockstep.model.policy import Policy
from lockstep.model.trials import TENSOR_PARALLEL, Unfit, hardware, run_trial
from lockstep.parallel.sharding import Sharding, whole
from lockstep.parallel.tensor import TensorGroup, divide

# Tolerances in fp32: absolute error of log-probs, and error of a gradient relative to its norm. A gradient norm below
# GRADIENT_FLOOR times the largest norm is replaced by GRADIENT_FLOOR times the largest norm.
LOGPROB_ERROR, GRADIENT_ERROR, GRADIENT_FLOOR = 1e-4, 1e-3, 1e-3


def check_division(config: Any, path: str, kernel: str, device: torch.device, sharding: Sharding | None) -> None:
    """Raises `Refusal` for an architecture that tensor parallelism computes wrongly. All ranks of the group must call
    this function."""
    if sharding is None or sharding.tensor is None:
        return
    group = sharding.tensor

    def attempt() -> Problem | None:
        try:
            try_division(config, kernel, device, group)
        except (Unfit, Indivisible) as unfit:
            return Problem(KEY, f"{path} ({config.model_type}): {unfit}", REMEDY, code="indivisible")
        return None

    def verified_on_all(verified: bool) -> bool:
        return bool(group.least(int(verified), device))

    key = (str(group.size), kernel, *hardware(device))
    run_trial(TENSOR_PARALLEL, attempt, config=config, key=key, agree=verified_on_all)


def try_division(config: Any, kernel: str, device: torch.device, group: TensorGroup) -> None:
    one = build_miniature(config, kernel, device, group.size).policy
    model = build_miniature(config, kernel, device, group.size).model
    wanted = run_packed(one, device)
    try:
        divide(model, inner_decoder(model), styles_of(model, group.size), group)
        found = run_packed(Policy(model, kernel).eval(), device)
    except RUN_ERRORS as error:
        refuse_trouble(error, device)
        raise Unfit(f"it cannot be run divided over {group.size} processes: {first_line(error)}") from error
    compare(wanted, found, f"divided over {group.size} processes")


# The log-probs of a packed row, and the full gradient of each parameter.
Results = tuple[torch.Tensor, dict[str, torch.Tensor]]


def compare(one: Results, several: Results, how: str) -> None:
    """Raises `Unfit` if the results of a divided model differ from those of one process. `how` says how it is
    divided."""
    (wanted, gradients), (found, divided) = one, several
    difference = float((found - wanted).abs().max())
    if not difference <= LOGPROB_ERROR:
        raise Unfit(f"{how} its log-probs differ from those of one process by {difference:.2g}")
    least = GRADIENT_FLOOR * max(float(gradient.norm()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        off = float((divided[name] - gradient).norm()) / max(float(gradient.norm()), least)
        if not off <= GRADIENT_ERROR:
            raise Unfit(f"{how} the gradient of {name} is off by {off:.2g} of its norm")


def run_packed(policy: Policy, device: torch.device) -> Results:
    """Runs forward and backward of a packed row."""
    line = packed_row([tokens(length, WORDS) for length in LENGTHS], device)
    with torch.enable_grad():
        logprobs: torch.Tensor = policy(line).logprobs_K
        (logprobs * weights_of(len(logprobs), logprobs.device)).sum().backward()
    parameters = policy.causal_lm.named_parameters()
    return logprobs.detach(), {name: whole(p.grad) for name, p in parameters if p.grad is not None}
