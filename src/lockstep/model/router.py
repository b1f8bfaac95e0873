"""Mixtures of experts: what their routers add to training, and what of it cannot be done right here."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.errors import Refusal
from lockstep.model.check import LENGTHS, RUN_ERRORS, Unfit, build_miniature, tokens
from lockstep.model.miniature import VOCABULARY
from lockstep.model.verified import fingerprint, is_verified, remember

COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
DROPOUTS = ("dropout", "_pdrop", "dropout_prob", "layerdrop", "drop_rate")


def refuse_router_loss(config: Any, where: str) -> None:
    """A loss for balanced experts is a product of sums over the whole update; single micro-batches cannot know it.

    `where` names the key and its folder.
    """
    text = config.get_text_config(decoder=True)
    coefficient = next((getattr(text, name) for name in COEFFICIENTS if getattr(text, name, None)), 0.0)
    if getattr(text, "output_router_logits", False) and coefficient:
        raise Refusal.at(
            where,
            f"its config.json asks for a load-balancing loss (output_router_logits, coefficient {coefficient:g}), "
            "which is not part of any method here",
            "set output_router_logits to false in its config.json to train without it",
        )


def refuse_router_noise(config: Any, where: str) -> None:
    """Responses are sampled and scored without it, and what is drawn depends on how rows are packed."""
    key = fingerprint(config, "noise")
    if is_verified(key):
        return
    try:
        noisy = _is_noisy(config)
    except Unfit:
        # The check at load says what is wrong with it.
        return
    if noisy:
        raise Refusal.at(
            where,
            "in training its layers draw random numbers besides dropout (router noise), so that log-probs in training "
            "are not those of generation and scoring",
            "set router_jitter_noise and input_jitter_noise to 0 in its config.json; where its routers sample experts "
            "in training all the same, use another model",
        )
    remember(key)


@torch.no_grad()
def _is_noisy(config: Any) -> bool:
    model = build_miniature(_without_dropout(config), "sdpa", torch.device("cpu")).model
    model.set_attn_implementation("eager")
    model.train()
    ids = torch.tensor([tokens(LENGTHS[-1], VOCABULARY)])
    passes = []
    with torch.random.fork_rng(devices=[]):
        for seed in (1, 2):
            torch.manual_seed(seed)
            try:
                passes.append(model(input_ids=ids, use_cache=False).logits)
            except RUN_ERRORS as error:
                raise Unfit(str(error)) from error
    return not torch.equal(*passes)


def _without_dropout(config: Any) -> Any:
    data = config.to_dict()
    _clear(data)
    return type(config).from_dict(data)


def _clear(data: dict[str, Any]) -> None:
    for name, value in data.items():
        if isinstance(value, dict):
            _clear(value)
        elif str(name).endswith(DROPOUTS) and isinstance(value, float):
            data[name] = 0.0
