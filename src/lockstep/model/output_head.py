"""The head of a causal language model as its configuration describes it: what stands between states and logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.kernels.logprob import Head

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# By the beginning of a model's type, since one name can mean opposite things: what its logits are multiplied by.
FACTORS: dict[str, str] = {
    "cohere": "logit_scale",
    "falcon_h1": "lm_head_multiplier",
    "hyperclovax": "logits_scaling",
    "muse_": "output_multiplier",
}
# ... and what they are divided by (or the states before the projection, which comes to the same).
DIVISORS: dict[str, str] = {
    "granite": "logits_scaling",
    "inkling": "logits_mup_width_multiplier",
    "minicpm3": "logits_scaling",
}
# Soft caps mean the same wherever they are found.
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def output_head(model: PreTrainedModel) -> Head:
    """The projection with the scale and the soft cap of its model.

    A model whose logits are made in yet another way is told apart by the check of a loaded model.
    """
    config = model.config.get_text_config()
    projection: Any = model.get_output_embeddings()
    caps = [cap for cap in (getattr(config, name, None) for name in CAPS) if cap is not None]
    return Head(projection.weight, projection.bias, _scale(config), float(caps[0]) if caps else None)


def _scale(config: Any) -> float:
    family = config.model_type
    for prefix, name in FACTORS.items():
        if family.startswith(prefix) and getattr(config, name, None) is not None:
            return float(getattr(config, name))
    for prefix, name in DIVISORS.items():
        if family.startswith(prefix) and getattr(config, name, None) is not None:
            return 1.0 / float(getattr(config, name))
    return 1.0
