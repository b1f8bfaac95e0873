"""The keys of `model.lora`: the LoRA adapter that a run trains."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from lockstep.recipe.section import FOLDER, RATE, Effect, Field, Section

INITS = ("default", "gaussian", "orthogonal", "pissa", "loftq")
"""The names of `model.lora.init`. `pissa_niter_N` is the sixth form."""
_ITERATED = re.compile(r"pissa_niter_[1-9]\d*")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def _check_init(value: str) -> str:
    if value in INITS or _ITERATED.fullmatch(value):
        return value
    expected = f"{', '.join(INITS)} or pissa_niter_N with a number N"
    raise PydanticCustomError("literal_error", "must be {expected}", {"expected": expected})


def _check_layers(value: str | list[int] | None) -> str | list[int] | None:
    if isinstance(value, str):
        layer_indices(value)
    return value


def layer_indices(layers: str | list[int]) -> list[int]:
    """Returns the sorted layer indices of `model.lora.layers`, such as `0-11` or `0-3, 8, 10-11`. The ranges include
    both ends."""
    if isinstance(layers, list):
        return sorted(set(layers))
    found: set[int] = set()
    for part in layers.split(","):
        matched = _RANGE.fullmatch(part.strip())
        if matched is None or int(matched[1]) > int(matched[2] or matched[1]):
            why = "must be ranges such as 0-11 or 0-3,8-11, or a list of layer indices; {part} is neither"
            raise PydanticCustomError("layer_ranges", why, {"part": repr(part.strip())})
        found.update(range(int(matched[1]), int(matched[2] or matched[1]) + 1))
    return sorted(found)


class Lora(Section):
    rank: int | None = Field(
        None,
        ge=1,
        description="Rank of the adapter matrices. Default: the rank of the adapter that `model.lora.adapter` names.",
    )
    alpha: float | None = Field(
        None,
        gt=0,
        description="Numerator of the adapter's scale, alpha / rank (with `model.lora.rslora`: alpha / sqrt(rank)). "
        "Default: 2 x rank.",
    )
    rslora: bool = Field(
        False, description="Rank-stabilised LoRA: the scale is alpha / sqrt(rank) instead of alpha / rank."
    )
    dora: bool = Field(
        False,
        description="Weight-decomposed LoRA (DoRA): also trains the norm of each row of an adapted weight. Needs more "
        "time and memory than LoRA.",
    )
    init: Annotated[str, AfterValidator(_check_init)] = Field(
        "default",
        description="Initial values of the adapter matrices A and B: `default` (A random, B zero), `gaussian`, "
        "`orthogonal` (both random, with B A = 0; needs an even rank), `pissa` (the principal singular vectors of the "
        "weight), `pissa_niter_N` (the same, from a faster randomised decomposition with N iterations) or `loftq` (the "
        "principal singular vectors of the quantisation error; needs `model.quantize`).",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the adapter's input.")
    targets: Literal["all-linear"] | list[str] = Field(
        "all-linear",
        description="Linear layers that get an adapter, as `all-linear` (all except the output head) or as a list of "
        "name suffixes, each of which must match at least one layer. The experts of a layer are adapted by the name "
        "of their stacked weights, such as `experts.gate_up_proj`, or by the names of single experts (`w1`, `w2`, "
        "`w3`). Layers that share their weight with another layer (a tied embedding) cannot have an adapter.",
    )
    exclude: str | list[str] | None = Field(
        None,
        description="Layers that get no adapter: name suffixes, or a regular expression that matches full names. "
        "Each suffix or expression must match at least one layer.",
    )
    layers: Annotated[str | list[int] | None, AfterValidator(_check_layers)] = Field(
        None,
        description="Decoder layers that get an adapter, as ranges (`0-11`, `0-3,8-11`; both ends included) or as a "
        "list of indices. Default: all layers.",
    )
    modules_to_save: list[str] = Field(
        [],
        description="Modules that are trained completely, as name suffixes, such as `embed_tokens`, `lm_head` or the "
        "router of a mixture of experts. The run trains a copy of each module, and exports it with the adapter. An "
        "embedding that shares its weight with the output head is refused.",
    )
    lr_ratio: float = Field(
        1.0,
        gt=0,
        description="LoRA+: the learning rate of the matrices B is `optim.lr` x `model.lora.lr_ratio`. The authors "
        "recommend 16 with a lower `optim.lr`. This key adds the group `lora_B` to `optim.groups`; a critic has no "
        "groups.",
        effect=RATE,
    )
    adapter: str | None = Field(
        None,
        description="Adapter to continue training: a PEFT folder, a run that trained an adapter, or a checkpoint of "
        "such a run. The named adapter determines rank, alpha, dropout, layers and the kind of LoRA. The key "
        "`model.adapter` is short for `model.lora.adapter`.",
        effect=FOLDER,
    )
    reference: Literal["base", "start"] = Field(
        "base",
        description="The reference model of a run with an adapter: `base` is the model without an adapter, `start` is "
        "the model with the adapter of `model.lora.adapter` as it was at the start of the run.",
        effect=Effect("blocks", "the loss compares the policy with a different model"),
    )
