"""Checks mixture-of-experts routers: their load-balancing loss and router noise."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from lockstep.algorithms.token_losses import count_routed, load_balance
from lockstep.errors import Problem, Refusal, first_line
from lockstep.model.check import LENGTHS, RUN_ERRORS, build_miniature, packed_row, tokens
from lockstep.model.decoder import inner_decoder
from lockstep.model.miniature import WORDS
from lockstep.model.text_model import text_config
from lockstep.model.trials import LOAD_BALANCE, ROUTER_NOISE, Unfit, run_trial

# Allowed difference between the load-balancing losses of lockstep and transformers, in fp32.
BALANCE_ERROR = 1e-4
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k")
COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
DROPOUTS = ("dropout", "_pdrop", "dropout_prob", "layerdrop", "drop_rate")


def experts_of_token(config: Any) -> int | None:
    """Returns the number of experts that the router selects per token, or None for a model without experts."""
    text = text_config(config)
    return next((int(getattr(text, name)) for name in CHOSEN if getattr(text, name, None)), None)


def route_bytes(config: Any) -> int:
    """Returns the bytes of the recorded experts of a token (`model/routing.py`), if every layer has experts."""
    layers, chosen = text_config(config).num_hidden_layers, experts_of_token(config) or 0
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = max(getattr(text_config(config), name, None) or 0 for name in names)
    return layers * chosen * (1 if experts <= 256 else 2)


def refuse_router_loss(config: Any, where: str, coefficient: float | None = None) -> None:
    """Raises `Refusal` if the model's config enables a load-balancing loss, but the recipe does not set
    `model.aux_loss_coef`. Also raises `Refusal` if lockstep cannot reproduce the load-balancing loss. `where` names the
    recipe key and the folder."""
    if coefficient is None:
        text = text_config(config)
        default = next((getattr(text, name) for name in COEFFICIENTS if getattr(text, name, None)), 0.0)
        if getattr(text, "output_router_logits", False) and default:
            raise Refusal.at(
                where,
                f"its config.json enables a load-balancing loss (output_router_logits, coefficient {default:g})",
                f"set model.aux_loss_coef={default:g} to train with this loss, or 0 to train without it",
                code="router-loss",
            )
    if not coefficient:
        return

    def attempt() -> Problem | None:
        try:
            _try_balance(config)
        except Unfit as error:
            return Problem(
                where,
                f"model.aux_loss_coef={coefficient:g} is set, but its load-balancing loss is not supported: {error}",
                "set model.aux_loss_coef=0, or use another model",
                code="router-loss",
            )
        return None

    run_trial(LOAD_BALANCE, attempt, config=config)


@torch.no_grad()
def _try_balance(config: Any) -> None:
    """Compares lockstep's load-balancing loss with that of transformers, on a small model."""
    experts = experts_of_token(config)
    if experts is None:
        raise Unfit("it has no experts")
    miniature = build_miniature(config, "sdpa", torch.device("cpu"))
    experts = experts_of_token(miniature.model.config) or experts  # the miniature has fewer
    ids = tokens(LENGTHS[-1], WORDS)
    decoder = miniature.policy.decoder
    decoder.records_router_logits = True
    try:
        miniature.policy(packed_row([ids], torch.device("cpu")))
        found = count_routed(decoder.router_logits, experts, torch.ones(len(ids)))
        ours = float(load_balance(found.chosen_E, found.probs_E, float(found.rows)))
        miniature.model.set_attn_implementation("eager")
        theirs = float(miniature.model(torch.tensor([ids]), use_cache=False, output_router_logits=True).aux_loss)
    except RUN_ERRORS as error:
        raise Unfit(f"transformers returns no load-balancing loss: {first_line(error)}") from error
    if abs(ours - theirs) > BALANCE_ERROR:
        raise Unfit(f"lockstep computes {ours:.5f}, transformers {theirs:.5f}")


def refuse_router_noise(config: Any, where: str) -> None:
    """Raises `Refusal` for a model with router noise. Responses are sampled and scored without noise, and the noise
    would depend on the packing of rows."""
    problem = Problem(
        where,
        "in training its layers use random numbers other than dropout (router noise), so log-probs in training "
        "differ from generation and scoring",
        "set router_jitter_noise and input_jitter_noise to 0 in its config.json; if its routers still sample "
        "experts in training, use another model",
        code="router-noise",
    )
    # A model that does not run is not reported here, because the architecture check reports it.
    with suppress(Unfit):
        run_trial(ROUTER_NOISE, lambda: problem if _is_noisy(config) else None, config=config)


@torch.no_grad()
def _is_noisy(config: Any) -> bool:
    model = build_miniature(_without_dropout(config), "sdpa", torch.device("cpu")).model
    model.set_attn_implementation("eager")
    model.train()
    ids = torch.tensor([tokens(LENGTHS[-1], WORDS)])
    passes = []
    with torch.random.fork_rng(devices=[]):
        for seed in (1, 2):
            torch.default_generator.manual_seed(seed)  # only the CPU generator is forked, so only it may be seeded
            try:
                passes.append(inner_decoder(model)(input_ids=ids, use_cache=False).last_hidden_state)
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
