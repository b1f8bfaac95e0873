"""Mixtures of experts: what their routers add to training, and what of it cannot be done right."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.algorithms.token_losses import load_balance, routed
from lockstep.errors import Refusal, first_line
from lockstep.model.check import LENGTHS, RUN_ERRORS, Unfit, build_miniature, line_of, tokens
from lockstep.model.miniature import VOCABULARY
from lockstep.model.verified import fingerprint, is_verified, remember

# A forward pass in fp32, and sums of a few hundred tokens.
BALANCE_ERROR = 1e-4
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k")
COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
DROPOUTS = ("dropout", "_pdrop", "dropout_prob", "layerdrop", "drop_rate")


def experts_of_token(config: Any) -> int | None:
    """How many experts a token goes through; None of a model without any."""
    text = config.get_text_config(decoder=True)
    return next((int(getattr(text, name)) for name in CHOSEN if getattr(text, name, None)), None)


def refuse_router_loss(config: Any, where: str, coefficient: float | None = None) -> None:
    """A load-balancing loss that the model asks for and the recipe (`model.aux_loss_coef`) says nothing of, or that
    would not be transformers' own. `where` names the key and its folder."""
    if coefficient is None:
        text = config.get_text_config(decoder=True)
        asked = next((getattr(text, name) for name in COEFFICIENTS if getattr(text, name, None)), 0.0)
        if getattr(text, "output_router_logits", False) and asked:
            raise Refusal.at(
                where,
                f"its config.json asks for a load-balancing loss (output_router_logits, coefficient {asked:g})",
                f"set model.aux_loss_coef={asked:g} to train with it, or 0 to train without",
            )
    if not coefficient:
        return
    key = fingerprint(config, "balance")
    if is_verified(key):
        return
    try:
        _try_balance(config)
    except Unfit as error:
        raise Refusal.at(
            where,
            f"model.aux_loss_coef={coefficient:g} is set, and its load-balancing loss cannot be had: {error}",
            "set model.aux_loss_coef=0, or use another model",
        ) from error
    remember(key)


@torch.no_grad()
def _try_balance(config: Any) -> None:
    """Ours beside transformers' own, of a miniature."""
    experts = experts_of_token(config)
    if experts is None:
        raise Unfit("it has no experts")
    miniature = build_miniature(config, "sdpa", torch.device("cpu"))
    experts = experts_of_token(miniature.model.config) or experts  # the miniature has fewer
    ids = tokens(LENGTHS[-1], VOCABULARY)
    decoder = miniature.policy.decoder
    decoder.tells_routers = True
    try:
        miniature.policy(line_of([ids], torch.device("cpu")))
        found = routed(decoder.router_logits, experts, torch.ones(len(ids)))
        ours = float(load_balance(found.chosen_E, found.probs_E, float(found.rows)))
        miniature.model.set_attn_implementation("eager")
        theirs = float(miniature.model(torch.tensor([ids]), use_cache=False, output_router_logits=True).aux_loss)
    except RUN_ERRORS as error:
        raise Unfit(f"transformers tells none: {first_line(error)}") from error
    if abs(ours - theirs) > BALANCE_ERROR:
        raise Unfit(f"ours is {ours:.5f}, transformers' own {theirs:.5f}")


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
            torch.default_generator.manual_seed(seed)  # not the generators of devices, which are not forked
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
